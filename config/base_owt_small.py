# What the small OpenWebText runs of the YuriiFormer paper share (owt_*.py); GPT-2 124M's shape.
dataset = 'openwebtext'

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # GPT-2's 50,257 rounded up to a multiple of 64
dropout = 0.0
bias = False

batch_size = 12
# 480 sequences = 491,520 tokens a step; 40 = 5 on each of 8 GPUs
gradient_accumulation_steps = 480 // batch_size
max_iters = 30000  # 14.7B tokens, 1.6 epochs
warmup_iters = max_iters // 10

optimizer = 'muon'  # for the matrices inside the layers, AdamW for everything else
muon_lr = 0.004
learning_rate = 6e-4
min_lr = learning_rate / 10
beta1 = 0.9
beta2 = 0.95
weight_decay = 0.1  # embeddings; norms and scalars have none
grad_clip = 1.0
