"""eval.py: what it answers to lm-evaluation-harness, against the plain definitions."""

import inspect
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ALPHABET, TINY, arguments, call, fresh, nontrivial, train, write_data

import eval as script
from nanonag import checkpoint, runtime
from nanonag.data.tokenizer import CharTokenizer, GPT2Tokenizer
from start import build_model

datasets = pytest.importorskip('datasets')
harness_tasks = pytest.importorskip('lm_eval.tasks')

BLOCK = TINY['block_size']
CPU = runtime.Runtime(torch.device('cpu'), torch.float32)


def harness(model, tok=None, batch_size=3):
    return script.HarnessLM(model, tok or CharTokenizer(list(ALPHABET)), CPU, batch_size)


def ask(method, *args):
    """Calls a method of the harness' interface with requests of those arguments."""
    return method([SimpleNamespace(args=one) for one in args], disable_tqdm=True)


def token_logp(model, context, token):
    """log p(token | at most block_size ids of context) and the likeliest token, by a forward pass
    of its own."""
    logits, _ = model(torch.tensor([context[-model.cfg.block_size :]]), return_logits=True)
    logits = logits[0, -1].detach()
    return (logits[token] - logits.logsumexp(0)).item(), logits[
        : model.cfg.vocab_used
    ].argmax().item()


def brute_force(model, context, continuation):
    """Token by token -> (log-probability of the continuation, whether each of its tokens is the
    likeliest)."""
    context, total, greedy = list(context), 0.0, True
    for token in continuation:
        logp, best = token_logp(model, context, token)
        total, greedy, context = total + logp, greedy and token == best, context + [token]
    return total, greedy


def assert_same(answers, expected, tolerance=1e-10):
    assert len(answers) == len(expected)
    for (logp, greedy), (logp_, greedy_) in zip(answers, expected):
        assert abs(logp - logp_) < tolerance and greedy is greedy_


PAIRS = [
    ('abc', 'def'),
    ('a', 'b'),
    ('lkj', 'ihg\na'),
    ('abcdefg', 'h'),
    ('b', 'cdefgh'),
    ('a\nb', 'c'),
]


def test_loglikelihood_is_the_sum_over_the_continuation(update):
    model, tok = nontrivial(update=update), CharTokenizer(list(ALPHABET))
    expected = [
        brute_force(model, tok.encode(context), tok.encode(continuation))
        for context, continuation in PAIRS
    ]
    assert_same(ask(harness(model).loglikelihood, *PAIRS), expected)


def test_in_float32_too(update):
    model, tok = nontrivial(update=update, dtype=torch.float32), CharTokenizer(list(ALPHABET))
    expected = [
        brute_force(model, tok.encode(context), tok.encode(continuation))
        for context, continuation in PAIRS
    ]
    for (logp, _), (logp_, _) in zip(ask(harness(model).loglikelihood, *PAIRS), expected):
        assert abs(logp - logp_) < 1e-5 * max(1, abs(logp_))


def test_loglikelihood_is_the_training_loss(update):
    """With rows of padding in the table, too: they are in the loss's denominator."""
    model, ids = (
        nontrivial(update=update, vocab_size=20, vocab_used=13),
        torch.tensor([[3, 1, 4, 1, 5, 9]]),
    )
    loss = model(ids[:, :-1], ids[:, 1:])[1].item()
    answer = harness(model)._loglikelihood_tokens([(('', ''), [3], [1, 4, 1, 5, 9])])[0][0]
    assert abs(answer + 5 * loss) < 1e-10


def test_greedy_is_what_generate_would_say(update):
    """True for its own continuation, False with one token of it changed, wherever that is; padding
    is never an answer."""
    model = nontrivial(update=update, vocab_size=20, vocab_used=13)
    context = [1, 2, 3]
    best = model.generate(torch.tensor([context]), 5, temperature=0)[0, 3:].tolist()
    others = [best[:i] + [(best[i] + 1) % 13] + best[i + 1 :] for i in range(5)]
    answers = harness(model)._loglikelihood_tokens(
        [(('', ''), context, one) for one in [best, *others]]
    )
    assert [greedy for _, greedy in answers] == [True] + [False] * 5


def test_batches_change_nothing_for_any_scheme(update):
    assert_batching_changes_nothing(nontrivial(update=update), batch_size=4)


