"""The repository's folder, and files that are replaced as a whole."""

import errno
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the folder of train.py, config/ and data/


def temporary_path(path):
    """The file beside `path` that write_atomically writes first: its suffix becomes .tmp."""
    return path.with_suffix('.tmp')


def write_atomically(path, write, before_rename=None):
    """Replaces the file `path` so that a reader finds the old content or the new, never a part.

    The new content is written to temporary_path(path) and synchronized to the disk before it is
    renamed. A process killed before the rename leaves the temporary file behind. For the rename
    itself to survive a power failure, call sync_folder afterwards.

    `write` is called with the temporary file, open for writing bytes; `before_rename`, if given,
    with its path once it is complete. An exception from either, or an OSError of the file system,
    leaves the old file in place.
    """
    temporary = temporary_path(path)
    with open(temporary, 'wb') as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    if before_rename is not None:
        before_rename(temporary)
    os.replace(temporary, path)


def sync_folder(folder):
    """Synchronizes a folder to the disk, so that a rename in it survives a power failure.

    Does nothing where folders cannot be opened (Windows) or synchronized (some network file
    systems). Raises OSError for any other failure.
    """
    if not hasattr(os, 'O_DIRECTORY'):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
