# TinyStories small, heavy ball, Lie-Trotter: Nesterov without the lookahead (YuriiFormer).
# No figure to match; expect slightly more than tinystories_lt_nag (1.078).
base = 'base_tinystories.py'

update = 'polyak'
out_dir = 'out/tinystories_polyak'
