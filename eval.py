"""Scores a trained model on the tasks of EleutherAI's lm-evaluation-harness (pip install lm-eval),
which downloads their data.

    python eval.py --out_dir=out/owt_lt_nag --tasks=hellaswag --num_fewshot=10 --json=hellaswag.json
    python eval.py --init_from=gpt2 --tasks hellaswag lambada_openai --limit=100
    python eval.py --out_dir=out --include_path=FOLDER --tasks=mine        # a task of your own: FOLDER/mine.yaml

`lm-eval ls tasks` lists the tasks.
"""

if __name__ == '__main__':
    from nanonag.help import show_help

    show_help(__doc__, 'eval.py:EvalConfig')  # before torch is imported: instant

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from nanonag import memory, runtime
from nanonag.cli import UserError, run
from nanonag.configurator import at_least, build, nearest, parse
from nanonag.report import check_json, facts
from start import load

try:
    from lm_eval.api.model import TemplateLM
except ImportError as error:  # it is optional; main says so
    TemplateLM, missing = object, error


@dataclass(frozen=True)
class EvalConfig:
    out_dir: str = 'out'  # a run's folder: its best.pt (ckpt.pt if there is none)
    # resume: from out_dir; gpt2[-medium|-large|-xl]; or a checkpoint file, nanoGPT's too
    init_from: str = 'resume'
    tasks: tuple[str, ...] = ('hellaswag',)  # names of tasks or groups; mmlu_* takes all that match
    num_fewshot: int | None = None  # solved examples before each question; default: the task's own
    limit: int | None = None  # questions of each task, to try it out; default: all
    include_path: str | None = None  # a folder with tasks of your own
    batch_size: int = 8  # requests at once; all their logits are held
    json: str | None = None  # file for every result, the options and the machine
    seed: int = 1234  # of the choice of examples and of sampling; the harness's own default
    device: str = 'auto'  # cuda, cuda:1, mps, cpu
    # of the matmuls; bfloat16 rounds a logit of 10 by up to 0.03
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'float32'

    def __post_init__(self):
        at_least(self, num_fewshot=0, limit=1, batch_size=1, seed=0)


class HarnessLM(TemplateLM):
    """What the harness asks of a model, answered by a GPT and its tokenizer.

    `requests` counts what was asked, `truncated` what did not fit block_size and was seen without
    its beginning."""

    def __init__(self, model, tok, rt, batch_size=8):
        super().__init__()
        self.model, self.tok, self.rt, self.batch_size = (
            model.to(rt.device).eval(),
            tok,
            rt,
            batch_size,
        )
        self.requests = self.truncated = 0

    @property
    def max_length(self):
        return self.model.cfg.block_size

    @property
    def eot_token_id(self):
        """What stands before a text that has no context: the end of the text before, or of its last
        line for characters."""
        return self.tok.eot if self.tok.eot is not None else self.tok.encode('\n')[0]

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.tok.encode(string)

    def windows(self, context, continuation):
        """Yields (ids, n) with at most max_length ids before the last: together the last n ids of
        each are `continuation`."""
        from lm_eval.utils import get_rolling_token_windows

        whole, end = context + continuation, len(context)
        for _, predicted in get_rolling_token_windows(
            continuation, context[-1], self.max_length, context_len=1
        ):
            end += len(predicted)
            yield whole[max(0, end - self.max_length - 1) : end], len(predicted)

    @torch.no_grad()
    def score(self, pairs, quiet):
        """[(context ids, continuation ids)] -> [(log-probability of the continuation in nats, would
        greedy decoding give it)].

        Probabilities are those of the training loss (over the whole table), greedy is generate's
        (without its padding)."""
        windows = [(i, *window) for i, pair in enumerate(pairs) for window in self.windows(*pair)]
        # like lengths together; what needs most memory first
        windows.sort(key=lambda window: -len(window[1]))
        totals, greedy = [0.0] * len(pairs), [True] * len(pairs)
        for start in tqdm(
            range(0, len(windows), self.batch_size), desc='scoring', disable=quiet or None
        ):
            batch = windows[start : start + self.batch_size]
            # on the right: no token looks there
            idx = pad_sequence([torch.tensor(ids) for _, ids, _ in batch], batch_first=True).to(
                self.rt.device
            )
            with self.rt.autocast():
                logits, _ = self.model(idx[:, :-1], return_logits=True)
            for row, row_logits, (i, ids, n) in zip(idx, logits, batch):
                # each by the id before
                targets, predicted = (
                    row[len(ids) - n : len(ids)],
                    row_logits[len(ids) - 1 - n : len(ids) - 1],
                )
                logp = predicted.to(
                    torch.promote_types(predicted.dtype, torch.float32)
                ).log_softmax(-1)
                totals[i] += logp.gather(-1, targets[:, None]).sum().item()
                greedy[i] &= (
                    (predicted[:, : self.model.cfg.vocab_used].argmax(-1) == targets).all().item()
                )
        if not all(map(math.isfinite, totals)):
            raise ValueError('the model gave non-finite logits: its weights are damaged')
        return list(zip(totals, greedy))

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        pairs = [
            (context or [self.prefix_token_id], continuation)
            for _, context, continuation in requests
        ]
        self.requests += len(pairs)
        self.truncated += sum(
            len(context + continuation) - 1 > self.max_length for context, continuation in pairs
        )
        return self.score(pairs, disable_tqdm)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        self.requests += len(requests)
        pairs = [([self.prefix_token_id], self.tok_encode(*request.args)) for request in requests]
        return [logp for logp, _ in self.score(pairs, disable_tqdm)]

    def generate_until(self, requests, disable_tqdm=False):
        texts, alike = [None] * len(requests), {}
        for i, (context, options) in enumerate(request.args for request in requests):
            ids = self.tok_encode(context) or [self.prefix_token_id]
            alike.setdefault((len(ids), str(options)), []).append((i, ids, options))
        batches = [
            group[start : start + self.batch_size]
            for group in alike.values()
            for start in range(0, len(group), self.batch_size)
        ]
        for batch in tqdm(batches, desc='generating', disable=disable_tqdm or None):
            for (i, _, _), text in zip(
                batch, self.generate([ids for _, ids, _ in batch], batch[0][2])
            ):
                texts[i] = text
        return texts

    def generate(self, prompts, options):
        """Continues prompts of one length, as the harness's `options` say -> texts that end before
        the first stop sequence."""
        from lm_eval.models.utils import normalize_gen_kwargs

        options = normalize_gen_kwargs(options, default_max_gen_toks=256)
        temperature = options.get('temperature', 1.0 if options['do_sample'] else 0.0)
        if unknown := options.keys() - {
            'until',
            'do_sample',
            'temperature',
            'max_gen_toks',
            'top_k',
            *(['top_p'] if temperature == 0 else []),
        }:
            raise UserError(
                f'the task asks for {min(unknown)}={options[min(unknown)]}, which generation does not have; leave the task out'
            )
        until = [text for text in options['until'] if text] + (
            [] if self.tok.eot is None else [self.tok.decode([self.tok.eot])]
        )
        start, done = len(prompts[0]), {}  # row: (its text, prompt and text in tokens)

        def stop(idx):
            for row, ids in enumerate(idx[:, start:].tolist()):
                if row not in done:
                    text = self.tok.decode(ids)
                    if ends := [end for end in map(text.find, until) if end >= 0]:
                        done[row] = text[: min(ends)], idx.size(1)
            return len(done) == len(idx)

        idx = torch.tensor(prompts, device=self.rt.device)
        with self.rt.autocast():
            idx = self.model.generate(
                idx, options['max_gen_toks'], temperature, options.get('top_k') or None, stop=stop
            )
        ends = [
            done.get(row) or (self.tok.decode(ids), len(ids) + start)
            for row, ids in enumerate(idx[:, start:].tolist())
        ]
        self.requests += len(ends)
        # the last token is not read any more
        self.truncated += sum(length - 1 > self.max_length for _, length in ends)
        return [text for text, _ in ends]


