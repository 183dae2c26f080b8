# OpenWebText medium, Nesterov, Euler (YuriiFormer).
# No figure to match; expect more than owt_medium_lt_nag (2.702).
base = 'base_owt_medium.py'

update = 'euler_nag'
out_dir = 'out/owt_medium_euler_nag'
