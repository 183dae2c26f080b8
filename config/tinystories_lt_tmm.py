# TinyStories small, triple momentum, Lie-Trotter (Momentum Streams, 2026).
# No figure to match on TinyStories; on OpenWebText it is slightly better than lt_nag.
base = 'base_tinystories.py'

update = 'lt_tmm'
out_dir = 'out/tinystories_lt_tmm'
