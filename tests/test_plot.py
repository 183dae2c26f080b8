"""plot.py on records made by hand: what the table says, what the picture shows, what a user hears
of a bad folder."""

import builtins
import json
import math
import time

import pytest

import plot
from nanonag.cli import UserError


def write_run(
    folder,
    update='gd',
    params=1_500_000,
    evals=((0, 4.0), (50, 2.5), (100, 2.6)),
    steps=range(10, 101, 10),
    tail='',
):
    """A metrics.jsonl of 1000 tokens a step; training loss 3 - step / 100, speed 100 tokens/s, in
    the last record 900."""
    records = [{'step': 0, 'config': {'update': update, 'n_layer': 2}, 'params': params}]
    records += [
        {'step': s, 'tokens': 1000 * s, 'train_loss': loss - 0.1, 'val_loss': loss}
        for s, loss in evals
    ]
    records += [
        {
            'step': s,
            'tokens': 1000 * s,
            'loss': 3 - s / 100,
            'lr': 1e-3,
            'grad_norm': 1.0,
            'tokens_per_s': 900.0 if s == 100 else 100.0,
        }
        for s in steps
    ]
    folder.mkdir(parents=True)
    (folder / 'metrics.jsonl').write_text(
        ''.join(json.dumps(record) + '\n' for record in records) + tail
    )
    return str(folder)


def test_summary_tells_final_and_best(tmp_path):
    assert plot.summary(plot.read_history(write_run(tmp_path / 'a'))) == {
        'run': 'a',
        'scheme': 'gd',
        'params': 1_500_000,
        'steps': 100,
        'tokens': 100_000,
        'train_loss': 2.5,
        'val_loss': 2.6,
        'best_val_loss': 2.5,
        'best_step': 50,
        'tokens_per_s': 100.0,
    }


@pytest.mark.parametrize(
    'tail',
    ['{"step": 110, "tok', '{"step": 110, "tokens": 1, "loss": 9.0, "tokens_per_s": 1}', 'x'],
)
def test_a_last_line_without_its_end_does_not_count(tmp_path, tail):
    assert plot.read_history(write_run(tmp_path / 'a', tail=tail)) == plot.read_history(
        write_run(tmp_path / 'b' / 'a')
    )


def test_a_resumed_run_counts_each_step_once_and_takes_the_last_config(tmp_path):
    again = [
        {'step': 50, 'config': {'update': 'lt_nag'}, 'params': 7},
        {'step': 100, 'tokens': 100_000, 'train_loss': 2.0, 'val_loss': 2.1},
    ]
    run = plot.read_history(
        write_run(tmp_path / 'a', tail=''.join(json.dumps(record) + '\n' for record in again))
    )
    assert (run.update, run.params, [r['step'] for r in run.evals], run.evals[-1]['val_loss']) == (
        'lt_nag',
        7,
        [0, 50, 100],
        2.1,
    )


@pytest.mark.parametrize(
    'record, message',
    [
        ({'step': [1], 'tokens': 1, 'loss': 1.0, 'tokens_per_s': 1.0}, 'no count'),
        ({'step': 1e400, 'tokens': 1, 'loss': 1.0, 'tokens_per_s': 1.0}, 'no count'),
        ({'step': True, 'tokens': 1, 'loss': 1.0, 'tokens_per_s': 1.0}, 'no count'),
        ({'step': 1, 'tokens': -1, 'loss': 1.0, 'tokens_per_s': 1.0}, 'no count'),
        ({'step': 1, 'tokens': 10**400, 'loss': 1.0, 'tokens_per_s': 1.0}, 'no count'),
        ({'step': 1, 'tokens': 1, 'loss': '1.0', 'tokens_per_s': 1.0}, 'no number'),
        ({'step': 1, 'tokens': 1, 'loss': {}, 'tokens_per_s': 1.0}, 'no number'),
        ({'config': {'update': 'gd'}, 'params': 10**400}, 'no count'),
        ({'config': [], 'params': 1}, 'TypeError'),
    ],
    ids=str,
)
def test_records_of_other_kinds_are_told(tmp_path, record, message):
    with pytest.raises(UserError, match=f'metrics.jsonl:15: damaged.*{message}'):
        plot.main([write_run(tmp_path / 'a', tail=json.dumps(record) + '\n'), '--out=None'])


def test_a_deeply_nested_record_is_told(tmp_path):
    with pytest.raises(UserError, match='metrics.jsonl:15: damaged'):
        plot.main([write_run(tmp_path / 'a', tail='[' * 100_000 + '\n'), '--out=None'])


