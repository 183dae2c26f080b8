# Shakespeare, character by character, on a laptop's CPU: the size and length of the run in
# nanoGPT's README, which reports a validation loss of 1.88.
# With Muon it is 1.62; nanoGPT's own recipe, --optimizer=adamw --muon_lr=None, gives 1.886 (two
# seeds).
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

optimizer = 'muon'
muon_lr = 0.02
learning_rate = 1e-3  # small networks stand more
min_lr = learning_rate / 10
beta2 = 0.99  # few tokens a step: average over more steps
