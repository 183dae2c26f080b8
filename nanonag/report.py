"""What results are kept with: facts about the run, the code and the machine; tables; JSON files."""

import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.metadata import version

import torch

from nanonag.cli import UserError
from nanonag.files import ROOT


def code_version():
    """The commit of this code, '+' after it if files differ from it; None outside a repository."""

    def git(*args):
        return subprocess.run(
            ['git', '-C', ROOT, *args], capture_output=True, text=True
        ).stdout.strip()

    try:
        return (
            git('rev-parse', '--short=12', 'HEAD')
            + '+' * bool(git('status', '--porcelain', '-uno'))
        ) or None
    except OSError:
        return None


def machine(rt):
    gpu = rt.device_name() if rt.device.type == 'cuda' else None
    return {
        'cpu': replace(rt, device=torch.device('cpu')).device_name(),
        'cores': os.cpu_count(),
        'threads': torch.get_num_threads(),
        'gpu': gpu,
        'system': platform.platform(),
    }


def facts(cfg, rt, *packages):
    """What a file of results says about the run that made it; `packages` are named with their
    versions, beside torch."""
    versions = {'python': platform.python_version(), 'torch': torch.__version__} | {
        name: version(name) for name in packages
    }
    return {
        'date': datetime.now(timezone.utc).isoformat(timespec='seconds'),
        'command': shlex.join(['python', *sys.argv]),
        'commit': code_version(),
        'machine': machine(rt),
        'device': rt.device.type,
        'dtype': str(rt.dtype)[6:],
        'versions': versions,
        'config': asdict(cfg),
    }


def check_json(path):
    """UserError now rather than after the measurements."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise OSError('it cannot be written there')
    except OSError as error:
        raise UserError(f'json={path}: {error.strerror or error}; choose another file') from None


def table(rows):
    """Rows of texts, the head first, as aligned lines: the first column to the left, numbers to the
    right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        '  '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return '\n'.join([lines[0], '-' * len(lines[0]), *lines[1:]])
