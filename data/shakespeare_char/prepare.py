"""Tiny Shakespeare (1.1 MB, 65 characters), character by character: 1,003,854 to train on, the last
111,540 held out.

    python data/shakespeare_char/prepare.py [--input FILES] [--out_dir FOLDER]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.shakespeare.prepare import download
from nanonag.cli import run
from nanonag.data.writer import prepare


def main(argv):
    prepare(argv, __file__, __doc__, download, kind='char', continuous=True)


if __name__ == '__main__':
    run(main)