@pytest.mark.parametrize(
    'value',
    [None, math.inf, -math.inf, 1e308, 10**400],
    ids=['null', 'inf', '-inf', '1e308', '10^400'],
)
@pytest.mark.parametrize('x', ['step', 'tokens', 'time'])
def test_numbers_that_cannot_be_drawn_are_gaps(tmp_path, value, x, capsys):
    """A run that diverged: train.py writes null for a loss that is not finite."""
    tail = ''.join(
        json.dumps({'step': step, 'tokens': 1000 * step, **losses}) + '\n'
        for step in (110, 120)
        for losses in (
            {'loss': value, 'tokens_per_s': value},
            {'train_loss': value, 'val_loss': value},
        )
    )
    plot.main(
        [
            write_run(tmp_path / 'a', tail=tail),
            f'--x={x}',
            f'--out={tmp_path}/c.png',
            f'--json={tmp_path}/new/c.json',
        ]
    )
    (facts,) = json.loads(
        (tmp_path / 'new/c.json').read_text(),
        parse_constant=lambda name: pytest.fail(f'{name} is not JSON'),
    )
    assert (
        facts['val_loss'] is None
        and facts['best_val_loss'] == 2.5
        and (tmp_path / 'c.png').exists()
    )


def test_names_are_shown_as_they_are(tmp_path):
    """No mathematics between dollar signs, no line breaks, no page of text."""
    folder = write_run(tmp_path / 'a$\\frac$\n', update='$\\frac{$' + 'x' * 1000)
    plot.main([folder, folder, f'--out={tmp_path}/c.png'])
    assert (
        (tmp_path / 'c.png').exists()
        and plot.read_history(folder).name == 'a$\\frac$?'
        and len(plot.read_history(folder).update) == 60
    )


def test_a_device_is_no_record(tmp_path):
    (tmp_path / 'metrics.jsonl').symlink_to('/dev/zero')
    with pytest.raises(UserError, match='not a file'):
        plot.main([str(tmp_path), '--out=None'])


def test_nan_is_shown_but_never_best(tmp_path):
    facts = plot.summary(
        plot.read_history(
            write_run(tmp_path / 'a', evals=[(0, math.nan), (50, 3.0), (100, math.nan)])
        )
    )
    assert math.isnan(facts['val_loss']) and facts['best_val_loss'] == 3.0


def test_the_table_has_parameters_beside_losses_and_dashes_for_the_unknown(tmp_path, capsys):
    plot.main(
        [
            write_run(tmp_path / 'a'),
            write_run(tmp_path / 'young', 'lt_nag', 22, evals=(), steps=()),
            '--out=None',
        ]
    )
    head, _, first, second = capsys.readouterr().out.splitlines()
    titles = 'run scheme parameters steps tokens train loss val loss best val at step tokens/s'
    assert head.split() == titles.split()
    assert first.split() == [
        'a',
        'gd',
        '1,500,000',
        '100',
        '100,000',
        '2.5000',
        '2.6000',
        '2.5000',
        '50',
        '100',
    ]
    assert second.split() == ['young', 'lt_nag', '22'] + ['-'] * 7
    assert len({len(line) for line in (head, first, second)}) == 1


def test_json_holds_the_table(tmp_path):
    folders = [write_run(tmp_path / 'a'), write_run(tmp_path / 'b', 'lt_tmm')]
    plot.main([*folders, '--out=None', '--json', str(tmp_path / 'table.json')])
    assert json.loads((tmp_path / 'table.json').read_text()) == [
        plot.summary(plot.read_history(folder)) for folder in folders
    ]


@pytest.mark.parametrize(
    'content, message',
    [
        (None, 'no run to read'),
        ('', 'no record with the config'),
        ('{"step": 1}\n', 'no record with the config'),
        ('{"config": {"update": "gd"}, "params": 1}\n{"step": 1, "lo\n', ':2: damaged'),
        ('[1]\n', 'no record with the config'),
        ('{"config": {}, "params": 1}\n', ':1: damaged'),
        ('7\n', ':1: damaged'),
        (
            '{"config": {"update": "gd"}, "params": 1}\n{"step": 1, "loss": 1.0}\n',
            ':2: damaged.*tokens',
        ),
    ],
)
def test_bad_folders_are_told(tmp_path, content, message):
    if content is not None:
        (tmp_path / 'metrics.jsonl').write_text(content)
    with pytest.raises(UserError, match=message):
        plot.main([str(tmp_path)])


@pytest.mark.parametrize(
    'args, message',
    [
        ([], 'no runs'),
        (['--out=x.png'], 'no runs'),
        (['a', '--x=hours'], 'x takes'),
        (['a', '--out='], 'out is empty.*--out=None'),
        (['a', '--json='], 'json is empty'),
        (['a', '--smooth=2'], 'smooth'),
    ],
)
def test_bad_options_are_told(args, message):
    with pytest.raises(UserError, match=message):
        plot.main(args)