@pytest.mark.parametrize('batch_size', [2, 100])
def test_batches_of_any_size_change_nothing(batch_size):
    assert_batching_changes_nothing(nontrivial(update='lt_nag'), batch_size)


def assert_batching_changes_nothing(model, batch_size):
    """Answers in batches are those to each request alone."""
    pairs = PAIRS + [('abcdefghijkl', 'abc')]
    texts = [('abcdefghij' * 3,), ('b',), ('cd',)]
    alone = harness(model, batch_size=1)
    together = harness(model, batch_size=batch_size)
    assert_same(
        ask(together.loglikelihood, *pairs), [ask(alone.loglikelihood, pair)[0] for pair in pairs]
    )
    for answer, text in zip(ask(together.loglikelihood_rolling, *texts), texts):
        assert abs(answer - ask(alone.loglikelihood_rolling, text)[0]) < 1e-10
    options = {'until': ['a', 'd'], 'max_gen_toks': 12}
    prompts = [(one + two, options) for one in 'cf' for two in ALPHABET[::3]]
    prompts += [('cfa', options), ('ce', {'until': ['b'], 'max_gen_toks': 5})]
    assert ask(together.generate_until, *prompts) == [
        ask(alone.generate_until, prompt)[0] for prompt in prompts
    ]
    assert (together.requests, together.truncated) == (alone.requests, alone.truncated)


def test_a_trailing_space_goes_to_the_continuation():
    """GPT-2 has tokens ' capital', but hardly any text in which ' ' stands alone before a word."""
    model, tok = fresh(update='gd', vocab_size=50304, vocab_used=50257), GPT2Tokenizer()
    lm = harness(model, tok)
    assert lm._encode_pair('The ', 'capital') == (tok.encode('The'), tok.encode(' capital'))
    with_space, without = ask(lm.loglikelihood, ('The ', 'capital'), ('The', ' capital'))
    assert with_space == without
    assert_same([without], [brute_force(model, tok.encode('The'), tok.encode(' capital'))], 1e-4)


def test_what_is_too_long_loses_its_beginning_and_is_counted(update):
    """The last block_size tokens before each one are seen: exactly as many as fit is not yet too
    long."""
    model, tok = nontrivial(update=update), CharTokenizer(list(ALPHABET))
    lm, text = harness(model), 'abcdefghijkl\n' * 3
    fits, too_long = (text[: BLOCK - 1], 'ab'), (text[:BLOCK], 'ab')
    assert_same(ask(lm.loglikelihood, fits), [brute_force(model, tok.encode(fits[0]), [1, 2])])
    assert (lm.requests, lm.truncated) == (1, 0)
    answer = ask(lm.loglikelihood, too_long)
    assert_same(
        answer,
        harness(model)._loglikelihood_tokens([(('', ''), tok.encode(too_long[0][1:]), [1, 2])]),
    )
    # the end decides
    assert (
        abs(answer[0][0] - ask(harness(model).loglikelihood, (text[:BLOCK][::-1], 'ab'))[0][0])
        > 1e-6
    )
    assert (lm.requests, lm.truncated) == (2, 1)


def test_a_continuation_longer_than_the_window_is_scored_whole(update):
    """Each window takes in as many new tokens as fit; only then are earlier ones dropped."""
    model, text = (
        nontrivial(update=update),
        [
            int(i)
            for i in torch.randint(13, (BLOCK * 2 + 3,), generator=torch.Generator().manual_seed(3))
        ],
    )
    lm = harness(model)
    logp, _ = lm._loglikelihood_tokens([(('', ''), [5, 6], text)])[0]
    expected = sum(
        token_logp(model, whole, token)[0] for whole, token in rolling(model, [5, 6], text)
    )
    assert abs(logp - expected) < 1e-10 and lm.truncated == 1


def rolling(model, context, ids):
    """(what is seen, token) for each of ids: windows of block_size new tokens, the last one
    reaching back for a full one."""
    whole, block = context + ids, model.cfg.block_size
    for start in range(0, len(ids), block):
        end = min(start + block, len(ids)) + len(context)
        first = max(0, end - 1 - block)  # of the window's inputs
        for i in range(start + len(context), end):
            yield whole[first:i], whole[i]


