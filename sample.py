"""
Continues a prompt with a trained model. The checkpoint is all it needs: the tokenizer is in it.

    python sample.py --out_dir=out/demo_lt_nag --start='def ' --num_samples=3
    python sample.py --out_dir=out --start=FILE:prompt.txt --temperature=0
    python sample.py --init_from=gpt2-xl --start='What is the answer?'
    python sample.py --init_from=nanogpt/ckpt.pt --dataset=shakespeare_char
"""

if __name__ == '__main__':
    from nanonag.help import show_help

    show_help(__doc__, 'sample.py:SampleConfig')  # before torch is imported

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from nanonag import memory, runtime
from nanonag.cli import UserError, run, stay_single
from nanonag.configurator import FilePath, at_least, build, parse
from nanonag.decoder import Decoder
from start import load


@dataclass(frozen=True)
class SampleConfig:
    out_dir: FilePath = 'out'  # a run's folder: its best.pt (ckpt.pt if there is none)
    # resume: from out_dir; gpt2[-medium|-large|-xl]; or a checkpoint file, nanoGPT's too
    init_from: FilePath = 'resume'
    # the data folder whose tokenizer a checkpoint of nanoGPT needs; default GPT-2's
    dataset: FilePath | None = None
    start: str = '\n'  # the prompt, or FILE:name of a file (UTF-8) that holds it
    num_samples: int = 3  # continuations, generated together
    max_new_tokens: int = 500  # tokens in each
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 200  # sample among that many likeliest tokens; 0: among all
    seed: int = 1337
    device: str = 'auto'  # cuda, cuda:1, mps, cpu
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of the matmuls
    # the first token takes long, the others less; auto: on CUDA
    compile: Literal['auto', 'True', 'False'] = 'auto'

    def __post_init__(self):
        at_least(self, num_samples=1, max_new_tokens=1, temperature=0, top_k=0, seed=0)


def prompt(start):
    """The text to continue; UserError if the file that it names cannot be read."""
    if not start.startswith('FILE:'):
        return start
    try:
        # Windows editors put a byte order mark before the text
        return Path(start[5:]).expanduser().read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'start={start}: cannot be read as UTF-8 text ({error})') from None


def main(argv):
    stay_single('sample.py')
    cfg = build(SampleConfig, parse(argv, SampleConfig))
    text = prompt(cfg.start)
    with memory.memory_for('lower --num_samples, or sample from a smaller model'):
        model, tok = load(cfg)
        ids = tok.encode(text)
        if not ids:
            raise UserError(
                "start is empty; give at least one character to continue, such as --start=$'\\n'"
            )
        rt = runtime.start(cfg.device, cfg.dtype)
        compiled = runtime.to_compile(cfg.compile, rt, decoding=True)
        decoder = Decoder(model.to(rt.device), rt.dtype, cfg.num_samples, compiled)
        torch.manual_seed(cfg.seed)
        idx = torch.tensor([ids], device=rt.device).expand(cfg.num_samples, -1)
        with rt.autocast():
            samples = decoder.generate(idx, cfg.max_new_tokens, cfg.temperature, cfg.top_k or None)
    for sample in samples.tolist():
        print(tok.decode(sample))
        print('-' * 15)


if __name__ == '__main__':
    run(main)
