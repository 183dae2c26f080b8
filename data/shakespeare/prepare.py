"""Tiny Shakespeare (1.1 MB) with GPT-2's BPE: 301,966 tokens to train on, 36,059 held out (the last
tenth of the text).

    python data/shakespeare/prepare.py [--input FILES] [--out_dir FOLDER]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanonag.cli import run
from nanonag.data.download import fetch
from nanonag.data.writer import prepare

URL = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'


def download(cfg):
    document = (fetch(URL, SHA256).decode('ascii'), True)
    return {'train': lambda: iter([document])}, {'url': URL, 'url_sha256': SHA256}


def main(argv):
    prepare(argv, __file__, __doc__, download, kind='gpt2', continuous=True)


if __name__ == '__main__':
    run(main)
