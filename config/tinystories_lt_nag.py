# TinyStories small, Nesterov, Lie-Trotter: the headline model (YuriiFormer).
# Published: best validation loss 1.078, final 1.090, training 0.896 at the end;
# an independent reproduction: 1.076, 1.088, 0.879.
base = 'base_tinystories.py'

update = 'lt_nag'
out_dir = 'out/tinystories_lt_nag'
