# TinyStories small, gradient descent, Euler: attention and MLP in parallel (YuriiFormer).
# No figure to match; expect more than tinystories_gd (1.106).
base = 'base_tinystories.py'

update = 'euler_gd'
out_dir = 'out/tinystories_euler_gd'
