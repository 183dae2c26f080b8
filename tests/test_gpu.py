"""What only a CUDA device can show: pytest -m gpu. Without one, every test here is skipped."""
import pytest
import torch

import train as script
from checkpoint import read
from conftest import fresh, nontrivial, tokens, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')]
CUDA = dict(device='cuda', update='lt_nag')


def peak(*args, **options):
    """Bytes of tensors on the GPU at the most in a run, which must succeed."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert train(*args, **options).code == 0
    return torch.cuda.max_memory_allocated()


def test_a_resume_needs_no_more_memory_than_a_fresh_run(data_folder, tmp_path):
    """A checkpoint read to the GPU, or kept alive there, would stand beside the model and the optimizer."""
    options = dict(CUDA, n_layer=4, n_embd=512, n_head=8, compile='False')
    once = peak(data_folder, tmp_path, **options, max_iters=3)
    assert once > 100e6  # weights, gradients and state; else this test says nothing
    assert peak(data_folder, tmp_path, **options, init_from='resume', max_iters=6) <= 1.01 * once


def test_a_float16_run_resumes_its_scaler(data_folder, tmp_path):
    options = dict(CUDA, dtype='float16', max_skipped=30)
    assert train(data_folder, tmp_path, **options, max_iters=20).code == 0
    before = read(tmp_path / 'ckpt.pt')['scaler']
    outcome = train(data_folder, tmp_path, **options, init_from='resume', max_iters=22)
    assert outcome.code == 0 and all(record['skipped'] == 0 for record in outcome.records[-3:] if 'loss' in record)
    after = read(tmp_path / 'ckpt.pt')['scaler']
    assert before['scale'] > 0 and after['scale'] <= before['scale'] and after['_growth_tracker'] == before['_growth_tracker'] + 2


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_it_learns_in_every_precision(update, dtype, data_folder, tmp_path):
    outcome = train(data_folder, tmp_path, device='cuda', update=update, dtype=dtype, max_iters=40, eval_interval=40, max_skipped=30)
    start, end = [record['val_loss'] for record in outcome.records if 'val_loss' in record]
    assert outcome.code == 0 and end < start - 0.1


def test_the_gpu_computes_what_the_cpu_does(update):
    model, idx = nontrivial(update=update), tokens(B=4)
    logits, loss = model(idx, idx, return_logits=True)
    on_gpu, loss_on_gpu = model.cuda()(idx.cuda(), idx.cuda(), return_logits=True)
    torch.testing.assert_close(on_gpu.cpu(), logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss_on_gpu.cpu(), loss)


def test_no_mask_makes_reduced_precision_not_a_number(update):
    model, idx = nontrivial(torch.float32, update=update).cuda(), tokens(B=4).cuda()
    exact = model(idx, return_logits=True)[0]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast('cuda', dtype):
            logits = model(idx, return_logits=True)[0]
            cached = model.generate(idx, 20)
        assert logits.isfinite().all() and (logits - exact).abs().max() < 0.1 * exact.abs().max()
        assert cached.shape == (4, 27)


def test_auto_trains_compiled_and_saves_plain_names(update, data_folder, tmp_path):
    torch._dynamo.reset()
    outcome = train(data_folder, tmp_path, device='cuda', update=update, compile='auto', dtype='auto', max_iters=3)
    assert outcome.code == 0 and outcome.records[0]['compiled'] is True
    names = read(tmp_path / 'ckpt.pt')['model'].keys()
    assert names == fresh(update=update).state_dict().keys()


def test_running_out_of_memory_is_one_message(data_folder, tmp_path, monkeypatch):
    """The real error of a GPU whose memory is nearly used up by others."""
    update = script.update

    def crowded(*args):
        torch.cuda.set_per_process_memory_fraction(1e-6)
        return update(*args)
    monkeypatch.setattr(script, 'update', crowded)
    try:
        outcome = train(data_folder, tmp_path, **CUDA, batch_size=64, n_embd=512, n_head=8)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert outcome.code == 1 and '--batch_size=32 --gradient_accumulation_steps=4' in outcome.message
