# nGPT 1B (1,025.6M in matrices), context 4k: the loss of a GPT in 10 times fewer steps.
base = 'ngpt_0_5b_4k.py'

n_layer = 36
n_head = 20
n_embd = 1280
out_dir = 'out/ngpt_1b_4k'
