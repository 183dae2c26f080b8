"""The cache changes the time a token takes and nothing else; and generate() does what it says."""

import pytest
import torch
from conftest import TINY, fresh, nontrivial, relative_error, tokens

from model import SCHEMES
from nanonag import runtime
from nanonag.decoder import Decoder

BLOCK = TINY['block_size']
# of 8 tokens into consecutive chunks
SPLITS = [[1] * 8, [8], [7, 1], [1, 7], [3, 5], [2, 2, 2, 2], [4, 1, 1, 2]]


def with_cache(model, idx, split):
    """Logits (B, T, V) of idx fed to one cache in consecutive chunks of the given sizes."""
    cache = model.new_cache()
    chunks = [model(chunk, cache=cache, return_logits=True)[0] for chunk in idx.split(split, dim=1)]
    return torch.cat(chunks, dim=1)


@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@torch.no_grad()
def test_cached_logits_are_the_uncached_ones(update, dtype, tolerance):
    """Token by token, in one shot and in chunks, each followed by whatever comes next."""
    model, idx = nontrivial(dtype, update=update), tokens(B=3, T=BLOCK)
    expected = model(idx, return_logits=True)[0]
    for split in SPLITS:
        assert relative_error(with_cache(model, idx, split), expected) < tolerance, split


@pytest.mark.parametrize('pos', ['learned', 'rope'])
@pytest.mark.parametrize('update', ['gd', 'euler_nag', 'lt_tmm'])
@torch.no_grad()
def test_cached_positions_continue(update, pos):
    """The positions of a chunk start where the cache ends, in both kinds of position."""
    model, idx = nontrivial(update=update, pos=pos), tokens(B=2, T=BLOCK)
    expected = model(idx, return_logits=True)[0]
    for split in SPLITS:
        assert relative_error(with_cache(model, idx, split), expected) < 1e-13


@torch.no_grad()
def test_last_logits_of_a_cached_chunk(update):
    """Without return_logits a chunk's answer is its last position, as without a cache."""
    model, idx = nontrivial(update=update), tokens(B=2, T=BLOCK)
    cache = model.new_cache()
    for chunk in idx.split([3, 1, 4], dim=1):
        logits, loss = model(chunk, cache=cache)
        assert logits.shape == (2, 1, TINY['vocab_size']) and loss is None
    assert relative_error(logits, model(idx)[0]) < 1e-13


@torch.no_grad()
def test_caches_are_independent(update):
    """A cache belongs to its caller: two of one model do not mix, and none outlives its use in the
    model."""
    model = nontrivial(update=update)
    a, b = tokens(B=2, T=BLOCK), tokens(B=2, T=BLOCK, seed=5)
    cache_a, cache_b = model.new_cache(), model.new_cache()
    interleaved = {'a': [], 'b': []}
    for chunk_a, chunk_b in zip(a.split(2, dim=1), b.split(2, dim=1)):
        interleaved['a'].append(model(chunk_a, cache=cache_a, return_logits=True)[0])
        interleaved['b'].append(model(chunk_b, cache=cache_b, return_logits=True)[0])
    for name, idx in (('a', a), ('b', b)):
        assert (
            relative_error(torch.cat(interleaved[name], dim=1), model(idx, return_logits=True)[0])
            < 1e-13
        )
    assert set(model.state_dict()) == set(fresh(update=update).state_dict())


@torch.no_grad()
def test_full_cache_refuses_more(update):
    model = nontrivial(update=update)
    cache = model.new_cache()
    model(tokens(T=BLOCK), cache=cache)
    with pytest.raises((ValueError, AssertionError), match=str(BLOCK)):
        model(tokens(T=1), cache=cache)


# ---- generate ------------------------------------------------------------------------------------


@torch.no_grad()
def greedy_by_hand(model, idx, n):
    """n greedy tokens after idx (B, T), each from a forward pass over the last block_size
    tokens."""
    for _ in range(n):
        logits = model(idx[:, -BLOCK:], return_logits=True)[0][:, -1]
        idx = torch.cat(
            [
                idx,
                logits[:, : model.cfg.vocab_used or model.cfg.vocab_size].argmax(-1, keepdim=True),
            ],
            dim=1,
        )
    return idx


def test_greedy_tokens_with_and_without_the_cache(update):
    """From a prompt below, at and beyond block_size, to a text that is well beyond it."""
    model, changes = nontrivial(update=update, std=0.6, tie_weights=False), 0
    for length in (1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1):
        idx = tokens(B=3, T=length)
        expected = greedy_by_hand(model, idx, 12)
        changes += (expected[:, length:].diff() != 0).sum()
        for use_cache in (True, False):
            assert torch.equal(
                model.generate(idx, 12, temperature=0, use_cache=use_cache), expected
            ), length
    assert changes > 10  # of 198: a constant answer would prove little


