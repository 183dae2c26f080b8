# OpenWebText medium, heavy ball, Lie-Trotter: Nesterov without the lookahead (YuriiFormer).
# No figure to match; expect slightly more than owt_medium_lt_nag (2.702).
base = 'base_owt_medium.py'

update = 'polyak'
out_dir = 'out/owt_medium_polyak'
