# Finetune OpenAI's GPT-2 on Shakespeare (GPT-2 tokens) for a few steps, after nanoGPT's example.
# No figure to match.
init_from = 'gpt2'
update = 'gd'
dataset = 'shakespeare'
out_dir = 'out/finetune_gpt2'

eval_interval = 5
eval_iters = 40
log_interval = 1
always_save_checkpoint = False  # keep the best: it overfits soon

batch_size = 1
gradient_accumulation_steps = 32  # 32 x 1024 = 32,768 tokens a step, 1/9 of the data
max_iters = 20

optimizer = 'adamw'
learning_rate = 3e-5
decay_lr = False
