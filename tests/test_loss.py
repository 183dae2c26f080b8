"""The chunked head and cross-entropy against torch's on full logits: value and both gradients."""

import pytest
import torch
import torch.nn.functional as F

from nanonag import loss
from nanonag.loss import linear_cross_entropy

N, C, V = 37, 8, 19


@pytest.fixture(params=[1, 5 * V, 2**25], ids=['row-by-row', 'five-rows', 'at-once'])
def chunk(request, monkeypatch):
    monkeypatch.setattr(loss, 'CHUNK', request.param)


def problem(dtype=torch.float64, ignored=0.3, seed=0):
    """States, head and targets, of which a share is -1."""
    g = torch.Generator().manual_seed(seed)
    x, w = (
        torch.randn(rows, C, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for rows in (N, V)
    )
    targets = torch.randint(V, (N,), generator=g)
    targets[torch.rand(N, generator=g) < ignored] = -1
    return x, w, targets


def full(x, w, targets):
    return F.cross_entropy(x @ w.T, targets, ignore_index=-1)


def value_and_gradients(f, x, w, targets, factor=1.0):
    value = f(x, w, targets)
    return value.detach(), *torch.autograd.grad(
        value * factor, [t for t in (x, w) if t.requires_grad]
    )


def assert_close(got, expected, tolerance):
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    'dtype, tolerance', [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=['float64', 'float32']
)
@pytest.mark.parametrize('ignored', [0.0, 0.3], ids=['all-counted', 'some-ignored'])
def test_equals_cross_entropy_of_full_logits(chunk, dtype, tolerance, ignored):
    x, w, targets = problem(dtype, ignored)
    got = value_and_gradients(linear_cross_entropy, x, w, targets, factor=0.7)
    assert_close(got, value_and_gradients(full, x, w, targets, factor=0.7), tolerance)
    assert got[0].dtype == dtype


def test_one_counted_target_is_enough(chunk):
    x, w, targets = problem()
    targets[:], targets[20] = -1, 3
    got = value_and_gradients(linear_cross_entropy, x, w, targets)
    assert_close(got, value_and_gradients(full, x, w, targets), 1e-12)
    # ignored positions get no gradient
    assert got[1].count_nonzero(dim=1).nonzero().flatten().tolist() == [20]


def test_large_logits_do_not_overflow(chunk):
    x, w, targets = problem(torch.float32)
    x, w = ((t.detach() * 60).requires_grad_() for t in (x, w))
    got = value_and_gradients(linear_cross_entropy, x, w, targets)
    assert all(t.isfinite().all() for t in got)
    assert_close(got[:1], value_and_gradients(full, x, w, targets)[:1], 1e-5)


def test_value_without_gradients(chunk):
    x, w, targets = problem()
    with torch.no_grad():
        value = linear_cross_entropy(x, w, targets)
    assert not value.requires_grad
    torch.testing.assert_close(value, full(x, w, targets).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize('frozen', ['x', 'w'])
def test_one_side_without_gradient(chunk, frozen):
    x, w, targets = problem()
    {'x': x, 'w': w}[frozen].requires_grad_(False)
    assert_close(
        value_and_gradients(linear_cross_entropy, x, w, targets),
        value_and_gradients(full, x, w, targets),
        1e-12,
    )


def test_inputs_are_left_as_they_were(chunk):
    x, w, targets = problem()
    before = [t.detach().clone() for t in (x, w, targets)]
    linear_cross_entropy(x, w, targets).backward()
    assert all(torch.equal(t, old) for t, old in zip((x, w, targets), before))


def test_gradcheck(monkeypatch):
    monkeypatch.setattr(loss, 'CHUNK', 3 * V)
    x, w, targets = problem()
    x = x.detach()[:7].requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, targets[:7]), (x, w))


def test_bfloat16_autocast(chunk):
    """The matmuls round to 8 bits; the loss itself is summed and returned in float32."""
    x, w, targets = problem(torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        got = value_and_gradients(linear_cross_entropy, x, w, targets)
    expected = value_and_gradients(full, x, w, targets)
    assert [t.dtype for t in got] == [torch.float32] * 3
    for a, b in zip(got, expected):
        assert (a - b).norm() < 0.02 * b.norm()


def test_bfloat16_states_of_an_autocast_trunk(chunk):
    """Under autocast the last LayerNorm may return bfloat16; the gradient has that dtype too."""
    x, w, targets = problem(torch.float32)
    x = x.detach().bfloat16().requires_grad_()
    with torch.autocast('cpu', torch.bfloat16):
        value, grad_x, _ = value_and_gradients(linear_cross_entropy, x, w, targets)
    assert value.dtype == torch.float32 and grad_x.dtype == torch.bfloat16


@pytest.mark.filterwarnings('ignore')
def test_compiled(monkeypatch):
    monkeypatch.setattr(loss, 'CHUNK', 10 * V)
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend='aot_eager', fullgraph=True)
    x, w, targets = problem()
    assert_close(
        value_and_gradients(compiled, x, w, targets),
        value_and_gradients(full, x, w, targets),
        1e-12,
    )
    torch._dynamo.reset()
