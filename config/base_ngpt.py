# What the nGPT runs share (arXiv 2410.01131): AdamW for everything, no weight decay, no warmup,
# cosine schedule to 0.
# Published: the loss of a GPT in 4, 10, 20 times fewer steps at context 1k, 4k, 8k, for 0.5B and
# 1B parameters.
# The paper's LLaMA-like tokenizer of 32,000 entries is not shipped: with GPT-2's, add
# --vocab_size=50304.
update = 'ngpt'
dataset = 'openwebtext'
vocab_size = 32000

optimizer = 'adamw'
learning_rate = 15e-4  # at context 1k 30e-4 is used as well
min_lr = 0.0
warmup_iters = 0
weight_decay = 0.0
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
