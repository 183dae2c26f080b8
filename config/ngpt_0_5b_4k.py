# nGPT 0.5B (468.2M in matrices), context 4k: the loss of a GPT in 10 times fewer steps.
base = 'base_ngpt.py'

n_layer = 24
n_head = 16
n_embd = 1024
block_size = 4096

batch_size = 2
gradient_accumulation_steps = 512 // batch_size  # 512 sequences a step; 256 = 32 on each of 8 GPUs
max_iters = 40 * 2**30 // (512 * block_size)  # our choice of length: 42.9B tokens at every context
out_dir = 'out/ngpt_0_5b_4k'
