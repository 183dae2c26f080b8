# OpenWebText small, triple momentum, Lie-Trotter (Momentum Streams, 2026).
# Published: best validation loss 2.934, where gd has 3.008 and lt_nag 2.941.
# 163,812,192 parameters.
base = 'base_owt_small.py'

update = 'lt_tmm'
out_dir = 'out/owt_lt_tmm'