def main(argv):
    cfg = build(EvalConfig, parse(argv, EvalConfig))
    if TemplateLM is object:
        raise UserError(f'eval.py needs the package lm-eval ({missing}): pip install lm-eval')
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table

    if cfg.json is not None:
        check_json(Path(cfg.json))
    if cfg.include_path is not None and not Path(cfg.include_path).is_dir():
        raise UserError(f'include_path={cfg.include_path}: no such folder')
    model, tok = load(cfg)
    rt = runtime.start(cfg.device, cfg.dtype)
    if rt.distributed:
        raise UserError('eval.py works in one process: run it with python, not with torchrun')
    manager = TaskManager(include_path=cfg.include_path)
    for name in cfg.tasks:
        if not manager.match_tasks([name]):
            raise UserError(
                f'tasks={name}: no such task{nearest(name, manager.all_tasks)}; `lm-eval ls tasks` lists them'
            )
    lm = HarnessLM(model, tok, rt, cfg.batch_size)
    try:
        with memory.memory_for(f'lower --batch_size={cfg.batch_size}'):
            results = simple_evaluate(
                lm,
                tasks=manager.match_tasks(list(cfg.tasks)),
                num_fewshot=cfg.num_fewshot,
                limit=cfg.limit,
                task_manager=manager,
                log_samples=False,
                torch_random_seed=cfg.seed,
                fewshot_random_seed=cfg.seed,
            )
    except OSError as error:
        raise UserError(
            f'tasks={",".join(cfg.tasks)}: their data cannot be had ({str(error).splitlines()[0]:.200}); it takes a connection to '
            f'Hugging Face once, later its cache'
        ) from None
    print(
        '\n'.join(
            make_table(results, column) for column in ('results', 'groups') if results.get(column)
        )
    )
    print(
        f'{lm.truncated:,} of {lm.requests:,} requests did not fit block_size={lm.max_length} and were seen without their beginning'
    )
    if cfg.json is not None:
        kept = {
            key: results[key]
            for key in ('results', 'groups', 'n-shot', 'n-samples', 'configs')
            if key in results
        }
        record = (
            facts(cfg, rt, 'lm-eval', 'datasets')
            | {
                'parameters': model.num_params(),
                'gpt_config': asdict(model.cfg),
                'requests': lm.requests,
                'truncated': lm.truncated,
            }
            | kept
        )
        Path(cfg.json).write_text(
            json.dumps(record, indent=1, default=handle_non_serializable) + '\n', encoding='utf-8'
        )
        print(f'every number: {cfg.json}')


if __name__ == '__main__':
    run(main)
