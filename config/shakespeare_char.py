# Shakespeare by character on a laptop's CPU: the run of nanoGPT's README, validation loss about 1.88 in minutes.
update = 'gd'
dataset = 'shakespeare_char'
out_dir = 'out/shakespeare_char'

eval_interval = 250
eval_iters = 20
always_save_checkpoint = False  # keep the best: it overfits in the end

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64
dropout = 0.0

batch_size = 12
gradient_accumulation_steps = 1
max_iters = 2000
warmup_iters = 100

optimizer = 'adamw'
learning_rate = 1e-3  # small networks stand more
min_lr = learning_rate / 10
beta2 = 0.99  # few tokens a step: average over more steps
