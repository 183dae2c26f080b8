"""Device, precision and processes: how every script that computes begins."""

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

from nanonag.cli import UserError, first_line, settle, world
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
    """The device, the precision and the processes of this program."""

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

    @property
    def dtype_name(self):
        """'float32', 'bfloat16' or 'float16'."""
        return str(self.dtype).removeprefix('torch.')

    def autocast(self):
        """A context in which matmuls are computed in ``dtype``."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def print(self, *args):
        """Prints on rank 0; a closed pipe or a full disk loses the text and not the run."""
        if self.is_main:
            try:
                print(*args, flush=True)
            except OSError:
                settle(sys.stdout, '\n')

    def synchronize(self):
        """Waits until the device has done all that was asked of it."""
        if self.device.type in ('cuda', 'mps'):
            getattr(torch, self.device.type).synchronize()

    def sum(self, values):
        """The sums over all ranks of a list of numbers or 0-dim tensors, as floats."""
        numbers = [torch.as_tensor(v, dtype=torch.float32, device=self.device) for v in values]
        total = torch.stack(numbers)
        if self.distributed:
            dist.all_reduce(total)
        return total.tolist()

    def mean(self, value):
        """The mean over all ranks of a number or 0-dim tensor, as a float."""
        return self.sum([value])[0] / self.world_size

    def any(self, flag):
        """Whether the flag is set on any rank; all ranks get the same answer."""
        return self.sum([flag])[0] > 0 if self.distributed else flag

    def gather(self, value):
        """The values of all ranks, in a list by rank."""
        values = [value] * self.world_size
        if self.distributed:
            dist.all_gather_object(values, value)
        return values

    def device_name(self):
        if self.device.type == 'cuda':
            return torch.cuda.get_device_name(self.device)
        return cpu_features().get('cpu_name') or platform.processor() or self.device.type

    def peak_flops(self):
        """The device's bfloat16 operations per second by its data sheet, None if unknown."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == 'cuda' else ''
        return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def start(device='auto', dtype='auto', backend='auto'):
    """Picks the device, a precision that suits it, and under torchrun joins the process group.

    Args:
        device: 'auto', 'cuda', 'cuda:1', 'mps', 'cpu' or 'xpu'.
        dtype: 'auto' (bfloat16 where the hardware has it), or a key of DTYPES.
        backend: 'auto' (nccl on CUDA, else gloo), 'nccl' or 'gloo'.

    Returns:
        A :class:`Runtime`.

    Raises:
        UserError: for a device or a precision that this machine lacks.
    """
    rank, world_size = world()
    place = find_device(device, rank, world_size)
    if place.type == 'cuda':
        torch.cuda.set_device(place)
    elif place.type == 'cpu':
        keep_freed_memory()
    if dtype == 'auto':
        dtype = 'bfloat16' if has_bfloat16(place) else 'float32'
    if dtype == 'float16' and place.type == 'cpu':
        raise UserError(
            'dtype=float16: no gain on a CPU and easily out of range; use bfloat16 or float32'
        )
    if world_size > 1 and not dist.is_initialized():
        if backend == 'auto':
            backend = 'nccl' if place.type == 'cuda' else 'gloo'
        if backend == 'nccl' and place.type != 'cuda':
            raise UserError(
                f'backend=nccl works with CUDA devices only, not device={place.type}; use '
                f'--backend=gloo'
            )
        dist.init_process_group(
            backend,
            store=fresh_store(rank, world_size),
            rank=rank,
            world_size=world_size,
            device_id=place if backend == 'nccl' else None,
        )
    return Runtime(place, DTYPES[dtype], rank, world_size)


def find_device(name, rank, world_size):
    """The torch.device of an option; under torchrun each local rank has a GPU of its own."""
    if name == 'auto':
        name = 'mps' if torch.backends.mps.is_available() else 'cpu'
        name = 'cuda' if torch.cuda.is_available() else name
    try:
        device = torch.device(name)
        if device.type == 'cuda':
            local_rank = int(os.environ.get('LOCAL_RANK', rank))
            index = local_rank if world_size > 1 else device.index or 0
            device = torch.device('cuda', index)
        if device.type not in ('cuda', 'mps', 'cpu', 'xpu'):
            raise RuntimeError('not a device to train on')
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f'device={name}: not usable here ({first_line(error)}); try --device=cpu'
        ) from None
    return device


