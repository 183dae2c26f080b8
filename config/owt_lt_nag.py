# OpenWebText small, Nesterov, Lie-Trotter: the headline model (YuriiFormer).
# Published: best validation loss 2.920, and 2.941 in the Momentum Streams paper; HellaSwag
# (few-shot, acc_norm) 31.8 %.
# 163,812,168 parameters, 39.4M of them velocity tables: compare with owt_gd_d900 and
# owt_lt_nag_zero.
base = 'base_owt_small.py'

update = 'lt_nag'
out_dir = 'out/owt_lt_nag'
