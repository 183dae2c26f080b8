# The demo of YuriiFormer: Nesterov, Lie-Trotter. Ours, in no paper.
# Expect a lower validation loss than demo_gd's.
base = 'base_demo.py'

update = 'lt_nag'
out_dir = 'out/demo_lt_nag'
