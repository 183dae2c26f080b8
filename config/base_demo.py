# What the demo runs share: a small model on the source of Python's standard library, character by
# character; minutes on a CPU.
dataset = 'pystdlib_char'

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64

batch_size = 6
gradient_accumulation_steps = 2  # 12 sequences a step, also for two processes
max_iters = 1000
eval_interval = 200
eval_iters = 20

optimizer = 'muon'
muon_lr = 0.02
learning_rate = 3e-3  # the best of 6e-4, 1.5e-3 and 3e-3 for gd as for lt_nag (400 steps)
