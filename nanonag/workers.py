"""Processes that work for this one; no torch is imported here."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor


def worker_pool(count):
    """A pool of `count` fresh processes that end with this one, whatever ends it: a killed parent's
    would wait for ever."""
    return ProcessPoolExecutor(count, multiprocessing.get_context('spawn'), end_with_parent)


def end_with_parent():
    # no traceback of theirs beside the parent's answer to Ctrl-C
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
