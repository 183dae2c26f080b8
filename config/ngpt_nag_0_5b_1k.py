# Ours, in no paper: Nesterov momentum on the sphere, with the size and recipe of ngpt_0_5b_1k and
# four more scalars a layer. No figure to match.
base = 'ngpt_0_5b_1k.py'

update = 'ngpt_nag'
out_dir = 'out/ngpt_nag_0_5b_1k'
