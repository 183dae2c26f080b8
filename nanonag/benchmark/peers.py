"""The model that ours is compared with: transformers' GPT-2 with default settings."""

import torch

from nanonag import memory, runtime
from nanonag.workers import worker_pool

LEARNING_RATE, GRAD_CLIP = 6e-4, 1.0  # of a training step; they do not change its time
PEERS = {'hf': 'hf_gpt2', 'hf_tuned': 'hf_gpt2_tuned'}


PEER_HAS = {'pos': 'learned', 'mlp': 'gelu', 'tie_weights': True}


class HuggingFace:
    """transformers' GPT-2 as its user would have it: float32, AdamW, its own cached generate."""

    def __init__(self, name, gpt_cfg, cfg, rt):
        import transformers

        transformers.logging.set_verbosity_error()
        self.name, self.cfg, self.rt, self.gpt_cfg, self.flops = name, cfg, rt, None, None
        torch.manual_seed(cfg.seed)
        sizes = {
            name: getattr(gpt_cfg, name) for name in ('vocab_size', 'n_embd', 'n_layer', 'n_head')
        }
        drop = dict.fromkeys(('resid_pdrop', 'embd_pdrop', 'attn_pdrop'), gpt_cfg.dropout)
        self.model = (
            transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    **sizes,
                    **drop,
                    n_positions=gpt_cfg.block_size,
                    bos_token_id=None,
                    eos_token_id=None,
                )
            )
            .to(rt.device)
            .train()
        )
        self.params = sum(p.numel() for p in self.model.parameters())
        self.tokens, self.prompt = random_tokens(gpt_cfg, cfg, rt)
        if {'train', 'memory'} & set(cfg.what):
            runtime.compile_model(self.model, cfg.compile, rt)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self):
        x, micro_steps = self.tokens[:, :-1], self.cfg.gradient_accumulation_steps
        for _ in range(micro_steps):
            # it shifts the labels itself
            (self.model(x, labels=x, use_cache=False).loss / micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def generate(self):
        self.model.eval()
        with torch.compiler.set_stance('force_eager'):
            tokens = self.model.generate(
                self.prompt,
                attention_mask=torch.ones_like(self.prompt),
                pad_token_id=0,
                do_sample=True,
                top_k=0,
                max_new_tokens=self.cfg.max_new_tokens,
            )
        self.model.train()
        return tokens


class Apart:
    """A peer on the CPU in a process of its own, as its user would have it: without runtime.start's
    setting of the allocator, unless tuned."""

    def __init__(self, name, *args):
        self.name, self.gpt_cfg, self.flops, self.pool = name, None, None, worker_pool(1)
        try:
            self.params = self.pool.submit(Apart.begin, name, *args).result()
        except BaseException:
            self.pool.shutdown()
            raise

    @staticmethod
    def begin(name, *args):
        if name == PEERS['hf_tuned']:
            memory.keep_freed_memory()
        Apart.one = HuggingFace(name, *args)
        return Apart.one.params

    def ask(self, act):
        return self.pool.submit(Apart.answer, act).result()

    @staticmethod
    def answer(act):
        return act(Apart.one)

    def step(self):
        self.ask(HuggingFace.step)

    def generate(self):
        return self.ask(HuggingFace.generate)


def random_tokens(gpt_cfg, cfg, rt):
    """Ids to train on (batch_size, block_size + 1) and to start from (gen_batch, prompt_tokens),
    the same for all."""
    generator = torch.Generator().manual_seed(cfg.seed)
    shapes = (cfg.batch_size, gpt_cfg.block_size + 1), (cfg.gen_batch, cfg.prompt_tokens)
    return [
        torch.randint(gpt_cfg.vocab_used, shape, generator=generator).to(rt.device)
        for shape in shapes
    ]
