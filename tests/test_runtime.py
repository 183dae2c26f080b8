"""runtime.py: which device, which precision, which process this is; what happens where nothing can
be compiled."""

import itertools
import platform
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

from nanonag import runtime
from nanonag.cli import UserError, world

DEVICES = ('cuda', 'mps', 'cpu')


@pytest.fixture
def machine(monkeypatch):
    """Makes this machine one with exactly the devices named, and with bfloat16 on those of
    `bfloat16`."""

    def make(*devices, bfloat16=()):
        empty = torch.empty

        def on_device(*size, device):
            if torch.device(device).type not in (*devices, 'cpu'):
                raise RuntimeError(f'no {device} here')
            return empty(*size)

        monkeypatch.setattr(torch, 'empty', on_device)
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: 'cuda' in devices)
        monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: 'mps' in devices)
        monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
        monkeypatch.setattr(
            torch.cuda, 'is_bf16_supported', lambda including_emulation: 'cuda' in bfloat16
        )
        monkeypatch.setattr(runtime, 'cpu_features', lambda: {'avx512_bf16': 'cpu' in bfloat16})

    return make


@pytest.mark.parametrize(
    'devices, chosen', [(('cuda', 'mps'), 'cuda'), (('mps',), 'mps'), ((), 'cpu')]
)
def test_the_fastest_device_there_is_is_taken(machine, devices, chosen):
    machine(*devices)
    assert runtime.start().device.type == chosen
    for device in DEVICES:  # what is asked for comes before what is there
        if device in (*devices, 'cpu'):
            assert runtime.start(device).device.type == device
        else:
            with pytest.raises(UserError, match=f'device={device}.*--device=cpu'):
                runtime.start(device)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('bfloat16', [(), ('cuda',), ('cpu',)])
def test_the_precision_is_one_that_the_chosen_device_is_good_at(machine, device, bfloat16):
    """A GPU beside the chosen CPU must not decide it, nor the other way round."""
    machine(*DEVICES, bfloat16=bfloat16)
    assert runtime.start(device).dtype == (torch.bfloat16 if device in bfloat16 else torch.float32)
    assert runtime.start(device, 'bfloat16').dtype == torch.bfloat16


def test_a_run_on_the_cpu_never_asks_for_a_gpu(monkeypatch):
    def touched(*args, **kwargs):
        raise AssertionError('asked for CUDA')

    for name in (
        'is_available',
        'is_bf16_supported',
        'set_device',
        'get_device_name',
        'current_device',
        'init',
    ):
        monkeypatch.setattr(torch.cuda, name, touched)
    rt = runtime.start('cpu')
    rt.synchronize()
    assert rt.device.type == 'cpu' and rt.peak_flops() is None and rt.device_name()
    assert len(runtime.rng_state(rt.device)) == 1


def test_importing_a_script_touches_no_device():
    code = """if True:
        import torch
        def touched(*args, **kwargs):
            raise AssertionError('a device was asked for')
        torch.cuda.is_available = torch.cuda.init = torch.cuda.set_device = touched
        torch.backends.mps.is_available = touched
        import bench, plot, sample, train"""
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# processes


@pytest.mark.parametrize('nodes, per_node', [(1, 8), (2, 1), (2, 4), (4, 8)])
def test_processes_are_counted_over_all_nodes(machine, nodes, per_node, monkeypatch):
    """Work is divided by WORLD_SIZE; only the GPU is chosen by the place within the node."""
    machine('cuda')
    groups = []
    monkeypatch.setattr(runtime, 'fresh_store', lambda rank, world_size: None)
    monkeypatch.setattr(
        torch.distributed,
        'init_process_group',
        lambda backend, **kwargs: groups.append((backend, kwargs['device_id'])),
    )
    monkeypatch.setenv('WORLD_SIZE', str(nodes * per_node))
    monkeypatch.setenv('LOCAL_WORLD_SIZE', str(per_node))
    for rank in range(nodes * per_node):
        monkeypatch.setenv('RANK', str(rank))
        monkeypatch.setenv('LOCAL_RANK', str(rank % per_node))
        rt = runtime.start()
        assert (rt.rank, rt.world_size) == (rank, nodes * per_node) == world()
        assert (
            groups.pop() == ('nccl', torch.device('cuda', rank % per_node)) == ('nccl', rt.device)
        )


def test_processes_without_gpus_speak_gloo(machine, monkeypatch):
    machine()
    backends = []
    monkeypatch.setattr(runtime, 'fresh_store', lambda rank, world_size: None)
    monkeypatch.setattr(
        torch.distributed, 'init_process_group', lambda backend, **kwargs: backends.append(backend)
    )
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('RANK', '1')
    assert runtime.start().world_size == 2 and backends == ['gloo']
    with pytest.raises(UserError, match='backend=nccl.*--backend=gloo'):
        runtime.start('cpu', backend='nccl')


