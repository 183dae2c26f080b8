"""Scores a trained model on tasks of EleutherAI's lm-evaluation-harness (pip install lm-eval).

    python eval.py --out_dir=out/owt_lt_nag --tasks=hellaswag --num_fewshot=10 --json=hellaswag.json
    python eval.py --init_from=gpt2 --tasks hellaswag lambada_openai --limit=100
    python eval.py --include_path=FOLDER --tasks=mine     # a task of your own: FOLDER/mine.yaml

The harness downloads the data of its tasks; `lm-eval ls tasks` lists them.
"""

if __name__ == '__main__':
    from nanonag.help import show_help

    show_help(__doc__, 'eval.py:EvalConfig')  # before torch is imported: instant

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from nanonag import memory, runtime
from nanonag.cli import UserError, first_line, run, stay_single
from nanonag.configurator import FilePath, at_least, build, nearest, parse
from nanonag.report import check_json, result_facts, write_json
from start import load

try:
    from lm_eval.api.model import TemplateLM

    import_error = None
except ImportError as error:  # the harness is optional; check_harness() says so
    TemplateLM = object
    import_error = error

# what the JSON file keeps of the harness's results
RESULT_KEYS = ('results', 'groups', 'n-shot', 'n-samples', 'configs')


@dataclass(frozen=True)
class EvalConfig:
    """What is scored, and on which tasks."""

    out_dir: FilePath = 'out'  # a run's folder: its best.pt (ckpt.pt if there is none)
    # resume: from out_dir; gpt2[-medium|-large|-xl]; or a checkpoint file, nanoGPT's too
    init_from: FilePath = 'resume'
    # the data folder whose tokenizer a checkpoint of nanoGPT needs; default GPT-2's
    dataset: FilePath | None = None
    tasks: tuple[str, ...] = ('hellaswag',)  # names of tasks or groups; mmlu_* takes all that match
    num_fewshot: int | None = None  # solved examples before each question; default: the task's own
    limit: int | None = None  # questions of each task, to try it out; default: all
    include_path: FilePath | None = None  # a folder with tasks of your own
    batch_size: int = 8  # requests at once; the logits of all of them are in memory
    json: FilePath | None = None  # file for every result, the options and the machine
    seed: int = 1234  # of the choice of examples and of sampling; the harness's own default
    device: str = 'auto'  # cuda, cuda:1, mps, cpu
    # of the matmuls; bfloat16 rounds a logit of 10 by up to 0.03
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'float32'

    def __post_init__(self):
        at_least(self, num_fewshot=0, limit=1, batch_size=1, seed=0)


# -----------------------------------------------------------------------------
# the model as the harness sees it


