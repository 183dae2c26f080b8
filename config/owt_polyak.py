# OpenWebText small, heavy ball, Lie-Trotter: Nesterov without the lookahead (YuriiFormer).
# No figure to match; expect slightly more than owt_lt_nag (2.920).
base = 'base_owt_small.py'

update = 'polyak'
out_dir = 'out/owt_polyak'
