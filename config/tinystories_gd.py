# TinyStories small, gradient descent, Lie-Trotter: the plain GPT block (YuriiFormer).
# Published: best validation loss 1.106, final 1.114.
base = 'base_tinystories.py'

update = 'gd'
out_dir = 'out/tinystories_gd'
