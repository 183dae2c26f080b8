"""
Makes one file of a sharded checkpoint (train.py --save_sharded=True).

    python checkpoint.py out/ckpt.pt whole.pt
"""

from pathlib import Path

from nanonag.checkpoint import Saver, read
from nanonag.cli import UserError, run


def main(argv):
    if len(argv) != 2 or any(argument.startswith('-') for argument in argv):
        raise UserError(
            f'{" ".join(argv) or "no arguments"}: write python checkpoint.py SOURCE TARGET, '
            f'the names of two files'
        )
    source, target = map(Path, argv)
    if target.exists():
        raise UserError(f'{target} exists already; choose another name')
    state = read(source)
    state.pop('shards', None)
    if not Saver(target.parent).write(target.name, state):
        raise SystemExit(1)
    print(f'{target}: {target.stat().st_size:,} bytes')


if __name__ == '__main__':
    run(main)
