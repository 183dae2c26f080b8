# OpenWebText small, the parameter-matched control: lt_nag whose velocity starts at zero, so
# without velocity tables. No figure to match.
# 124,392,264 parameters, 18,504 more than gd: a norm and three scalars in each of 24 substeps.
base = 'owt_lt_nag.py'

velocity_init = 'zero'
out_dir = 'out/owt_lt_nag_zero'
