# Ours, in no paper: Nesterov momentum on the sphere, otherwise owt_ngpt. No figure to match.
base = 'owt_ngpt.py'

update = 'ngpt_nag'
out_dir = 'out/owt_ngpt_nag'
