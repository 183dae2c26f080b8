# The baseline of the demo: the plain GPT block. Ours, in no paper.
# Compare with demo_lt_nag, which reads the same batches.
base = 'base_demo.py'

update = 'gd'
out_dir = 'out/demo_gd'
