# OpenWebText small, the width-matched control of the Momentum Streams paper: gradient descent
# with about as many parameters as lt_nag (162,857,700 against 163,812,168).
# No figure to match on OpenWebText. On TinyStories, in one run, the paper's control closes about
# 40 % of the gap from gd to triple momentum.
base = 'owt_gd.py'

n_embd = 900  # 12 heads of 75
out_dir = 'out/owt_gd_d900'