@pytest.mark.parametrize('length', [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3])
def test_rolling_scores_each_token_once(update, length):
    model, text = nontrivial(update=update), ('abcdefghijkl\nlkjihgfedcba' * 2)[:length]
    lm = harness(model)
    ids = lm.tok.encode(text)
    seen = list(rolling(model, [0], ids))  # '\n' stands before a text of characters
    assert [token for _, token in seen] == ids
    assert (
        abs(
            ask(lm.loglikelihood_rolling, (text,))[0]
            - sum(token_logp(model, *one)[0] for one in seen)
        )
        < 1e-10
    )
    assert (lm.requests, lm.truncated) == (1, 0)
    assert [n for _, n in lm.windows([0], ids)] == [
        min(BLOCK, length - i) for i in range(0, length, BLOCK)
    ]


@pytest.mark.parametrize('context', ['', ' '])
def test_without_a_context_the_end_of_a_text_stands_before(context):
    """A context of spaces has none left when they are moved to the continuation."""
    model, tok = fresh(update='lt_nag', vocab_size=50304, vocab_used=50257), GPT2Tokenizer()
    lm = harness(model, tok)
    assert lm.eot_token_id == lm.prefix_token_id == 50256
    assert_same(
        ask(lm.loglikelihood, (context, 'Hello there')),
        [brute_force(model, [50256], tok.encode(context + 'Hello there'))],
        1e-4,
    )
    assert (
        abs(
            ask(lm.loglikelihood_rolling, ('Hello there',))[0]
            - brute_force(model, [50256], tok.encode('Hello there'))[0]
        )
        < 1e-4
    )


def test_an_empty_continuation_is_certain():
    lm = harness(nontrivial(update='gd'))
    assert lm._loglikelihood_tokens([(('a', ''), [1], []), (('a', 'b'), [1], [2])])[0] == (
        0.0,
        True,
    )
    assert ask(lm.loglikelihood_rolling, ('',)) == [0.0]


def test_characters_that_the_vocabulary_lacks_are_named():
    lm = harness(nontrivial(update='gd'))
    with pytest.raises(Exception, match="'Z'"):
        ask(lm.loglikelihood, ('abc', 'Z'))


def test_nothing_is_dropped_out():
    model = fresh(update='gd', dropout=0.5).train()
    lm = harness(model)
    assert len({ask(lm.loglikelihood, ('abc', 'def'))[0] for _ in range(5)}) == 1


def test_damaged_weights_are_told():
    model = nontrivial(update='gd')
    model.transformer.wte.weight.data[1, 0] = float('nan')
    with pytest.raises(ValueError, match='non-finite'):
        ask(harness(model).loglikelihood, ('abc', 'def'))


def test_generates_what_generate_does(update):
    """Greedy unless asked otherwise, past the window too."""
    model, tok = nontrivial(update=update), CharTokenizer(list(ALPHABET))
    for prompt in ('abc', 'abcdefgh', 'abcdefghijklab'):
        ids = tok.encode(prompt)
        expected = tok.decode(
            model.generate(torch.tensor([ids]), 12, temperature=0)[0, len(ids) :].tolist()
        )
        for options in (
            {},
            {'do_sample': False, 'temperature': 0.7, 'top_p': 0.9},
            {'temperature': 0},
        ):
            assert ask(
                harness(model).generate_until,
                (prompt, {'until': [], 'max_gen_toks': 12, **options}),
            ) == [expected]


def test_generation_ends_before_the_first_stop_sequence(update):
    model = nontrivial(update=update)
    lm = harness(model)
    whole = ask(lm.generate_until, ('abc', {'until': [], 'max_gen_toks': 30}))[0]
    forward, steps = model.forward, []
    model.forward = lambda *args, **kwargs: (steps.append(1), forward(*args, **kwargs))[1]
    for until in [['Zz', whole[i : i + n]] for i in range(0, 25, 6) for n in (1, 3)] + [
        [whole[4:5], whole[2:5]],
        [whole[2:5], whole[4:5]],
    ]:
        steps.clear()
        text = ask(lm.generate_until, ('abc', {'until': until, 'max_gen_toks': 30}))[0]
        needed = next(n for n in range(31) if any(stop in whole[:n] for stop in until))
        assert len(steps) == needed  # and no step more
        assert text == whole[: min(whole.index(stop) for stop in until if stop in whole[:needed])]


