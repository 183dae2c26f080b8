# OpenWebText small, Nesterov, Euler (YuriiFormer).
# No figure to match; expect more than owt_lt_nag (2.920).
base = 'base_owt_small.py'

update = 'euler_nag'
out_dir = 'out/owt_euler_nag'
