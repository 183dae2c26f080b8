# OpenWebText small, gradient descent, Lie-Trotter: the plain GPT block (YuriiFormer).
# Published: best validation loss 2.990, and 3.008 in the Momentum Streams paper; HellaSwag
# (few-shot, acc_norm) 30.0 %.
# 124,373,760 parameters.
base = 'base_owt_small.py'

update = 'gd'
out_dir = 'out/owt_gd'
