"""What only a GPU can show, for every scheme: the same numbers as on a CPU, to rounding, and the
code that only CUDA runs.

Skipped without CUDA. With DEVICE = 'cpu' most of it runs anywhere, which shows that the code
executes, not that CUDA computes."""

import copy
import gc
import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    arguments,
    call,
    fresh,
    nontrivial,
    perturb,
    relative_error,
    run_train,
    tokens,
    train,
)

import bench
import sample
import train as script
from model import SCHEMES
from nanonag import runtime
from nanonag.checkpoint import read
from nanonag.decoder import Decoder
from nanonag.loss import linear_cross_entropy
from nanonag.optim import configure_optimizer, orthogonalize
from train import TrainConfig, train_step

DEVICE = 'cuda'
ON_CUDA = DEVICE == 'cuda'
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_CUDA and not torch.cuda.is_available(), reason='needs a CUDA device'),
]
needs_cuda = pytest.mark.skipif(not ON_CUDA, reason='only CUDA has it')
# heads of 16 numbers, in rows that the attention kernels take
SIZES = dict(n_head=4, n_embd=64, block_size=32, vocab_size=96)
TORCHRUN = ('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=1')


def model_of(update, std=0.05, **options):
    """A model on the GPU whose every parameter matters, and a batch for it: float32, where its twin
    on the CPU rounds alike."""
    model = perturb(fresh(update=update, **SIZES, **options), std=std)
    idx = tokens(B=4, T=33, vocab_size=96).to(DEVICE)
    return model.to(DEVICE), idx[:, :-1], idx[:, 1:]


def loss_and_gradient(model, idx, targets, dtype=torch.float32):
    """(loss, all gradients in one float64 vector on the CPU), matmuls in dtype."""
    model.zero_grad()
    with runtime.Runtime(torch.device(DEVICE), dtype).autocast():
        _, loss = model(idx, targets)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()]).double().cpu()


# the model


def test_computes_what_a_cpu_does(update):
    model, idx, targets = model_of(update)
    loss, gradient = loss_and_gradient(model, idx, targets)
    exact = copy.deepcopy(model).to('cpu', torch.float64)
    exact.zero_grad()
    _, expected = exact(idx.cpu(), targets.cpu())
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert (
        relative_error(gradient, torch.cat([p.grad.flatten() for p in exact.parameters()])) < 1e-3
    )


def test_bfloat16_is_near_float32(update):
    model, idx, targets = model_of(update)
    exact, exact_gradient = loss_and_gradient(model, idx, targets)
    loss, gradient = loss_and_gradient(model, idx, targets, torch.bfloat16)
    assert loss == pytest.approx(exact, abs=2e-2)
    assert gradient.isfinite().all() and F.cosine_similarity(gradient, exact_gradient, dim=0) > 0.99


@pytest.mark.parametrize(
    'dtype, tolerance', [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)], ids=str
)
def test_compiled_code_computes_what_eager_does(update, dtype, tolerance):
    model, idx, targets = model_of(update)
    exact, exact_gradient = loss_and_gradient(model, idx, targets, dtype)
    torch._dynamo.reset()
    if not runtime.compile_model(model, 'True', runtime.Runtime(torch.device(DEVICE), dtype)):
        pytest.skip('no working compiler here')
    loss, gradient = loss_and_gradient(model, idx, targets, dtype)
    assert loss == pytest.approx(exact, abs=tolerance)
    assert (gradient - exact_gradient).norm() < tolerance * exact_gradient.norm()


@needs_cuda
def test_the_loss_does_not_hold_all_logits():
    """8,192 rows of 50,304 logits are 1.5 GiB in float32; a chunk of 2^25 is an eighth of a GiB,
    and a few of them are needed."""
    x, w = (
        torch.randn(8192, 64, device=DEVICE, requires_grad=True),
        torch.randn(50304, 64, device=DEVICE, requires_grad=True),
    )
    targets = torch.randint(50304, (8192,), device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, w, targets).backward()
    assert torch.cuda.max_memory_allocated() - before < 8192 * 50304 * 4 / 2


# generation


