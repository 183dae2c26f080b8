"""Files: where the repository lies, and writing so that a reader never sees half a file."""

import errno
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the folder of train.py, config/ and data/


def sync_folder(folder):
    """Makes a rename last, where folders can be opened (not on Windows) and synchronized (not on
    some network file systems)."""
    if hasattr(os, 'O_DIRECTORY'):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)