def fresh_store(rank, world_size):
    """torchrun's key-value store, under a prefix that all ranks of this start agree on.

    After a restart torchrun hands out the same store, with the addresses of ended processes in it;
    a rank that reads one before it is overwritten never connects. Counts of restarts differ between
    nodes, so rank 0 draws a prefix and the others answer under it until rank 0 confirms that it has
    read their answers.
    """
    store, _, _ = next(rendezvous('env://'))
    me = uuid.uuid4().hex
    if rank == 0:
        store.set('start', me)
        answers = [store.get(f'{me}/{other}').decode() for other in range(1, world_size)]
        store.set(f'{me}/confirmed', ' '.join(answers))
        return dist.PrefixStore(me, store)
    while True:
        prefix = store.get('start').decode()  # that of an earlier start until rank 0 is here
        store.set(f'{prefix}/{rank}', me)
        confirmed = f'{prefix}/confirmed'
        if store.check([confirmed]) and me in store.get(confirmed).decode():
            return dist.PrefixStore(prefix, store)
        time.sleep(0.02)


def stop():
    """Leaves the process group, all ranks together.

    DDP's wrapper must be gone by then: its destructor frees the group otherwise.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# ------------------------------------------------------------------- what this machine can do


def cpu_features():
    """{name: value} of this CPU, as far as torch reports them (torch 2.9 does not)."""
    if hasattr(torch.cpu, 'get_capabilities'):
        return torch.cpu.get_capabilities()
    return {'avx512_bf16': torch.cpu._is_avx512_bf16_supported()}


def has_bfloat16(device):
    """Whether the device multiplies bfloat16 matrices in hardware."""
    if device.type == 'cuda':
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == 'cpu':
        features = cpu_features()
        return any(features.get(name) for name in ('avx512_bf16', 'amx_bf16', 'bf16'))
    return False


def why_no_compiler(device):
    """None if torch.compile works on the device, else the reason.

    A missing C++ compiler, Triton or Python headers each raise another type of exception.
    """
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:
        return first_line(error)
    return None


def to_compile(mode, rt, decoding=False):
    """Whether to run compiled code; warns where this machine cannot do what was asked.

    Args:
        mode: 'auto' (on CUDA only), 'True' or 'False'.
        rt: the Runtime.
        decoding: for steps of one token, which are compiled on CUDA only.
    """
    on_cuda = rt.device.type == 'cuda'
    if mode == 'False' or (mode == 'auto' and not on_cuda):
        return False
    if decoding and not on_cuda:
        rt.print(
            f'warning: compile={mode}: tokens are generated by compiled code on CUDA only, '
            f'going on without'
        )
        return False
    problem = why_no_compiler(rt.device)
    if problem is not None:
        rt.print(f'warning: compile={mode}: no working compiler here, going on without ({problem})')
    return problem is None


def compile_model(model, mode, rt):
    """Compiles a model in place if :func:`to_compile`; returns whether it did."""
    compiled = to_compile(mode, rt)
    if compiled:
        # each batch size gets a graph of its own, not one slower graph for all sizes
        model.compile(dynamic=False)
    return compiled


# ------------------------------------------------------------- random numbers and signals


def rng_state(device):
    """The states of the generators that dropout on the device draws from, a list of tensors."""
    states = [torch.get_rng_state()]
    if device.type == 'cuda':
        states.append(torch.cuda.get_rng_state(device))
    return states


def restore_rng(rt, states, dropout):
    """Sets this rank's generators to the states of a checkpoint, a list by rank.

    With another number of processes the generators stay as they are, which is reported if
    ``dropout`` is on. Raises UserError if the states are none.
    """
    if len(states) != rt.world_size:
        if dropout:
            rt.print(
                f'note: the checkpoint is of {len(states)} processes, these are {rt.world_size}: '
                f'same data, other dropout masks'
            )
        return
    mine = states[rt.rank]
    try:
        torch.set_rng_state(mine[0])
        if rt.device.type == 'cuda' and len(mine) > 1:
            torch.cuda.set_rng_state(mine[1], rt.device)
    except (RuntimeError, TypeError) as error:
        raise UserError(f'the checkpoint holds no usable `rng` ({error})') from None


class Signals:
    """Remembers the first SIGTERM, SIGINT or SIGUSR1 in ``caught``; a second SIGINT interrupts."""

    def __init__(self):
        self.caught = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.catch)

    def catch(self, number, frame):
        if self.caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.caught = signal.Signals(number).name
