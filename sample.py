"""Continues a prompt with a trained model. The checkpoint is all it needs: the tokenizer's
description is in it.

    python sample.py --out_dir=out/demo_lt_nag --start='def ' --num_samples=3
    python sample.py --out_dir=out --start=FILE:prompt.txt --temperature=0
    python sample.py --init_from=gpt2-xl --start='What is the answer?'
"""

if __name__ == '__main__':
    from configurator import show_help

    show_help(__doc__, 'sample.py:SampleConfig')  # before torch is imported: instant

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import checkpoint
import runtime
import tokenizer
from checkpoint import PRETRAINED
from configurator import UserError, at_least, build, parse, run
from generation import Decoder


@dataclass(frozen=True)
class SampleConfig:
    out_dir: str = 'out'  # a run's folder: its best.pt (ckpt.pt if there is none)
    # resume: from out_dir; gpt2[-medium|-large|-xl]; or a checkpoint file, nanoGPT's too
    init_from: str = 'resume'
    start: str = '\n'  # the prompt, or FILE:name of a file (UTF-8) that holds it
    num_samples: int = 3  # continuations, made at once
    max_new_tokens: int = 500
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 200  # sample among that many likeliest tokens; 0: among all
    seed: int = 1337
    device: str = 'auto'  # cuda, cuda:1, mps, cpu
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of the matmuls
    # faster tokens after a first that takes long; auto: on CUDA
    compile: Literal['auto', 'True', 'False'] = 'auto'

    def __post_init__(self):
        at_least(self, num_samples=1, max_new_tokens=1, temperature=0, top_k=0, seed=0)


def load(cfg):
    """(GPT, Tokenizer) that `init_from` asks for."""
    if cfg.init_from in PRETRAINED:
        model, description = checkpoint.pretrained(cfg.init_from), {'kind': 'gpt2'}
    else:
        path = cfg.out_dir if cfg.init_from == 'resume' else cfg.init_from
        if cfg.init_from == 'resume':
            if os.path.isfile(path):
                raise UserError(
                    f"out_dir={path} is a file, not a run's folder; write --init_from={path}"
                )
            state = checkpoint.read_latest(path, best=True)
            if state is None:
                raise UserError(
                    f'{path}: no such checkpoint there (best.pt, ckpt.pt); train one first or give the right --out_dir'
                )
        elif os.path.isfile(path):
            state = checkpoint.read(path)
        else:
            raise UserError(
                f'init_from={path}: neither a checkpoint file nor one of resume, {", ".join(PRETRAINED)}'
            )
        description = state.get('tokenizer')
        if description is None:  # nanoGPT's files do not say
            description = {'kind': 'gpt2'}
            runtime.warn(f"{path} names no tokenizer; taking GPT-2's, as nanoGPT does")
        model = checkpoint.build_model(
            state, path, vocab_used=tokenizer.from_description(description).vocab_size
        )
    return model, tokenizer.from_description(description)


def prompt(start):
    if not start.startswith('FILE:'):
        return start
    try:
        # Windows editors put a mark before the text
        return Path(start[5:]).read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'start={start}: cannot be read as UTF-8 text ({error})') from None


def main(argv):
    cfg = build(SampleConfig, parse(argv, SampleConfig))
    text = prompt(cfg.start)
    with runtime.memory_for('lower --num_samples, or sample from a smaller model'):
        model, tok = load(cfg)
        ids = tok.encode(text)
        if not ids:
            raise UserError(
                "start is empty; give at least one character to continue, such as --start=$'\\n'"
            )
        rt = runtime.start(cfg.device, cfg.dtype)
        decoder = Decoder(
            model.to(rt.device),
            rt.dtype,
            cfg.num_samples,
            runtime.to_compile(cfg.compile, rt, decoding=True),
        )
        torch.manual_seed(cfg.seed)
        idx = torch.tensor([ids], device=rt.device).expand(cfg.num_samples, -1)
        with rt.autocast():
            out = decoder.generate(idx, cfg.max_new_tokens, cfg.temperature, cfg.top_k or None)
    for sample in out.tolist():
        print(tok.decode(sample))
        print('-' * 15)


if __name__ == '__main__':
    run(main)
