"""The way into and out of every script: one message for a user's mistake, exit codes, streams."""

import contextlib
import os
import sys
import time


class UserError(ValueError):
    """What a user got wrong: where, what was given, what is allowed, what to do. Scripts print it
    and exit with 2."""


def run(main):
    """Call main(arguments): every script's way in, and out with 2 after a UserError, with 1 if the
    output could not be written."""
    open_streams()
    code = 0
    try:
        main(sys.argv[1:])
    except UserError as error:
        rank = os.environ.get('RANK', '0')
        if rank != '0':
            # if rank 0 has the same to say, this process is ended before it repeats it
            time.sleep(10)
        tell(f'error: {error}' + f' (rank {rank})' * (rank != '0'))
        dist = sys.modules.get('torch.distributed')
        if dist and dist.is_available() and dist.is_initialized():
            os._exit(2)  # torn down in the middle, a process group can wait for the others for ever
        code = 2
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):  # the last words of a run
            tell(code)
            code = 1
    except BrokenPipeError:
        os._exit(1)  # the reader of the output has left, as `| head` does
    except KeyboardInterrupt:
        # 128 + SIGINT, as a shell reports it; at once: sys.exit would wait for a checkpoint being
        # written
        os._exit(130)
    except OSError:
        if settle(sys.stdout, '\n'):  # it was not about the output
            raise
        code = 1
    if not settle(sys.stdout):
        code = code or 1
    settle(sys.stderr)
    if code:
        sys.exit(code)


def open_streams():
    """Puts the null device in the place of standard streams that were closed (`2>&-`): the next
    file opened would take that number, and with it what libraries print there. What the terminal's
    encoding lacks is printed as an escape."""
    # in the order of their numbers: a file opened takes the lowest that is free
    for name in ('stdin', 'stdout', 'stderr'):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, 'r' if name == 'stdin' else 'w', encoding='utf-8'))
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='backslashreplace')


def settle(stream, probe=''):
    """Whether all that was printed to the stream, and `probe` after it, can be written. If not it
    is told, and dropped together with all that follows: Python would try once more at its end and
    make the exit code 120."""
    try:
        stream.write(probe)
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        tell(
            f'error: {stream.name} cannot be written: {error.strerror}; what is printed there is lost'
        )
        return False
    return True


def tell(message):
    """Prints to standard error; a full or closed one costs the message only."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def warn(message):
    tell(f'warning: {message}')


def world():
    """(rank, number of processes) as torchrun tells them."""
    try:
        return (
            (int(os.environ['RANK']), int(os.environ['WORLD_SIZE']))
            if 'RANK' in os.environ
            else (0, 1)
        )
    except (KeyError, ValueError) as error:
        raise UserError(
            f'RANK is set, but not all that torchrun sets with it ({error}); start with torchrun, or unset RANK'
        ) from None
