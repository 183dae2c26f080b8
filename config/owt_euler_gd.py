# OpenWebText small, gradient descent, Euler: attention and MLP in parallel (YuriiFormer).
# No figure to match; expect more than owt_gd (2.990).
base = 'base_owt_small.py'

update = 'euler_gd'
out_dir = 'out/owt_euler_gd'
