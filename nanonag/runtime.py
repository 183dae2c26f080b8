"""Device, precision, processes and printing: the preamble that train, sample and bench share."""

import contextlib
import os
import platform
import signal
import sys
import time
import uuid
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from nanonag.cli import UserError, settle, world
from nanonag.memory import keep_freed_memory

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
# dense 16-bit operations per second by device name (the makers' data sheets); the first match
# counts
PEAK_FLOPS = {
    'H200': 989e12,
    'H100 PCIe': 756e12,
    'H100': 989e12,
    'B200': 2250e12,
    'A100': 312e12,
    'L40S': 362e12,
    'L40': 181e12,
    'L4': 121e12,
    'A10G': 70e12,
    'RTX 4090': 165e12,
    'RTX 3090': 71e12,
    'V100': 125e12,
    'T4': 65e12,
}


@dataclass(frozen=True)
class Runtime:
    device: torch.device
    dtype: torch.dtype  # of the matmuls; parameters stay float32
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self):
        return self.rank == 0

    @property
    def distributed(self):
        return dist.is_initialized()

    def autocast(self):
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def print(self, *args):
        """Rank 0's voice."""
        if self.is_main:
            try:
                print(*args, flush=True)
            except OSError:  # a closed pipe or a full disk costs what is printed, not the run
                settle(sys.stdout, '\n')

    def synchronize(self):
        if self.device.type in ('cuda', 'mps'):
            getattr(torch, self.device.type).synchronize()

    def sum(self, values):
        """The sums over ranks of a list of numbers or 0-dim tensors, as floats: one
        synchronization."""
        total = torch.stack(
            [torch.as_tensor(v, dtype=torch.float32, device=self.device) for v in values]
        )
        if self.distributed:
            dist.all_reduce(total)
        return total.tolist()

    def mean(self, value):
        return self.sum([value])[0] / self.world_size

    def any(self, flag):
        """Whether any rank says so; all learn it, so that they act together."""
        return self.sum([flag])[0] > 0 if self.distributed else flag

    def gather(self, value):
        """Every rank's value, in a list by rank."""
        values = [value] * self.world_size
        if self.distributed:
            dist.all_gather_object(values, value)
        return values

    def device_name(self):
        if self.device.type == 'cuda':
            return torch.cuda.get_device_name(self.device)
        return cpu_features().get('cpu_name') or platform.processor() or self.device.type

    def peak_flops(self):
        """bfloat16 operations per second of one such device, None if unknown."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == 'cuda' else ''
        return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def start(device='auto', dtype='auto', backend='auto'):
    """Picks the device, then the dtype it is good at; joins the process group under torchrun.

    Raises UserError for a device or dtype that this machine lacks.
    """
    rank, world_size = world()
    if device == 'auto':
        device = (
            'cuda'
            if torch.cuda.is_available()
            else 'mps'
            if torch.backends.mps.is_available()
            else 'cpu'
        )
    try:
        device = torch.device(device)
        if device.type == 'cuda':
            device = torch.device(
                'cuda',
                int(os.environ.get('LOCAL_RANK', rank))
                if 'RANK' in os.environ
                else device.index or 0,
            )
        if device.type not in ('cuda', 'mps', 'cpu', 'xpu'):
            raise RuntimeError('not a device to train on')
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f'device={device}: not usable here ({str(error).splitlines()[0]}); try --device=cpu'
        ) from None
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    elif device.type == 'cpu':
        keep_freed_memory()
    if dtype == 'auto':
        dtype = 'bfloat16' if has_bfloat16(device) else 'float32'
    if dtype == 'float16' and device.type == 'cpu':
        raise UserError(
            'dtype=float16: no gain on a CPU and easily out of range; use bfloat16 or float32'
        )
    if 'RANK' in os.environ and not dist.is_initialized():
        backend = ('nccl' if device.type == 'cuda' else 'gloo') if backend == 'auto' else backend
        if backend == 'nccl' and device.type != 'cuda':
            raise UserError(
                f'backend=nccl works with CUDA devices only, not device={device.type}; use --backend=gloo'
            )
        dist.init_process_group(
            backend,
            store=fresh_store(rank, world_size),
            rank=rank,
            world_size=world_size,
            device_id=device if backend == 'nccl' else None,
        )
    return Runtime(device, DTYPES[dtype], rank, world_size)


def fresh_store(rank, world_size):
    """torchrun's key-value store, under a prefix of this start's own that all ranks agree on.

    After a restart torchrun hands out the store of the start before, with the dead processes'
    addresses in it; whoever reads one before its successor has written never connects. Counts of
    restarts differ between nodes, so rank 0 draws a prefix and the others answer under it until
    rank 0 confirms that it has read their answers."""
    store, _, _ = next(rendezvous('env://'))
    me = uuid.uuid4().hex
    if rank == 0:
        store.set('start', me)
        # waits for each
        answers = [store.get(f'{me}/{other}').decode() for other in range(1, world_size)]
        store.set(f'{me}/confirmed', ' '.join(answers))
        return dist.PrefixStore(me, store)
    while True:
        start = store.get('start').decode()  # an earlier start's, if rank 0 is not there yet
        store.set(f'{start}/{rank}', me)
        if store.check([f'{start}/confirmed']) and me in store.get(f'{start}/confirmed').decode():
            return dist.PrefixStore(start, store)
        time.sleep(0.02)


def cpu_features():
    """{name: value} of this CPU, as far as torch tells (2.9 does not)."""
    return getattr(torch.cpu, 'get_capabilities', dict)() or {
        'avx512_bf16': torch.cpu._is_avx512_bf16_supported()
    }


def has_bfloat16(device):
    """Whether bfloat16 matmuls run on hardware, not emulated."""
    if device.type == 'cuda':
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == 'cpu':
        features = cpu_features()
        return any(features.get(name) for name in ('avx512_bf16', 'amx_bf16', 'bf16'))
    return False


def compiler_works(device):
    """True, or why not: a missing C++ compiler, Triton or Python headers each fail in their own
    way."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
        return True
    except Exception as error:
        return str(error).strip().splitlines()[0]