def test_an_unwritable_picture_is_told(tmp_path):
    with pytest.raises(UserError, match='picture cannot be written'):
        plot.main([write_run(tmp_path / 'a'), f'--out={tmp_path}/curves.nonsense'])


def test_without_matplotlib_the_table_stays_and_one_warning_comes(tmp_path, capsys, monkeypatch):
    real = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith('matplotlib'):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, '__import__', without_matplotlib)
    plot.main([write_run(tmp_path / 'a'), f'--out={tmp_path}/curves.png'])
    out, err = capsys.readouterr()
    assert (
        '1,500,000' in out and err.count('warning') == 1 and not (tmp_path / 'curves.png').exists()
    )


def drawn(monkeypatch, *args):
    """The axes of the picture that main(args) writes."""
    figure = pytest.importorskip('matplotlib.figure').Figure
    axes, savefig = [], figure.savefig
    monkeypatch.setattr(
        figure, 'savefig', lambda self, *a, **k: (axes.append(self.axes[0]), savefig(self, *a, **k))
    )
    plot.main(list(args))
    return axes[0]


def test_the_picture_has_a_colour_a_run_and_both_losses(tmp_path, monkeypatch):
    axes = drawn(
        monkeypatch,
        write_run(tmp_path / 'a'),
        write_run(tmp_path / 'b', 'lt_nag', 163_812_168),
        write_run(tmp_path / 'c'),
        '--smooth=0',
        f'--out={tmp_path}/new/curves.png',
    )
    assert (tmp_path / 'new/curves.png').read_bytes().startswith(b'\x89PNG')
    train, val = axes.lines[::2], axes.lines[1::2]
    assert [line.get_color() for line in train] == [line.get_color() for line in val] and len(
        {v.get_color() for v in val}
    ) == 3
    assert list(val[0].get_ydata()) == [4.0, 2.5, 2.6] and list(val[0].get_xdata()) == [0, 50, 100]
    assert list(train[0].get_ydata()) == [3 - s / 100 for s in range(10, 101, 10)]
    assert (
        train[0].get_linewidth() < val[0].get_linewidth()
        and train[0].get_marker() == 'None' != val[0].get_marker()
    )
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ['gd, 1.50M (a)', 'lt_nag, 163.8M', 'gd, 1.50M (c)']
    low, high = axes.get_ylim()
    assert low < 2.0 and 2.9 < high < 4.0  # the untrained model's loss is above the picture


def test_time_is_tokens_over_speed_without_evaluations(tmp_path, monkeypatch):
    folder = write_run(tmp_path / 'a', evals=[(0, 4.0), (55, 2.5), (100, 2.6)])
    axes = drawn(monkeypatch, folder, '--x=time', f'--out={tmp_path}/c.svg')
    minutes = [100 * i / 60 for i in range(1, 10)] + [(900 + 10_000 / 900) / 60]
    assert axes.lines[0].get_xdata() == pytest.approx(minutes)
    assert axes.lines[1].get_xdata() == pytest.approx([0, 550 / 60, minutes[-1]])


def test_tokens_are_an_axis_too(tmp_path, monkeypatch):
    axes = drawn(monkeypatch, write_run(tmp_path / 'a'), '--x=tokens', f'--out={tmp_path}/c.png')
    assert list(axes.lines[1].get_xdata()) == [0, 50_000, 100_000]


def test_a_run_without_records_leaves_an_empty_picture(tmp_path, monkeypatch):
    for x in ('step', 'time'):
        drawn(
            monkeypatch,
            write_run(tmp_path / x, evals=(), steps=()),
            f'--x={x}',
            f'--out={tmp_path}/c.png',
        )


def test_smoothing_averages_neighbours_and_keeps_a_constant():
    assert plot.smoothed([0.0, 0, 3, 0, 0], share=0.4) == [0, 1, 1, 1, 0]
    assert plot.smoothed([2.0] * 9, share=1) == plot.smoothed([2.0] * 9, share=0.9) == [2.0] * 9
    assert (
        plot.smoothed([1.0, 2.0, 6.0], share=0.6) == [1.5, 3.0, 4.0]
        and plot.smoothed([], share=1) == []
    )
    assert plot.smoothed([1.0, 5.0], share=0) == [1.0, 5.0]


def test_smoothing_a_long_run_takes_seconds():
    t0 = time.process_time()
    assert (
        len(plot.smoothed([1.0] * 200_000, share=0.05)) == 200_000 and time.process_time() - t0 < 10
    )


def test_short_numbers():
    assert [plot.short(n) for n in (0, 20_000, 1.5e6, 500e6, 14e9)] == [
        '0',
        '20,000',
        '1.5M',
        '500M',
        '14B',
    ]
