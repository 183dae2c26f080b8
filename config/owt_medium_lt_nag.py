# OpenWebText medium, Nesterov, Lie-Trotter: the headline model (YuriiFormer).
# Published: best validation loss 2.702; HellaSwag (few-shot, acc_norm) 36.8 %.
# 407,209,104 parameters.
base = 'base_owt_medium.py'

update = 'lt_nag'
out_dir = 'out/owt_medium_lt_nag'
