"""OpenWebText (Skylion007/openwebtext on Hugging Face) with GPT-2's BPE and an end-of-text token
after each document.

    python data/openwebtext/prepare.py [--input FILES [--val_input FILES]] [--out_dir FOLDER]
    [--num_proc N]

The split is nanoGPT's, document for document: 9,035,582,198 tokens to train on, 4,434,897 held out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanonag.cli import run
from nanonag.data.download import load_hub, read_rows
from nanonag.data.writer import prepare

NAME = 'Skylion007/openwebtext'
VAL_FRACTION, SEED = 0.0005, 2357  # nanoGPT's


def download(cfg):
    splits, commit = load_hub(NAME, cfg.revision, cfg.num_proc)
    splits = splits['train'].train_test_split(test_size=VAL_FRACTION, seed=SEED, shuffle=True)
    sources = {
        'train': lambda: read_rows(splits['train']),
        'val': lambda: read_rows(splits['test']),
    }
    shuffle = {'val_fraction': VAL_FRACTION, 'seed': SEED}
    return sources, {'hub': NAME, 'commit': commit, 'shuffle': shuffle}


def main(argv):
    prepare(argv, __file__, __doc__, download, kind='gpt2', hub=True, val_fraction=VAL_FRACTION)


if __name__ == '__main__':
    run(main)
