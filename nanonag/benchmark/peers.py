"""The model that ours are compared with: transformers' GPT-2 with default settings."""

import torch

from nanonag import memory, runtime
from nanonag.benchmark.contender import Contender
from nanonag.cli import UserError
from nanonag.workers import worker_pool

# of a training step; they do not change its duration
LEARNING_RATE = 6e-4
GRAD_CLIP = 1.0

PEERS = {'hf': 'hf_gpt2', 'hf_tuned': 'hf_gpt2_tuned'}  # --peer: name in the tables
FIXED = {'pos': 'learned', 'mlp': 'gelu', 'tie_weights': True}  # GPT-2's fixed choices
SIZES = ('n_layer', 'n_head', 'n_embd', 'vocab_size', 'block_size', 'dropout')


def check_options(names, shared):
    """Raises UserError if GPT-2 cannot be compared, a no-op without peers.

    Args:
        names: the peers, keys of PEERS.
        shared: the model options that hold for all schemes, a dict.
    """
    if not names:
        return
    for key, value in FIXED.items():
        if shared.get(key) not in (None, value):
            raise UserError(
                f"peer={names[0]}: transformers' GPT-2 is always {key}={value}; leave {key} out, "
                f'or give it to a scheme of ours, as in --schemes gd gd:{key}={shared[key]}'
            )
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise UserError('peer needs transformers: pip install transformers') from None


def check_device(names, device):
    """Raises UserError if one of the peers, keys of PEERS, is the same as another on the device."""
    if 'hf_tuned' in names and device.type != 'cpu':
        raise UserError(
            'peer=hf_tuned: the allocator of main memory does nothing for '
            f'device={device.type}; use peer=hf'
        )


# -----------------------------------------------------------------------------
# contenders


class HuggingFace(Contender):
    """transformers' GPT-2 in this process: float32, AdamW, its own generate() with its cache.

    `gpt_cfg` gives the sizes; the other arguments are Contender's.
    """

    def __init__(self, name, gpt_cfg, cfg, rt):
        super().__init__(name, gpt_cfg, cfg, rt)
        torch.manual_seed(cfg.seed)
        self.model = gpt2(gpt_cfg).to(rt.device).train()
        self.params = sum(p.numel() for p in self.model.parameters())
        if cfg.trains:
            runtime.compile_model(self.model, cfg.compile, rt)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self):
        micro_steps = self.cfg.gradient_accumulation_steps
        x = self.tokens[:, :-1]
        for _ in range(micro_steps):
            # GPT2LMHeadModel shifts the labels itself.
            loss = self.model(x, labels=x, use_cache=False).loss
            (loss / micro_steps).backward()
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


def gpt2(gpt_cfg):
    """Returns transformers' GPT2LMHeadModel with the sizes and the dropout of a GPTConfig."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=gpt_cfg.vocab_size,
        n_positions=gpt_cfg.block_size,
        n_embd=gpt_cfg.n_embd,
        n_layer=gpt_cfg.n_layer,
        n_head=gpt_cfg.n_head,
        resid_pdrop=gpt_cfg.dropout,
        embd_pdrop=gpt_cfg.dropout,
        attn_pdrop=gpt_cfg.dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config)


class HuggingFaceProcess:
    """A Contender whose HuggingFace lives in a worker process, which close() ends.

    The setting of the C library's allocator belongs to a process. In the worker it is glibc's own,
    as users of transformers have it, or for PEERS['hf_tuned'] the one that runtime.start sets here.
    """

    gpt_cfg = None
    flops_per_token = None

    def __init__(self, name, gpt_cfg, cfg, rt):
        self.name = name
        self.pool = worker_pool(1)
        try:
            self.params = self.pool.submit(create_in_worker, name, gpt_cfg, cfg, rt).result()
        except BaseException:
            self.close()
            raise

    def step(self):
        self.call(HuggingFace.step)

    def generate(self):
        return self.call(HuggingFace.generate)

    def profile(self):
        return self.call(HuggingFace.profile)

    def close(self):
        self.pool.shutdown()

    def call(self, method):
        """Returns what a method of the worker's HuggingFace returns."""
        return self.pool.submit(call_in_worker, method).result()


worker_peer = None  # in a worker of HuggingFaceProcess: the peer, kept between the pool's tasks


def create_in_worker(name, gpt_cfg, cfg, rt):
    """The worker's first task: creates its peer and returns the number of parameters."""
    global worker_peer
    if name == PEERS['hf_tuned']:
        memory.keep_freed_memory()
    worker_peer = HuggingFace(name, gpt_cfg, cfg, rt)
    return worker_peer.params


def call_in_worker(method):
    """The worker's further tasks: returns method(peer)."""
    return method(worker_peer)


def start(name, gpt_cfg, cfg, rt):
    """Returns a peer as a contender; on a CPU it gets a process of its own."""
    kind = HuggingFaceProcess if rt.device.type == 'cpu' else HuggingFace
    return kind(name, gpt_cfg, cfg, rt)


def start_alone(name, gpt_cfg, cfg, rt):
    """Returns a peer as the only contender in this process, for a measurement of its memory."""
    if name == PEERS['hf'] and rt.device.type == 'cpu':
        memory.keep_freed_memory(False)  # as users of transformers have it
    return HuggingFace(name, gpt_cfg, cfg, rt)
