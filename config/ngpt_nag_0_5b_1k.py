# Ours, in no paper: Nesterov momentum on the sphere at the size and with the recipe of
# ngpt_0_5b_1k, four more scalars a layer. No figure to match.
base = 'ngpt_0_5b_1k.py'

update = 'ngpt_nag'
out_dir = 'out/ngpt_nag_0_5b_1k'