class HarnessLM(TemplateLM):
    """The harness's interface to a model, for a GPT and its tokenizer.

    Attributes:
        requests: number of requests answered.
        truncated: number of those that did not fit block_size, so that the model did not see their
            beginning.
    """

    def __init__(self, model, tok, rt, batch_size=8):
        super().__init__()
        self.model = model.to(rt.device).eval()
        self.tok = tok
        self.rt = rt
        self.batch_size = batch_size
        self.requests = 0
        self.truncated = 0

    @property
    def max_length(self):
        """The largest number of tokens that the model sees at once."""
        return self.model.cfg.block_size

    @property
    def eot_token_id(self):
        """The token before a text without context: the end of a text, or a line's end if there are
        only characters."""
        return self.tok.encode('\n')[0] if self.tok.eot is None else self.tok.eot

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        """Returns the token ids of a text; the other arguments have no effect."""
        return self.tok.encode(string)

    # log-probabilities

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        """Scores requests ((context, continuation), context ids, continuation ids): see score()."""
        pairs = []
        for _, context, continuation in requests:
            context = context or [self.prefix_token_id]
            pairs.append((context, continuation))
            # The model does not read the last token.
            if len(context) + len(continuation) - 1 > self.max_length:
                self.truncated += 1
        self.requests += len(pairs)
        return self.score(pairs, disable_tqdm)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Returns the log-probability, in nats, of each request's whole text."""
        pairs = [([self.prefix_token_id], self.tok_encode(*request.args)) for request in requests]
        self.requests += len(pairs)
        return [logp for logp, _ in self.score(pairs, disable_tqdm)]

    def score(self, pairs, quiet):
        """Scores continuations of contexts, both of any length.

        Probabilities are those of the training loss, over all rows of the token table; greedy
        decoding is that of generate(), which never returns the table's padding.

        Args:
            pairs: list of (context ids, continuation ids); a context has one token or more.
            quiet: whether to show no progress bar.

        Returns:
            for each pair (log-probability of the continuation in nats, whether greedy decoding
            gives it).

        Raises:
            ValueError: the model returns logits that are not finite.
        """
        windows = []
        for i, pair in enumerate(pairs):
            windows += [(i, *window) for window in self.windows(*pair)]
        # Windows of similar length share a batch; the longest come first: they need most memory.
        windows.sort(key=lambda window: -len(window[1]))
        totals = [0.0] * len(pairs)
        greedy = [True] * len(pairs)
        for batch in tqdm(batches(windows, self.batch_size), 'scoring', disable=quiet or None):
            scores = self.score_windows([window for _, *window in batch])
            for (i, *_), (logp, is_greedy) in zip(batch, scores):
                totals[i] += logp
                greedy[i] = greedy[i] and is_greedy
        if not all(math.isfinite(total) for total in totals):
            raise ValueError('the model gave non-finite logits: its weights are damaged')
        return list(zip(totals, greedy))

    def windows(self, context, continuation):
        """Yields (ids, n) where the last n ids of all windows together are the continuation.

        The model predicts all ids but the first from those before: at most max_length.
        """
        from lm_eval.utils import get_rolling_token_windows

        whole = context + continuation
        end = len(context)
        for _, predicted in get_rolling_token_windows(
            continuation, context[-1], self.max_length, context_len=1
        ):
            end += len(predicted)
            yield whole[max(0, end - self.max_length - 1) : end], len(predicted)

    @torch.no_grad()
    def score_windows(self, windows):
        """Returns for each window (ids, n) the score of its last n ids, in one forward pass."""
        # Padding stands on the right, where no token looks.
        rows = [torch.tensor(ids) for ids, _ in windows]
        idx = pad_sequence(rows, batch_first=True).to(self.rt.device)
        with self.rt.autocast():
            logits, _ = self.model(idx[:, :-1], return_logits=True)
        scores = []
        for row, row_logits, (ids, n) in zip(idx, logits, windows):
            end = len(ids)
            targets = row[end - n : end]
            predicted = row_logits[end - 1 - n : end - 1]  # each by the id before its target
            at_least_float32 = torch.promote_types(predicted.dtype, torch.float32)
            logp = predicted.to(at_least_float32).log_softmax(-1)
            best = predicted[:, : self.model.cfg.vocab_used].argmax(-1)
            total = logp.gather(-1, targets[:, None]).sum().item()
            scores.append((total, torch.equal(best, targets)))
        return scores

    # generation

    def generate_until(self, requests, disable_tqdm=False):
        """Returns a continuation of each request (context, options): see generate()."""
        groups = {}  # of what can be generated together: equal lengths, equal options
        for i, request in enumerate(requests):
            context, options = request.args
            ids = self.tok_encode(context) or [self.prefix_token_id]
            groups.setdefault((len(ids), str(options)), []).append((i, ids, options))
        work = []
        for group in groups.values():
            work += batches(group, self.batch_size)
        texts = [''] * len(requests)
        for batch in tqdm(work, 'generating', disable=disable_tqdm or None):
            prompts = [ids for _, ids, _ in batch]
            options = batch[0][2]
            for (i, _, _), text in zip(batch, self.generate(prompts, options)):
                texts[i] = text
        return texts

    def generate(self, prompts, options):
        """Continues prompts, lists of ids of one length, as the harness's `options` say.

        Returns their continuations as texts, each of which ends before its first stop sequence.
        Raises UserError for options that generation does not have.
        """
        options = generation_options(options)
        until = [text for text in options['until'] if text]
        if self.tok.eot is not None:
            until.append(self.tok.decode([self.tok.eot]))
        stop = StopSequences(until, self.tok, len(prompts[0]))
        with self.rt.autocast():
            idx = self.model.generate(
                torch.tensor(prompts, device=self.rt.device),
                options['max_gen_toks'],
                options['temperature'],
                options.get('top_k') or None,
                stop=stop,
            )
        texts = []
        for text, length in stop.ends(idx):
            texts.append(text)
            self.requests += 1
            if length - 1 > self.max_length:
                self.truncated += 1
        return texts