def test_generation_ends_at_the_end_of_the_text():
    """Greedy decoding of a head that says one thing: <|endoftext|>, which is no text."""
    model, tok = (
        fresh(update='gd', vocab_size=50304, vocab_used=50257, tie_weights=False, bias=False),
        GPT2Tokenizer(),
    )
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.lm_head.weight.zero_()
    model.lm_head.forward = lambda x: torch.nn.functional.one_hot(
        torch.full(x.shape[:2], 50256), 50304
    ).to(x.dtype)
    assert ask(
        harness(model, tok).generate_until, ('Hello', {'until': ['\n'], 'max_gen_toks': 5})
    ) == ['']


def test_truncation_in_generation_is_counted():
    """Once the window slides past the prompt's beginning; the last token is not read any more."""
    lm = harness(nontrivial(update='gd'))
    ask(lm.generate_until, ('ab', {'until': [], 'max_gen_toks': BLOCK - 1}))
    assert (lm.requests, lm.truncated) == (1, 0)
    ask(
        lm.generate_until,
        ('ab', {'until': [], 'max_gen_toks': BLOCK}),
        ('cd', {'until': [], 'max_gen_toks': 1}),
    )
    assert (lm.requests, lm.truncated) == (3, 1)
    ask(lm.generate_until, ('abcdefghij', {'until': [], 'max_gen_toks': 1}))
    assert (lm.requests, lm.truncated) == (4, 2)


def test_sampling_samples():
    lm = harness(nontrivial(update='gd', std=0.05))
    options = {'until': [], 'max_gen_toks': 12, 'do_sample': True, 'temperature': 1.5}
    assert len({ask(lm.generate_until, ('abc', options))[0] for _ in range(5)}) > 1
    assert len({ask(lm.generate_until, ('abc', options | {'top_k': 1}))[0] for _ in range(5)}) == 1


def test_what_generation_cannot_do_is_refused():
    with pytest.raises(Exception, match='top_p=0.9.*leave the task out'):
        ask(
            harness(nontrivial(update='gd')).generate_until,
            ('a', {'until': [], 'do_sample': True, 'temperature': 1.0, 'top_p': 0.9}),
        )


# The script, with tasks and data made here.

CHOICE = """task: toy_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: '{file}'}}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 1.0}}
"""
UNTIL = """task: toy_until
dataset_path: json
dataset_kwargs: {{data_files: {{test: '{file}'}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{start}}}}"
doc_to_target: "{{{{right}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 20}}
metric_list: [{{metric: exact_match}}]
"""
ROLLING = """task: toy_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: '{file}'}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{start}}}}{{{{right}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""


@pytest.fixture(scope='module')
def toys(tmp_path_factory):
    """A folder of tasks on which continuing the alphabet is right, and a run's folder with a model
    that does just that."""
    folder = tmp_path_factory.mktemp('toys')
    docs = [
        {
            'start': ALPHABET[i : i + 3],
            'choices': [ALPHABET[i + 5], ALPHABET[i + 3]],
            'label': 1,
            'right': ALPHABET[i + 3 :],
        }
        for i in range(1, 7)
    ]
    (folder / 'docs.jsonl').write_text('\n'.join(map(json.dumps, docs)), encoding='utf-8')
    for name, text in (('choice', CHOICE), ('until', UNTIL), ('rolling', ROLLING)):
        (folder / f'{name}.yaml').write_text(
            text.format(file=folder / 'docs.jsonl'), encoding='utf-8'
        )
    return folder


@pytest.fixture(scope='module')
def run_folder(tmp_path_factory):
    """A run whose model knows the alphabet by heart."""
    folder = tmp_path_factory.mktemp('eval')
    write_data(folder / 'data')
    assert (
        train(
            folder / 'data',
            folder / 'out',
            max_iters=60,
            optimizer='adamw',
            learning_rate=0.03,
            eval_interval=30,
        ).code
        == 0
    )
    return folder / 'out'


def index_only(monkeypatch, folder):
    """Keeps the harness from reading its thousands of tasks, which takes seconds: without an
    include_path of eval.py's own it reads those in `folder`."""
    real = harness_tasks.TaskManager
    assert inspect.signature(real).parameters['include_defaults'].default is True

    def manager(include_path):  # whoever leaves out the harness's tasks, gets a TypeError
        return real(include_path=include_path or folder, include_defaults=False)

    monkeypatch.setattr(harness_tasks, 'TaskManager', manager)


