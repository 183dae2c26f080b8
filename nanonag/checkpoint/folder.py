"""The folder of a run: the files in it, and the lock that keeps a second run out."""

import errno
import os
import platform
import re
import shutil
from pathlib import Path

from nanonag.checkpoint import shards
from nanonag.cli import UserError, warn
from nanonag.files import temporary_path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

RUN_FILES = ('ckpt.pt', 'best.pt', 'metrics.jsonl')


def run_files(folder):
    """The files and folders of a run that exist in `folder`, as a list of paths."""
    paths = [Path(folder) / name for name in RUN_FILES]
    return [path for path in paths if path.exists()] + history(folder) + shards.folders(folder)


def history(folder):
    """The ckpt-STEP.pt files in `folder`, newest first."""
    paths = Path(folder).glob('ckpt-*.pt')
    return sorted((p for p in paths if re.fullmatch(r'ckpt-\d{8,}\.pt', p.name)), reverse=True)


def claim(folder):
    """Makes the folder if needed and locks it for this process.

    Returns the open lock file; the lock lasts until it is closed. It is a POSIX lock on the file
    `lock`: it ends with the process, however that ends, is not inherited by child processes, and
    holds between machines where the file system supports it. Deletes the temporary files that a
    killed process left behind.

    Raises UserError if another process holds the lock or the folder cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / 'lock', 'a+', encoding='utf-8')
        acquire(lock, folder)
        lock.truncate(0)
        lock.write(f'{os.getpid()} on {platform.node()}\n')
        lock.flush()
        for name in RUN_FILES:
            temporary_path(folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    return lock


def acquire(lock, folder):
    """Locks the open file `lock` without waiting; only warns on a file system without locks.

    Raises UserError, naming the other process, if it is locked already.
    """
    try:
        if fcntl is None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        raise UserError(
            f'out_dir={folder}: process {lock.read().strip()} is training in it; wait for it or '
            f'stop it, or choose another --out_dir'
        ) from None
    except OSError as error:
        warn(
            f'{folder}: no locks on this file system ({error.strerror}); make sure yourself that '
            f'no second run writes into it'
        )


def clear(folder):
    """Deletes the files of a run in the folder. Raises UserError if that is not possible."""
    try:
        for path in run_files(folder):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise cannot_write(folder, error) from None


def cannot_write(folder, error):
    """The UserError for a run's folder in which `error`, an OSError, occurred."""
    return UserError(
        f'out_dir={folder}: cannot be written ({error.strerror}); choose another --out_dir'
    )
