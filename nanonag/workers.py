"""Worker processes. This module imports no torch, so that a worker starts quickly."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor


def worker_pool(count):
    """A ProcessPoolExecutor of `count` fresh processes, which end with this one.

    Without that, the workers of a killed process would wait for work forever.
    """
    spawn = multiprocessing.get_context('spawn')
    return ProcessPoolExecutor(count, spawn, initializer=end_with_parent)


def end_with_parent():
    """Makes this worker exit, whatever it is doing, as soon as its parent process ends."""
    # On Ctrl-C the parent prints what there is to say; workers should add no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=exit_after_parent, daemon=True).start()


def exit_after_parent():
    parent = multiprocessing.parent_process()
    assert parent is not None, 'only a worker has a parent'
    parent.join()
    os._exit(1)