@pytest.mark.parametrize('temperature, top_k', [(1.0, None), (0.7, 3), (2.5, 100)])
def test_sampled_tokens_with_and_without_the_cache(update, temperature, top_k):
    model, idx = nontrivial(update=update), tokens(B=3, T=2)
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        outputs.append(
            model.generate(idx, 14, temperature=temperature, top_k=top_k, use_cache=use_cache)
        )
    assert outputs[0].shape == (3, 16) and outputs[0].dtype == torch.int64
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0][:, :2], idx)


@pytest.mark.parametrize('use_cache', [True, False])
def test_rows_of_a_batch_do_not_see_each_other(update, use_cache):
    model, idx = nontrivial(update=update), tokens(B=3, T=3)
    together = model.generate(idx, 8, temperature=0, use_cache=use_cache)
    for row in range(3):
        assert torch.equal(
            model.generate(idx[row : row + 1], 8, temperature=0, use_cache=use_cache)[0],
            together[row],
        )


@pytest.mark.parametrize('use_cache', [True, False])
class TestGenerate:
    def test_top_k_of_one_is_greedy(self, update, use_cache):
        model, idx = nontrivial(update=update), tokens()
        greedy = model.generate(idx, 6, temperature=0.0, use_cache=use_cache)
        assert torch.equal(
            model.generate(idx, 6, temperature=1.0, top_k=1, use_cache=use_cache), greedy
        )

    def test_top_k_beyond_the_vocabulary_is_no_restriction(self, update, use_cache):
        model, idx = nontrivial(update=update), tokens()
        texts = []
        for top_k in (None, TINY['vocab_size'], 1000):
            torch.manual_seed(0)
            texts.append(model.generate(idx, 6, top_k=top_k, use_cache=use_cache))
        assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])

    def test_nothing_to_generate(self, update, use_cache):
        model, idx = nontrivial(update=update), tokens()
        assert torch.equal(model.generate(idx, 0, use_cache=use_cache), idx)

    @pytest.mark.parametrize('training', [True, False])
    def test_mode_is_restored_and_dropout_is_off(self, update, use_cache, training):
        dropout = 0.0 if SCHEMES[update][0].normalized else 0.5
        model = nontrivial(update=update, dropout=dropout)
        expected = greedy_by_hand(model, tokens(), 6)
        model.train(training)
        assert torch.equal(
            model.generate(tokens(), 6, temperature=0, use_cache=use_cache), expected
        )
        assert all(module.training is training for module in model.modules())

    def test_no_graph_is_kept(self, update, use_cache):
        model = nontrivial(update=update)
        recording = []
        model.register_forward_hook(lambda *_: recording.append(torch.is_grad_enabled()))
        model.generate(tokens(), 3, use_cache=use_cache)
        assert recording == [False] * 3 and torch.is_grad_enabled()
        # and training goes on as if nothing had happened
        model(tokens(), tokens(seed=2))[1].backward()


@pytest.mark.parametrize('use_cache', [True, False])
def test_samples_follow_the_distribution(use_cache):
    """20,000 first tokens after one prompt against softmax(logits / temperature), whole and cut to
    the best three."""
    model = nontrivial(torch.float32, update='lt_nag')
    idx = tokens(B=1, T=3).expand(20_000, 3)
    torch.manual_seed(0)
    with torch.no_grad():
        logits = model(idx[:1])[0][0, -1].double() / 1.7
    for top_k in (None, 3):
        kept = (
            logits
            if top_k is None
            else logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
        )
        sampled = model.generate(idx, 1, temperature=1.7, top_k=top_k, use_cache=use_cache)[:, -1]
        frequency = sampled.bincount(minlength=TINY['vocab_size']) / len(sampled)
        assert (frequency - kept.softmax(-1)).abs().max() < 0.015


@pytest.mark.parametrize('use_cache', [True, False])
def test_padding_ids_are_never_sampled(update, use_cache):
    """Ids from vocab_used on exist only to round the table up; here their logits are the highest
    everywhere."""
    model = nontrivial(update=update, vocab_used=9)
    with torch.no_grad():
        head = model.lm_head.weight
        head[9:] = 100 * torch.stack([head[0], -head[0], head[1], -head[1]])
        assert (model(tokens(B=4), return_logits=True)[0].argmax(-1) >= 9).all()
    torch.manual_seed(0)
    for sampler in (
        {},
        dict(temperature=0),
        dict(temperature=50.0),
        dict(top_k=1),
        dict(top_k=9),
        dict(top_k=13),
    ):
        assert (
            model.generate(tokens(B=4, vocab_size=9), 12, use_cache=use_cache, **sampler).max() < 9
        ), sampler


@pytest.mark.parametrize(
    'arguments, match',
    [
        (dict(temperature=-0.5), 'temperature'),
        (dict(temperature=float('nan')), 'temperature'),
        (dict(top_k=0), 'top_k'),
        (dict(top_k=-3), 'top_k'),
        (dict(max_new_tokens=-1), 'max_new_tokens'),
    ],
)
@pytest.mark.parametrize('use_cache', [True, False])
def test_bad_requests_are_refused(arguments, match, use_cache):
    with pytest.raises(ValueError, match=match):
        fresh(update='gd').generate(
            tokens(), **{'max_new_tokens': 3, 'use_cache': use_cache, **arguments}
        )


