"""The workloads of a suite, read from suites/NAME.txt."""

from pathlib import Path

SUITES = Path(__file__).parent / 'suites'


def read_suite(name):
    """Returns the workloads of a suite as a list of (title, options), options being one string.

    A line of the file holds `title: options`; empty lines and lines that start with # are skipped.
    """
    workloads = []
    for line in (SUITES / f'{name}.txt').read_text(encoding='utf-8').splitlines():
        if line.strip() and not line.startswith('#'):
            title, _, options = line.partition(': ')
            workloads.append((title.strip(), options.strip()))
    return workloads
