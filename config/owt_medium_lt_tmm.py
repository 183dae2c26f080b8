# OpenWebText medium, triple momentum, Lie-Trotter (Momentum Streams, 2026).
# No figure to match at this size; expect about owt_medium_lt_nag (2.702).
base = 'base_owt_medium.py'

update = 'lt_tmm'
out_dir = 'out/owt_medium_lt_tmm'
