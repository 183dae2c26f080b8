# OpenWebText medium, gradient descent, Euler: attention and MLP in parallel (YuriiFormer).
# No figure to match; expect more than owt_medium_gd.
base = 'base_owt_medium.py'

update = 'euler_gd'
out_dir = 'out/owt_medium_euler_gd'