def to_compile(mode, runtime, decoding=False):
    """Whether `mode` ('auto': on CUDA only, 'True', 'False') and this machine mean compiled code;
    warns where they disagree.

    decoding: for steps of one token, which are compiled on CUDA only.
    """
    if mode == 'False' or (mode == 'auto' and runtime.device.type != 'cuda'):
        return False
    if decoding and runtime.device.type != 'cuda':
        runtime.print(
            f'warning: compile={mode}: tokens are generated by compiled code on CUDA only, going on without'
        )
        return False
    if (works := compiler_works(runtime.device)) is not True:
        runtime.print(
            f'warning: compile={mode}: no working compiler here, going on without ({works})'
        )
    return works is True


def compile_model(model, mode, runtime):
    """Compiles `model` in place if `to_compile`; returns whether it did."""
    compiled = to_compile(mode, runtime)
    if compiled:
        # evaluation's batch size gets a graph of its own, not a slower one for all sizes
        model.compile(dynamic=False)
    return compiled


def rng_state(device):
    """The state of the generators that dropout on `device` draws from, a list of tensors."""
    return [torch.get_rng_state()] + (
        [torch.cuda.get_rng_state(device)] if device.type == 'cuda' else []
    )


def set_rng_state(device, states):
    """Raises UserError for what is no state of a generator."""
    try:
        torch.set_rng_state(states[0])
        if device.type == 'cuda' and len(states) > 1:
            torch.cuda.set_rng_state(states[1], device)
    except (RuntimeError, TypeError) as error:
        raise UserError(f'the checkpoint holds no usable `rng` ({error})') from None


class Signals:
    """The first SIGTERM, SIGINT or SIGUSR1 asks the loop to stop after its step; a second SIGINT
    stops at once."""

    def __init__(self):
        self.caught = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.catch)

    def catch(self, number, frame):
        if self.caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.caught = signal.Signals(number).name


def stop():
    """Leaves the process group, together. Drop DDP's wrapper first: its destructor must not be the
    one to free the group."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