class StopSequences:
    """When to stop generating a batch: every row has one of the stop sequences in its text.

    Args:
        until: the stop sequences, texts.
        tok: the Tokenizer.
        prompt_length: number of tokens before the generated ones.
    """

    def __init__(self, until, tok, prompt_length):
        self.until = until
        self.tok = tok
        self.prompt_length = prompt_length
        self.ended = {}  # row: (text before the stop sequence, number of tokens with the prompt)

    def __call__(self, idx):
        """Returns whether all rows of idx (B, T), prompts and what was generated so far, ended."""
        for row, ids in enumerate(idx[:, self.prompt_length :].tolist()):
            if row not in self.ended:
                text = self.tok.decode(ids)
                starts = [text.find(stop) for stop in self.until if stop in text]
                if starts:
                    self.ended[row] = (text[: min(starts)], idx.size(1))
        return len(self.ended) == len(idx)

    def ends(self, idx):
        """Returns (text, number of tokens with the prompt) of each row of the finished idx."""
        ends = []
        for row, ids in enumerate(idx[:, self.prompt_length :].tolist()):
            whole = (self.tok.decode(ids), idx.size(1))
            ends.append(self.ended.get(row, whole))
        return ends


def generation_options(options):
    """Returns a task's options of generation, all there and under the names of the harness.

    Raises UserError for those that model.generate does not have.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    options = normalize_gen_kwargs(options, default_max_gen_toks=256)
    options.setdefault('temperature', 1.0 if options['do_sample'] else 0.0)
    known = {'until', 'do_sample', 'temperature', 'max_gen_toks', 'top_k'}
    if options['temperature'] == 0:
        known.add('top_p')  # without effect on greedy decoding
    for key in sorted(options.keys() - known):
        raise UserError(
            f'the task asks for {key}={options[key]}, which generation does not have; '
            'leave the task out'
        )
    return options


def batches(items, size):
    """Returns a list in pieces of at most `size` items."""
    return [items[start : start + size] for start in range(0, len(items), size)]


# -----------------------------------------------------------------------------
# the script


def main(argv):
    stay_single('eval.py')
    cfg = build(EvalConfig, parse(argv, EvalConfig))
    check_harness()
    check_json(cfg.json)
    check_include_path(cfg.include_path)
    model, tok = load(cfg)
    rt = runtime.start(cfg.device, cfg.dtype)
    manager = task_manager(cfg)
    lm = HarnessLM(model, tok, rt, cfg.batch_size)
    results = evaluate(lm, manager, cfg)
    print_results(results, lm)
    save_results(results, lm, cfg)


def check_harness():
    """Raises UserError if the harness is not installed."""
    if import_error is not None:
        raise UserError(f'eval.py needs the package lm-eval ({import_error}): pip install lm-eval')


def check_include_path(path):
    """Raises UserError if the folder of the user's tasks does not exist."""
    if path is not None and not Path(path).is_dir():
        raise UserError(f'include_path={path}: no such folder')


def task_manager(cfg):
    """Returns the harness's TaskManager; UserError if it does not know one of the tasks."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=cfg.include_path)
    for name in cfg.tasks:
        if not manager.match_tasks([name]):
            raise UserError(
                f'tasks={name}: no such task{nearest(name, manager.all_tasks)}; '
                '`lm-eval ls tasks` lists them'
            )
    return manager


def evaluate(lm, manager, cfg):
    """Returns the harness's results, a dict; UserError if data or memory are missing."""
    from lm_eval.evaluator import simple_evaluate

    try:
        with memory.memory_for(f'lower --batch_size={cfg.batch_size}'):
            return simple_evaluate(
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
        reason = first_line(error)
        raise UserError(
            f'tasks={",".join(cfg.tasks)}: their data is not available ({reason:.200}); the first '
            "use needs a connection to Hugging Face, later ones read the `datasets` package's cache"
        ) from None


def print_results(results, lm):
    """Prints the harness's tables, and how many requests were truncated."""
    from lm_eval.utils import make_table

    for key in ('results', 'groups'):
        if results.get(key):
            print(make_table(results, key))
    print(
        f'{lm.truncated:,} of {lm.requests:,} requests did not fit block_size={lm.max_length}: '
        'the model did not see their beginning'
    )


def save_results(results, lm, cfg):
    """Writes the results and where they come from to the file cfg.json, if it is given."""
    from lm_eval.utils import handle_non_serializable

    if cfg.json is None:
        return
    record = {
        **result_facts(cfg, lm.rt, ['lm-eval', 'datasets']),
        'parameters': lm.model.num_params(),
        'gpt_config': asdict(lm.model.cfg),
        'requests': lm.requests,
        'truncated': lm.truncated,
        **{key: results[key] for key in RESULT_KEYS if key in results},
    }
    write_json(cfg.json, record, default=handle_non_serializable)
    print(f'every number: {cfg.json}')


if __name__ == '__main__':
    run(main)