@pytest.mark.parametrize('use_cache', [True, False])
def test_damaged_weights_are_reported(use_cache):
    """NaN logits end in a message, not in random tokens; and the mode is restored then too."""
    model = fresh(update='gd').train()
    model.lm_head.weight.data[5, 3] = float('nan')
    with pytest.raises(ValueError, match='finite'):
        model.generate(tokens(), 6, use_cache=use_cache)
    assert model.training


@pytest.mark.parametrize('use_cache', [True, False])
@pytest.mark.parametrize('max_new_tokens', [0, 3])
def test_empty_prompt_is_refused(use_cache, max_new_tokens):
    with pytest.raises(ValueError, match='prompt'):
        fresh(update='gd').generate(
            torch.zeros(1, 0, dtype=torch.int64), max_new_tokens, use_cache=use_cache
        )


@pytest.mark.parametrize('use_cache', [True, False])
def test_generates_under_autocast(update, use_cache):
    model = nontrivial(torch.float32, update=update)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert model.generate(tokens(), 2 * BLOCK, use_cache=use_cache).shape == (2, 7 + 2 * BLOCK)


# ---- Decoder: the fast way to the same tokens ----------------------------------------------------


@pytest.fixture(params=['eager', 'static'])
def make_decoder(request, monkeypatch):
    """static: what is compiled, as it is before the compiler has seen it."""
    monkeypatch.setattr(torch, 'compile', lambda model, **options: model)
    return lambda model, dtype=torch.float32: Decoder(model, dtype, 3, request.param == 'static')


def test_a_decoder_gives_the_models_tokens(update, make_decoder):
    """From prompts below, at and beyond block_size, well beyond it, and again with other batch
    sizes."""
    model = nontrivial(torch.float32, update=update, std=0.6)
    prompts = [
        tokens(B=B, T=T, seed=T)
        for B, T in ((3, 1), (1, 3), (20, BLOCK - 1), (3, BLOCK), (2, BLOCK + 1))
    ]
    expected = [model.generate(idx, 12, temperature=0) for idx in prompts]
    decoder = make_decoder(model)
    for idx, text in zip(prompts, expected):
        assert torch.equal(decoder.generate(idx, 12, temperature=0), text)


def test_a_decoders_logits_are_the_models(update, make_decoder):
    model, idx = nontrivial(torch.float32, update=update), tokens(B=3, T=BLOCK)
    with torch.no_grad():
        expected = model(idx, return_logits=True)[0]
        decoder = make_decoder(model)
        for _ in range(2):  # the second time into a cache that is not empty any more
            cache = decoder.new_cache(BLOCK)
            parts = [decoder(part, cache=cache)[0] for part in idx.split([3, 1, 1, 1, 1, 1], dim=1)]
            assert relative_error(torch.cat(parts, dim=1), expected[:, 2:]) < 1e-5


def test_a_decoders_bfloat16_weights_are_near(update, make_decoder):
    model, idx = nontrivial(torch.float32, update=update, n_embd=32), tokens(B=3, T=BLOCK)
    with torch.no_grad():
        expected = model(idx)[0]
        decoder = make_decoder(model, torch.bfloat16)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            cache = decoder.new_cache(BLOCK)
            decoder(idx[:, :-1], cache=cache)
            assert relative_error(decoder(idx[:, -1:], cache=cache)[0].float(), expected) < 0.05
    head = model.lm_head
    assert (
        head.packed if head.weight is None else head.weight
    ).dtype == torch.bfloat16 and model.transformer.wte.weight.dtype == torch.float32


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason='no oneDNN')
@pytest.mark.parametrize(
    'cpu, batch_size, packed',
    [
        ('Intel Xeon', 1, not torch.backends.mkl.is_available()),
        ('Intel Xeon', 2, True),
        ('AMD EPYC', 1, True),
        (None, 1, True),
    ],
)
def test_a_row_in_float32_is_left_to_mkl_on_intel(monkeypatch, cpu, batch_size, packed):
    monkeypatch.setattr(runtime, 'cpu_features', lambda: {'cpu_name': cpu} if cpu else {})
    model, idx = nontrivial(torch.float32, update='lt_nag', std=0.6), tokens(B=batch_size, T=3)
    expected = model.generate(idx, 4, temperature=0)
    decoder = Decoder(model, torch.float32, batch_size)
    assert torch.equal(decoder.generate(idx, 4, temperature=0), expected)
    assert (model.lm_head.weight is None) == packed


def test_a_compiled_step_gives_the_eager_logits():
    """Through the real compiler, where this machine has one. One layer: a kernel takes seconds."""
    model = nontrivial(torch.float32, update='lt_nag', n_layer=1)
    expected = model.generate(tokens(B=2), 9, temperature=0)
    decoder = Decoder(model, torch.float32, compiled=True)
    try:
        text = decoder.generate(tokens(B=2), 9, temperature=0)
    except Exception:
        if runtime.why_no_compiler(torch.device('cpu')) is None:
            raise
        pytest.skip('no working compiler')
    assert torch.equal(text, expected)
