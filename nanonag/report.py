"""Records of results: facts about the code, the machine and the run; JSON files; text tables.

Importing this module does not import torch, so that --help and plot.py can use it without.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from nanonag.cli import UserError
from nanonag.files import ROOT

# -----------------------------------------------------------------------------
# facts: where a result comes from


def result_facts(cfg, rt, packages=()):
    """Returns what a JSON file of results says about its origin, as a dict for JSON.

    Args:
        cfg: the script's options, a dataclass.
        rt: the Runtime that the results were computed on.
        packages: names of installed packages whose versions are recorded beside torch's.
    """
    return {
        'date': datetime.now(timezone.utc).isoformat(timespec='seconds'),
        'command': command_line(),
        'commit': code_version(),
        'machine': machine(rt),
        'device': rt.device.type,
        'dtype': rt.dtype_name,
        'versions': {
            'python': platform.python_version(),
            'torch': torch_version(),
            **{name: version(name) for name in packages},
        },
        'config': asdict(cfg),
    }


def training_facts(config, rt, params, compiled):
    """Returns what metrics.jsonl says about each start of a training run, as a dict for JSON.

    Args:
        config: all options of the model and the run, a dict.
        rt: the Runtime that the model is trained on.
        params: number of parameters.
        compiled: whether the model is compiled.
    """
    return {
        'config': config,
        'params': params,
        'world_size': rt.world_size,
        'device': rt.device_name(),
        'dtype': rt.dtype_name,
        'compiled': compiled,
        'torch': torch_version(),
        'commit': code_version(),
        'command': command_line(),
    }


def code_version():
    """Returns the commit of this code, followed by '+' if tracked files differ from it.

    None outside a repository, and where git is not installed.
    """
    try:
        commit = git('rev-parse', '--short=12', 'HEAD')
        changed = git('status', '--porcelain', '--untracked-files=no')
    except OSError:
        return None
    if not commit:
        return None
    return f'{commit}+' if changed else commit


def git(*args):
    """Returns what a git command prints about this repository, '' if the command fails."""
    command = ['git', '-C', ROOT, *args]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def command_line():
    """Returns the command that started this process, quoted for a shell."""
    return shlex.join(['python', *sys.argv])


def torch_version():
    """Returns the version of torch with its build, such as '2.9.0+cpu'."""
    import torch

    return torch.__version__


def machine(rt):
    """Returns the hardware and the operating system, as a dict for JSON."""
    import torch

    on_cpu = replace(rt, device=torch.device('cpu'))
    return {
        'cpu': on_cpu.device_name(),
        'cores': os.cpu_count(),
        'threads': torch.get_num_threads(),
        'gpu': rt.device_name() if rt.device.type == 'cuda' else None,
        'system': platform.platform(),
    }


# -----------------------------------------------------------------------------
# JSON files


def check_json(path):
    """Creates the folder of a JSON file that will be written later; does nothing if path is None.

    Raises UserError if the file cannot be written there: before the work whose results it is for.
    """
    if path is None:
        return
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path if path.exists() else path.parent
        if path.is_dir() or not os.access(target, os.W_OK):
            raise OSError('it cannot be written there')
    except OSError as error:
        raise UserError(f'json={path}: {error.strerror or error}; choose another file') from None


def write_json(path, values, default=None):
    """Writes `values` to a JSON file, readably indented; does nothing if path is None.

    `default` is json.dumps's: it converts what JSON has no type for. Raises UserError if the file
    cannot be written.
    """
    if path is None:
        return
    text = json.dumps(values, indent=1, default=default)
    try:
        Path(path).write_text(text + '\n', encoding='utf-8')
    except OSError as error:
        raise UserError(f'json={path}: cannot be written ({error.strerror or error})') from None


# -----------------------------------------------------------------------------
# text tables


def table(rows, align='<', ruled=False):
    """Returns rows of strings as lines of text with aligned columns, two spaces apart.

    Args:
        rows: lists of strings, all of one length.
        align: '<' (left) or '>' (right) for each column; the last one holds for all further ones.
        ruled: whether a line of dashes separates the first row from the others.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    sides = align.ljust(len(widths), align[-1])
    lines = []
    for row in rows:
        cells = []
        for cell, side, width in zip(row, sides, widths):
            cells.append(cell.rjust(width) if side == '>' else cell.ljust(width))
        lines.append('  '.join(cells).rstrip())
    if ruled:
        lines.insert(1, '-' * len(lines[0]))
    return '\n'.join(lines)
