"""TinyStories (roneneldan/TinyStories on Hugging Face, its own validation split) with GPT-2's BPE
and an end-of-text token after each story: about 471.6M tokens to train on, 2.37M held out.

    python data/tinystories/prepare.py [--input FILES [--val_input FILES]] [--out_dir FOLDER]
    [--num_proc N]

The stories of a .txt file are those between lines of <|endoftext|>, as in the data set's own
TinyStories-*.txt.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanonag.cli import run
from nanonag.data.download import load_hub, read_rows
from nanonag.data.writer import prepare

NAME = 'roneneldan/TinyStories'
SEPARATOR = '<|endoftext|>'
VAL_FRACTION = 0.005  # of --input; the data set has its own validation split


def download(cfg):
    splits, commit = load_hub(NAME, cfg.revision, cfg.num_proc)
    sources = {
        'train': lambda: read_rows(splits['train']),
        'val': lambda: read_rows(splits['validation']),
    }
    return sources, {'hub': NAME, 'commit': commit}


def main(argv):
    prepare(
        argv,
        __file__,
        __doc__,
        download,
        kind='gpt2',
        hub=True,
        separator=SEPARATOR,
        val_fraction=VAL_FRACTION,
    )


if __name__ == '__main__':
    run(main)
