# What the OpenWebText runs of the medium size share: 24 layers of width 1024, otherwise the
# recipe of the small size.
base = 'base_owt_small.py'

n_layer = 24
n_head = 16
n_embd = 1024

batch_size = 6
# 480 sequences a step as before; 80 = 10 on each of 8 GPUs
gradient_accumulation_steps = 480 // batch_size
