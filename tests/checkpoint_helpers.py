"""Small checkpoints for the tests of nanonag.checkpoint."""

from dataclasses import asdict

import torch
from conftest import fresh

from nanonag.checkpoint import Saver

TOKENIZER = {'kind': 'char', 'chars': list('abcdefghijklm')}


def state(step, update='gd', **kwargs):
    """A full state as train.py makes it; the token table is filled with the step."""
    model = fresh(update=update, n_layer=1, n_embd=4, n_head=1, **kwargs)
    with torch.no_grad():
        model.transformer.wte.weight.fill_(step)
    return {
        'version': 1,
        'model': model.state_dict(),
        'gpt_config': asdict(model.cfg),
        'step': step,
        'best_val_loss': 2.5,
        'tokenizer': TOKENIZER,
        'optimizer': {'a': {'step': torch.tensor(3.0), 'exp_avg': torch.ones(2)}},
        'scaler': {},
        'train_config': {'seed': 1, 'min_lr': None},
        'skipped': 0,
        'rng': [[torch.get_rng_state()]],
        'data': {'train': 'x', 'val': 'y'},
        'wandb_id': None,
    }


def save(folder, *steps, **options):
    """A Saver that has written the states of these steps."""
    saver = Saver(folder, **options)
    for step in steps:
        saver.save(state(step))
        assert saver.wait()
    return saver


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def acting(plans, made=None):
    """For at_step: an action that calls plans[step], if any, and lists the step in `made`."""

    def action(step):
        if made is not None:
            made.append(step)
        if step in plans:
            plans[step]()

    return action
