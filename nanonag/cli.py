"""How every script begins and ends: streams, a single message for a user's mistake, exit codes."""

import contextlib
import difflib
import os
import sys
import time

TORCHRUN = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')
PATIENCE = 10  # seconds that other ranks leave rank 0 to report a mistake that all of them found


class UserError(ValueError):
    """A mistake of the user; scripts print it and exit with code 2.

    The message says where the mistake is, what was given, what is allowed and what to do.
    """


def run(main):
    """Calls ``main(arguments)`` with the command line's arguments, and exits.

    The exit code is 0, 2 after a :class:`UserError`, what a ``SystemExit`` carries (1 if that is a
    message), 130 after Ctrl-C, and 1 if the output could not be written.
    """
    open_streams()
    try:
        code = code_of(main)
    except OSError:
        if settle(sys.stdout, '\n'):  # standard output is not what failed
            raise
        code = 1
    if not settle(sys.stdout):
        code = code or 1
    settle(sys.stderr)
    if code:
        sys.exit(code)


def code_of(main):
    """The exit code that ``main(arguments)`` leads to, its last message printed."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        report(error)
        return 2
    except SystemExit as stop:
        if not isinstance(stop.code, str):
            return stop.code
        tell(stop.code)
        return 1
    except BrokenPipeError:
        os._exit(1)  # the reader of the output has ended, as `| head` does
    except KeyboardInterrupt:
        os._exit(130)  # 128 + SIGINT; at once, where sys.exit would wait for a checkpoint's thread
    return 0


def report(error):
    """Prints a user's mistake, under torchrun once."""
    rank = os.environ.get('RANK', '0')
    if rank != '0':
        time.sleep(PATIENCE)  # rank 0 has usually found the same and torchrun ends this process
        tell(f'error: {error} (rank {rank})')
    else:
        tell(f'error: {error}')
    dist = sys.modules.get('torch.distributed')
    if dist and dist.is_available() and dist.is_initialized():
        os._exit(2)  # destroying a process group that others still use can block


def open_streams():
    """Opens the null device for each standard stream that is closed, as after ``2>&-``.

    Otherwise the next file opened would get the stream's number, and what libraries print would go
    into it. Characters that the output's encoding lacks are printed as escapes.
    """
    for name in ('stdin', 'stdout', 'stderr'):  # in the order of their numbers
        if getattr(sys, name) is None:
            mode = 'r' if name == 'stdin' else 'w'
            setattr(sys, name, open(os.devnull, mode, encoding='utf-8'))
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='backslashreplace')


def settle(stream, probe=''):
    """Writes what was printed to a stream, and ``probe`` after it; returns whether that succeeded.

    After a failure the stream is connected to the null device: Python would otherwise try again at
    exit and change the exit code to 120.
    """
    try:
        stream.write(probe)
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        tell(
            f'error: {stream.name} cannot be written: {error.strerror}; what is printed there '
            f'is lost'
        )
        return False
    return True


def tell(message):
    """Prints to standard error; if that is full or closed, the message is lost."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def warn(message):
    """Prints a warning to standard error."""
    tell(f'warning: {message}')


def note(message):
    """Prints to standard error what was decided for the user, under torchrun once."""
    if world()[0] == 0:
        tell(f'note: {message}')


def first_line(error):
    """The first line of an exception's message, or its type's name where there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(name, names):
    """'; did you mean X?' for the most similar of the names, '' if none is similar."""
    similar = difflib.get_close_matches(name, names, n=1)
    return f'; did you mean {similar[0]!r}?' if similar else ''


def world():
    """(rank, number of processes) as torchrun sets them; (0, 1) for one process.

    Raises UserError if only some of torchrun's variables are set, or if they contradict each other.
    """
    if 'RANK' not in os.environ or os.environ.get('WORLD_SIZE') == '1':
        return 0, 1
    try:
        rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
        if not 0 <= rank < size:
            raise ValueError(f'RANK={rank}, WORLD_SIZE={size}')
    except (KeyError, ValueError) as error:
        raise UserError(
            f'RANK is set, but not all that torchrun sets with it ({error}): '
            f'{", ".join(TORCHRUN)}; start with torchrun, or unset RANK'
        ) from None
    return rank, size


def check_launcher():
    """Checks at once what torchrun sets, and warns of other launchers, whose copies train alone.

    Raises UserError if some of torchrun's variables are missing: the processes would wait for each
    other for ever.
    """
    if world()[1] > 1:
        missing = [name for name in ('MASTER_ADDR', 'MASTER_PORT') if name not in os.environ]
        if missing:
            raise UserError(
                f'RANK and WORLD_SIZE are set, but not {", ".join(missing)}, which torchrun sets '
                f'with them; start with torchrun, or unset RANK'
            )
    for name in ('SLURM_STEP_NUM_TASKS', 'OMPI_COMM_WORLD_SIZE', 'PMI_SIZE'):
        size = os.environ.get(name, '')
        if 'RANK' not in os.environ and size.isdigit() and int(size) > 1:
            warn(
                f'{name}={size}, but this process trains alone; for one run on all of them let '
                f'each node start torchrun (docs/training.md)'
            )
            return


def stay_single(script):
    """Ignores what a cluster has set for torchrun, in a script that works in one process.

    Raises UserError if torchrun itself started several of it.
    """
    if 'TORCHELASTIC_RUN_ID' in os.environ and os.environ.get('WORLD_SIZE', '1') != '1':
        raise UserError(f'{script} works in one process: run it with python, not with torchrun')
    for name in TORCHRUN:
        os.environ.pop(name, None)
