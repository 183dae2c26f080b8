# What the TinyStories runs of the YuriiFormer paper share: OpenWebText's recipe, but shorter and
# with a higher Muon rate.
base = 'base_owt_small.py'

dataset = 'tinystories'
max_iters = 10000  # 4.9B tokens, 10.4 epochs
warmup_iters = max_iters // 10
muon_lr = 0.02
