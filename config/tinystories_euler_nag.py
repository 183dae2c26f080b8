# TinyStories small, Nesterov, Euler (YuriiFormer).
# No figure to match; expect more than tinystories_lt_nag (1.078).
base = 'base_tinystories.py'

update = 'euler_nag'
out_dir = 'out/tinystories_euler_nag'