@pytest.fixture
def evaluate(toys, run_folder, tmp_path, monkeypatch, capsys):
    """Runs eval.py on the toys alone -> (exit code, message, output, its JSON)."""
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    index_only(monkeypatch, toys)

    def run(**options):
        capsys.readouterr()
        file = tmp_path / 'results.json'
        defaults = dict(out_dir=run_folder, include_path=toys, device='cpu', json=file)
        code, message = call(script.main, arguments({**defaults, **options}))
        return (
            code,
            message,
            capsys.readouterr().out,
            json.loads(file.read_text()) if file.exists() else None,
        )

    return run


def test_runs_tasks_of_every_kind_end_to_end(evaluate, run_folder):
    code, message, out, told = evaluate(tasks='toy_choice,toy_until,toy_rolling')
    assert (code, message) == (0, '')
    results = told['results']
    assert results['toy_choice']['acc,none'] == 1 and results['toy_until']['exact_match,none'] == 1
    assert 0 < results['toy_rolling']['bits_per_byte,none'] < 2
    assert told['requests'] == 12 + 6 + 6 and told['truncated'] == 0 and '0 of 24 requests' in out
    assert re.search(r'toy_choice.*acc .*1\.0', out) and 'toy_until' in out
    assert told.keys() >= {
        'command',
        'commit',
        'machine',
        'device',
        'dtype',
        'versions',
        'config',
        'parameters',
        'gpt_config',
        'n-shot',
    }
    assert (
        told['versions'].keys() == {'python', 'torch', 'lm-eval', 'datasets'}
        and told['config']['batch_size'] == 8
    )
    assert (
        told['parameters'] == build_model(checkpoint.read(run_folder / 'best.pt'), '').num_params()
    )


def test_examples_come_before_the_question(evaluate):
    """Three of four characters and two newlines, and the question, are more than block_size=16."""
    code, _, out, told = evaluate(tasks='toy_choice', num_fewshot=3, limit=2)
    assert (
        code == 0
        and told['n-shot'] == {'toy_choice': 3}
        and told['truncated'] == told['requests'] == 4
    )
    assert '4 of 4 requests did not fit block_size=16' in out


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(tasks='toy_choise'), "no such task; did you mean 'toy_choice'"),
        (dict(include_path='no-such-folder'), 'no-such-folder'),
        (dict(out_dir='no-such-run'), 'no-such-run'),
        (dict(limit=0), 'limit'),
        (dict(num_fewshot=-1), 'num_fewshot'),
        (dict(batch_size=0), 'batch_size'),
        (dict(json='/'), 'json=/'),
        (dict(device='warp'), 'device=warp'),
    ],
    ids=str,
)
def test_mistakes(evaluate, options, message):
    code, told, _, _ = evaluate(**{'tasks': 'toy_choice', **options})
    assert code == 2 and re.search(message, told), told


def test_a_task_of_the_harness_that_is_misspelt(run_folder, monkeypatch):
    index_only(monkeypatch, Path(harness_tasks.__file__).parent / 'hellaswag')
    code, told = call(
        script.main, arguments(dict(out_dir=run_folder, device='cpu', tasks='helaswag'))
    )
    assert code == 2 and "did you mean 'hellaswag'" in told


def test_data_that_cannot_be_had(evaluate, toys, tmp_path):
    shutil.copy(toys / 'choice.yaml', tmp_path)
    text = (
        (tmp_path / 'choice.yaml')
        .read_text()
        .replace('docs.jsonl', 'missing.jsonl')
        .replace('toy_choice', 'toy_missing')
    )
    (tmp_path / 'choice.yaml').write_text(text)
    code, told, _, _ = evaluate(tasks='toy_missing', include_path=tmp_path)
    assert code == 2 and 'toy_missing' in told and 'missing.jsonl' in told


def test_without_the_harness_it_says_what_to_install(evaluate, monkeypatch):
    monkeypatch.setattr(script, 'import_error', ImportError("No module named 'lm_eval'"))
    code, told, _, _ = evaluate()
    assert code == 2 and 'pip install lm-eval' in told
