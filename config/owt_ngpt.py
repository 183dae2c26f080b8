# Ours, in no paper: nGPT in the shape of owt_gd (12 layers, d=768), on its batches and for as
# many steps, with the optimizer of the nGPT paper. No figure to match.
base = 'base_ngpt.py'

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # GPT-2's 50,257 rounded up to a multiple of 64

batch_size = 12
gradient_accumulation_steps = 480 // batch_size  # as base_owt_small.py
max_iters = 30000
out_dir = 'out/owt_ngpt'
