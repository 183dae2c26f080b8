"""Python's own standard library, character by character: text that is on every machine, so nothing
is downloaded.

    python data/pystdlib_char/prepare.py [--input FILES] [--out_dir FOLDER]

Each module is a document, about 600 modules and 10 MB with Python 3.11; every tenth one is held
out. The text differs between Python versions: meta.json records the version, and losses compare
only within one.
"""

import os
import string
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanonag.cli import run
from nanonag.data.writer import prepare

# tables, tests, and packages that are installed beside the standard library
SKIPPED = {'encodings', 'test', 'tests', 'idle_test', 'lib2to3', 'site-packages', 'dist-packages'}
# a module with any other character is left out
VOCABULARY = set(string.printable.encode()) - set(b'\r\v\f')
MAX_BYTES = 12_000_000


def find_modules(root):
    """The paths of the modules under `root`, in the order of their names relative to it."""
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]
        paths += [Path(folder, name) for name in files if name.endswith('.py')]
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def modules(root):
    """Yield the text of each module under `root` as a document, up to MAX_BYTES in all."""
    total = 0
    for path in find_modules(root):
        text = path.read_bytes().replace(b'\r\n', b'\n')
        if VOCABULARY.issuperset(text) and total + len(text) <= MAX_BYTES:
            total += len(text)
            yield text.decode('ascii'), True


def download(cfg):
    root = Path(sysconfig.get_path('stdlib'))
    return {'train': lambda: modules(root)}, {'text': 'the standard library of this Python'}


def main(argv):
    prepare(argv, __file__, __doc__, download, kind='char')


if __name__ == '__main__':
    run(main)
