# GPT-2 124M on OpenWebText, AdamW for everything: nanoGPT's recipe.
# It ends at a validation loss of about 2.85.
update = 'gd'
dataset = 'openwebtext'
out_dir = 'out/gpt2_124m'

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # GPT-2's 50,257 rounded up to a multiple of 64
dropout = 0.0
bias = False

batch_size = 12
gradient_accumulation_steps = 5 * 8  # 12 x 40 x 1024 = 491,520 tokens a step; 5 on each of 8 GPUs
max_iters = 600000  # 295B tokens
lr_decay_iters = max_iters
warmup_iters = 2000

optimizer = 'adamw'
learning_rate = 6e-4
min_lr = learning_rate / 10
beta1 = 0.9
beta2 = 0.95
weight_decay = 0.1
grad_clip = 1.0