# compiled code


@pytest.fixture
def compiled(monkeypatch):
    """The models whose compile() was called."""
    found = []
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda self, **options: found.append(self))
    return found


@pytest.mark.parametrize(
    'mode, device, tried',
    [
        ('auto', 'cuda', True),
        ('auto', 'mps', False),
        ('auto', 'cpu', False),
        ('True', 'cpu', True),
        ('False', 'cuda', False),
    ],
)
def test_auto_compiles_on_cuda_only(mode, device, tried, compiled, monkeypatch):
    probes = []
    monkeypatch.setattr(torch, 'compile', lambda function: probes.append(function) or (lambda x: x))
    monkeypatch.setattr(torch, 'ones', lambda *size, device: None)
    model = torch.nn.Linear(2, 2)
    assert (
        runtime.compile_model(model, mode, runtime.Runtime(torch.device(device), torch.float32))
        == tried
    )
    assert len(probes) == tried and compiled == [model] * tried


@pytest.mark.parametrize('mode', ['True', 'auto'])
def test_without_a_compiler_one_warning_and_no_compiled_code(mode, compiled, monkeypatch, capsys):
    """The real failure, not a made-up one: a C++ compiler that is not there."""
    from torch._inductor import config

    torch._dynamo.reset()
    rt = runtime.Runtime(torch.device('cpu'), torch.float32)
    if mode == 'auto':  # as on a GPU: there it tries
        monkeypatch.setattr(torch, 'ones', lambda *size, device, ones=torch.ones: ones(*size))
        rt = runtime.Runtime(torch.device('cuda'), torch.float32)
    with config.patch({'cpp.cxx': (None, '/no/such/compiler')}):
        assert not runtime.compile_model(torch.nn.Linear(2, 2), mode, rt)
    told = capsys.readouterr().out
    assert told.count('\n') == 1 and told.startswith(
        f'warning: compile={mode}: no working compiler here, going on without'
    )
    assert compiled == []
    other = runtime.Runtime(torch.device('cpu'), torch.float32, rank=1, world_size=2)
    with config.patch({'cpp.cxx': (None, '/no/such/compiler')}):
        assert not runtime.compile_model(torch.nn.Linear(2, 2), 'True', other)
    assert capsys.readouterr().out == ''  # the other processes need not say it too


# speed


@pytest.mark.parametrize(
    'name, peak',
    [
        ('NVIDIA H100 80GB HBM3', 989e12),
        ('NVIDIA H100 PCIe', 756e12),
        ('NVIDIA A100-SXM4-80GB', 312e12),
        ('NVIDIA L4', 121e12),
        ('NVIDIA L40S', 362e12),
        ('NVIDIA GeForce GTX 1080', None),
    ],
)
def test_peak_speed_is_the_devices_own_or_unknown(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: name)
    assert runtime.Runtime(torch.device('cuda'), torch.bfloat16).peak_flops() == peak
    assert runtime.Runtime(torch.device('cpu'), torch.bfloat16).peak_flops() is None


# ---- a restart -----------------------------------------------------------------------------------


def test_a_restart_meets_nothing_of_the_start_before(monkeypatch):
    """torchrun hands out the same store again. The successors' ranks start in any order, with stale
    answers and prefixes in it."""
    store = dist.HashStore()
    store.set('start', 'a start whose rank 0 died at once')
    monkeypatch.setattr(runtime, 'rendezvous', lambda url: iter([(store, 0, 0)]))

    def start(rank, order, found):
        mine = runtime.fresh_store(rank, 3)
        mine.set(f'address of {rank}', f'{rank} {order}')
        found[rank] = [mine.get(f'address of {other}').decode() for other in range(3)]

    for order in itertools.permutations(range(3)):
        found, threads = {}, []
        for rank in order:
            threads.append(threading.Thread(target=start, args=(rank, order, found), daemon=True))
            threads[-1].start()
            time.sleep(0.05)
        for thread in threads:
            thread.join(20)
        assert found == {rank: [f'{other} {order}' for other in range(3)] for rank in range(3)}


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='it is glibc that is told to')
def test_freed_memory_serves_the_next_tensors():
    """Tensors of 64 MiB after another: not each has to have its 16,384 pages cleared by the
    system."""
    program = """import resource, sys, torch
from nanonag import runtime
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def cleared(i):
    before = faults()
    torch.empty(2 ** 24).fill_(i)
    return faults() - before
if len(sys.argv) == 1:
    runtime.start('cpu')
print(min(cleared(i) for i in range(30)))"""
    kept, given_back = (
        int(
            subprocess.run(
                [sys.executable, '-c', program, *more],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=60,
            ).stdout
        )
        for more in ([], ['unasked'])
    )
    assert kept < 100 and given_back > 10000