@pytest.mark.parametrize(
    'dtype, tolerance', [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=str
)
def test_cached_logits_are_the_uncached_ones(update, dtype, tolerance):
    """Token by token and in chunks: other attention kernels than a whole text's."""
    model, idx, _ = model_of(update)
    with torch.no_grad(), runtime.Runtime(torch.device(DEVICE), dtype).autocast():
        whole, _ = model(idx, return_logits=True)
        for chunks in ([1] * 32, [20, 1, 7, 4]):
            cache = model.new_cache()
            parts = [
                model(part, cache=cache, return_logits=True)[0] for part in idx.split(chunks, dim=1)
            ]
            assert relative_error(torch.cat(parts, dim=1).float(), whole.float()) < tolerance


def test_greedy_tokens_with_and_without_the_cache(update):
    """In float64, where no rounding turns two likely tokens round; past block_size, too."""
    model = nontrivial(update=update).to(DEVICE)
    prompt = tokens(T=4).to(DEVICE)
    cached, plain = (
        model.generate(prompt, 12, temperature=0, use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert cached.device.type == DEVICE and torch.equal(cached, plain)
    assert torch.equal(
        cached.cpu(), nontrivial(update=update).generate(tokens(T=4), 12, temperature=0)
    )


# the optimizers


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_an_optimizers_steps_are_a_cpus(update, optimizer):
    """Three steps on the same gradients: fused AdamW's kernel, Muon's matmuls, and the return to
    the sphere."""
    cfg = TrainConfig(
        optimizer=optimizer,
        learning_rate=0.01,
        **(dict(muon_lr=0.01) if optimizer == 'muon' else {}),
    ).resolve(False)
    moved = []
    for device in ('cpu', DEVICE):
        model = perturb(fresh(update=update, **SIZES), std=0.05).to(device)
        start, generator = (
            [p.detach().clone() for p in model.parameters()],
            torch.Generator().manual_seed(3),
        )
        steps = configure_optimizer(model, cfg)
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(device)
            steps.step()
        moved.append([(p.detach() - p0).cpu() for p, p0 in zip(model.parameters(), start)])
    assert any(group.get('fused') for group in steps.groups)
    for on_cpu, here in zip(*moved):
        assert on_cpu.any() and relative_error(here, on_cpu) < 1e-3


@pytest.mark.parametrize('shape', [(128, 64), (64, 128), (256, 64)], ids=str)
def test_bfloat16_orthogonalizes(shape):
    """Newton-Schulz with torch.optim.Muon's coefficients brings singular values (but for tiny ones)
    to about 0.7 to 1.2."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    coefficients = torch.optim.Muon([torch.nn.Parameter(matrix)]).param_groups[0]['ns_coefficients']
    singular = torch.linalg.svdvals(
        orthogonalize(matrix, torch.bfloat16, coefficients, 5, 1e-7).float()
    )
    assert 0.6 < singular.min() and singular.max() < 1.4


def test_float16_skips_what_overflows_and_finds_its_scale(update):
    """GradScaler: a scale that is far too large is halved, without touching the weights, until
    updates lower the loss."""
    if not ON_CUDA:
        pytest.skip('float16 is for CUDA')
    model, idx, targets = model_of(update)
    rt, weights = (
        runtime.Runtime(torch.device(DEVICE), torch.float16),
        copy.deepcopy(model.state_dict()),
    )
    steps = configure_optimizer(
        model, TrainConfig(learning_rate=1e-3, optimizer='adamw').resolve(False), rt.dtype
    )
    scaler, losses, skipped = torch.amp.GradScaler(DEVICE, init_scale=2.0**40), [], 0
    for _ in range(60):
        loss, norm = train_step(model, model, steps, scaler, iter([(idx, targets)]), 1, 1.0, rt)
        losses.append(loss.item())
        if not math.isfinite(norm):
            skipped += 1
            assert all(torch.equal(weights[name], p) for name, p in model.state_dict().items())
        elif skipped == len(losses) - 1:  # the first that counts
            assert any(not torch.equal(weights[name], p) for name, p in model.state_dict().items())
    assert 0 < skipped < 50 and scaler.get_scale() < 2.0**40
    assert losses[-1] < losses[0] and all(map(math.isfinite, losses))


# runs of train.py


def losses(recorded, after=0):
    return [
        record[key]
        for record in recorded
        for key in ('loss', 'train_loss', 'val_loss')
        if key in record and record['step'] > after
    ]


def test_a_run_equals_a_cpus(update, data_folder, tmp_path):
    """The same batches, loss by loss; atomic additions come in any order there, so not to the
    bit."""
    here, there = (
        train(
            data_folder,
            tmp_path / f'on {i}',
            update=update,
            max_iters=6,
            learning_rate=1e-3,
            device=device,
        )
        for i, device in enumerate((DEVICE, 'cpu'))
    )
    assert (here.code, there.code) == (0, 0), here.message
    assert losses(here.records) == pytest.approx(losses(there.records), abs=2e-3)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_resumed_run_equals_the_uninterrupted_one(update, dtype, data_folder, tmp_path):
    """Weights, moments, batches and the GPU's own generator, from which dropout draws."""
    options = dict(update=update, dtype=dtype, device=DEVICE, learning_rate=3e-2) | (
        {} if SCHEMES[update][0].normalized else {'dropout': 0.3}
    )
    whole = train(
        data_folder,
        tmp_path / 'whole',
        max_iters=8,
        lr_decay_iters=8,
        warmup_iters=0,
        save_interval=4,
        **options,
    )
    assert whole.code == 0, whole.message
    (tmp_path / 'cut').mkdir()
    (tmp_path / 'whole' / 'ckpt-00000004.pt').rename(tmp_path / 'cut' / 'ckpt.pt')
    resumed = train(
        data_folder, tmp_path / 'cut', init_from='resume', max_iters=8, lr_decay_iters=8, **options
    )
    assert resumed.code == 0, resumed.message
    assert len(losses(resumed.records, after=4)) == 6
    assert losses(resumed.records, after=4) == pytest.approx(
        losses(whole.records, after=4), abs=2e-3 if dtype == 'float32' else 1e-2
    )


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_float16_trains_and_its_scale_survives_a_resume(optimizer, data_folder, tmp_path):
    if not ON_CUDA:
        pytest.skip('float16 is for CUDA')
    options = dict(update='lt_nag', dtype='float16', device=DEVICE, optimizer=optimizer)
    outcome = train(
        data_folder, tmp_path, max_iters=40, lr_decay_iters=60, warmup_iters=0, **options
    )
    found = [record['loss'] for record in outcome.records if 'loss' in record]
    assert outcome.code == 0 and found[-1] < found[0] - 0.1
    before = read(tmp_path / 'ckpt.pt')['scaler']
    assert before['scale'] > 0
    assert (
        train(
            data_folder, tmp_path, init_from='resume', max_iters=41, device=DEVICE, dtype='float16'
        ).code
        == 0
    )
    after = read(tmp_path / 'ckpt.pt')['scaler']
    assert (after['scale'], after['_growth_tracker']) in (
        (before['scale'], before['_growth_tracker'] + 1),
        (before['scale'] / 2, 0),
    )


@needs_cuda
def test_a_resume_takes_no_more_memory(data_folder, tmp_path):
    """The checkpoint is read into main memory and let go of: no second copy of weights and moments
    on the GPU."""
    peaks = []
    for options in (dict(max_iters=3), dict(init_from='resume', max_iters=6)):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert (
            train(
                data_folder,
                tmp_path,
                n_layer=4,
                n_embd=256,
                lr_decay_iters=6,
                device=DEVICE,
                **options,
            ).code
            == 0
        )
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # 3.2 million parameters, each with gradient and momentum
    assert peaks[0] > 30e6 and peaks[1] < 1.1 * peaks[0]


@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(zero=True),
        dict(zero=True, optimizer='muon'),
        dict(parallel='fsdp'),
        dict(parallel='fsdp', optimizer='muon'),
        dict(update='ngpt', parallel='fsdp'),
        dict(compile='True'),
    ],
    ids=str,
)
def test_under_torchrun_with_nccl_it_is_the_same_run(options, data_folder, tmp_path):
    """One process, so no second GPU is needed; DDP, ZeRO and FSDP2 go through NCCL all the same."""
    chosen = (
        dict(
            update='lt_nag',
            optimizer='adamw',
            device=DEVICE,
            max_iters=6,
            save_interval=3,
            learning_rate=1e-3,
        )
        | options
    )
    alone = {
        key: value for key, value in chosen.items() if key not in ('zero', 'parallel', 'compile')
    }
    expected = train(data_folder, tmp_path / 'alone', **alone)
    code, _, stderr, recorded = run_train(
        data_folder, tmp_path / 'nccl', launcher=TORCHRUN, **chosen
    )
    assert (expected.code, code) == (0, 0), stderr[-3000:]
    assert losses(recorded) == pytest.approx(losses(expected.records), abs=2e-3)
    code, _, stderr, recorded = run_train(
        data_folder,
        tmp_path / 'nccl',
        launcher=TORCHRUN,
        init_from='resume',
        max_iters=8,
        **{key: value for key, value in chosen.items() if key in ('zero', 'parallel', 'device')},
    )
    assert code == 0 and recorded[-1]['step'] == 8, stderr[-3000:]


# the other scripts


@needs_cuda
def test_auto_takes_the_gpu():
    rt = runtime.start()
    assert rt.device.type == 'cuda' and rt.dtype == (
        torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float32
    )
    assert rt.device_name() == torch.cuda.get_device_name(0)


def test_samples(finished, capsys):
    code, message = call(
        sample.main,
        arguments(
            dict(out_dir=finished, start='abc', max_new_tokens=20, device=DEVICE, num_samples=2)
        ),
    )
    assert code == 0, message
    assert capsys.readouterr().out.count('abc') >= 2


def test_the_harness_gets_a_cpus_answers(update):
    pytest.importorskip('lm_eval')
    from eval import HarnessLM
    from nanonag.data.tokenizer import CharTokenizer

    answers = []
    for device in ('cpu', DEVICE):
        lm = HarnessLM(
            nontrivial(update=update),
            CharTokenizer(list('\nabcdefghijkl')),
            runtime.Runtime(torch.device(device), torch.float32),
        )
        requests = [
            SimpleNamespace(args=pair)
            for pair in (('abc', 'def'), ('a', 'bcdef'), ('', 'lkj'), ('abcdefghijkl', 'a'))
        ]
        answers.append(lm.loglikelihood(requests, disable_tqdm=True))
    for (here, greedy_here), (there, greedy) in zip(*answers):
        assert here == pytest.approx(there, abs=1e-9) and greedy_here is greedy


def test_benchmarks(tmp_path):
    options = dict(
        schemes='gd,lt_nag',
        n_layer=1,
        n_embd=32,
        n_head=2,
        block_size=32,
        vocab_size=64,
        batch_size=2,
        rounds=1,
        prompt_tokens=4,
        max_new_tokens=4,
        device=DEVICE,
        compile='False',
        json=tmp_path / 'bench.json',
    )
    code, message = call(bench.main, arguments(options))
    assert code == 0, message
    told = json.loads((tmp_path / 'bench.json').read_text())
    assert told['device'] == DEVICE and all(
        result['peak_memory_bytes'] > 0 for result in told['results']
    )
    assert (told['machine']['gpu'] is not None) == ON_CUDA


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_it_learns_in_every_precision(update, dtype, data_folder, tmp_path):
    outcome = train(
        data_folder,
        tmp_path,
        device=DEVICE,
        update=update,
        dtype=dtype,
        max_iters=40,
        eval_interval=40,
        max_skipped=30,
    )
    start, end = [record['val_loss'] for record in outcome.records if 'val_loss' in record]
    assert outcome.code == 0 and end < start - 0.1


def test_no_mask_makes_reduced_precision_not_a_number(update):
    model, idx = nontrivial(torch.float32, update=update).to(DEVICE), tokens(B=4).to(DEVICE)
    exact = model(idx, return_logits=True)[0]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(DEVICE, dtype):
            logits = model(idx, return_logits=True)[0]
            cached = model.generate(idx, 20)
        assert logits.isfinite().all() and (logits - exact).abs().max() < 0.1 * exact.abs().max()
        assert cached.shape == (4, 27)


def test_auto_trains_compiled_and_saves_plain_names(update, data_folder, tmp_path):
    torch._dynamo.reset()
    outcome = train(
        data_folder,
        tmp_path,
        device=DEVICE,
        update=update,
        compile='auto',
        dtype='auto',
        max_iters=3,
    )
    assert outcome.code == 0 and outcome.records[0]['compiled'] is True
    names = read(tmp_path / 'ckpt.pt')['model'].keys()
    assert names == fresh(update=update).state_dict().keys()


def test_running_out_of_memory_is_one_message(data_folder, tmp_path, monkeypatch):
    """The real error of a GPU whose memory is nearly used up by others."""
    update = script.train_step

    def crowded(*args):
        torch.cuda.set_per_process_memory_fraction(1e-6)
        return update(*args)

    monkeypatch.setattr(script, 'train_step', crowded)
    try:
        outcome = train(
            data_folder,
            tmp_path,
            device=DEVICE,
            update='lt_nag',
            batch_size=64,
            n_embd=512,
            n_head=8,
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (
        outcome.code == 1 and '--batch_size=32 --gradient_accumulation_steps=4' in outcome.message
    )


def test_a_compiled_step_gives_the_eager_tokens(update):
    """The whole step as one CUDA graph over a cache of fixed shape, for two prompts of other
    lengths, twice."""
    torch._dynamo.reset()
    model, _, _ = model_of(update)
    prompts = [tokens(B=2, T=T, vocab_size=90).to(DEVICE) for T in (3, 9, 3)]
    expected = [model.generate(idx, 12, temperature=0) for idx in prompts]
    decoder = Decoder(copy.deepcopy(model), torch.float32, compiled=True)
    for idx, text in zip(prompts, expected):
        # a tie may break otherwise
        assert (decoder.generate(idx, 12, temperature=0) == text).float().mean() > 0.9
