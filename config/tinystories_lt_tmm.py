# TinyStories small, triple momentum, Lie-Trotter (Momentum Streams, 2026).
# Published: validation loss 1.1272 +- 0.0013 over 3 seeds, where gd has 1.1578 +- 0.0028.
base = 'base_tinystories.py'

update = 'lt_tmm'
out_dir = 'out/tinystories_lt_tmm'
