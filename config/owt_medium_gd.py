# OpenWebText medium, gradient descent, Lie-Trotter: the plain GPT block (YuriiFormer).
# No loss to match; HellaSwag (few-shot, acc_norm) 35.5 %.
# 354,599,936 parameters.
base = 'base_owt_medium.py'

update = 'gd'
out_dir = 'out/owt_medium_gd'
