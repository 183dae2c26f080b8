# Shakespeare, character by character, on one GPU: nanoGPT's baby GPT, validation loss about 1.47.
base = 'shakespeare_char.py'

out_dir = 'out/shakespeare_char_baby'
eval_iters = 200

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
dropout = 0.2

batch_size = 64
max_iters = 5000

optimizer = 'adamw'  # nanoGPT's
muon_lr = None
