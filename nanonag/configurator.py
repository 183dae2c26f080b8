"""Configuration of every script: dataclasses declare the options; config files and flags override
their defaults.

    python train.py config/owt_lt_nag.py --n_layer=6 --dataset shakespeare_char

Arguments apply from left to right, the last one wins. A config file holds assignments of literals
and arithmetic over names assigned above; it is read, never executed, and its values pass the same
check as the command line's. The annotation of a field is its type: int, float, bool, str,
Literal[...] or tuple[str, ...] (`a,b` or `a b`), each possibly `| None`. An int takes whole floats
(6e5, 480 / 40), a float takes ints, neither takes True or False."""

import ast
import dataclasses
import difflib
import math
import operator
import os
import typing

from nanonag.cli import UserError
from nanonag.files import ROOT

MAX_BYTES = 2**16  # of a config file
# no option is as large: the float32 that it becomes stays finite, and so do sums of some
HUGE = 1e30
MAX_INT = 2**63  # what a tensor can hold; it also keeps a config file's arithmetic instant
WORDS = {
    int: 'an integer',
    float: 'a number',
    bool: 'True or False',
    str: 'text',
    tuple: 'names like a,b',
}
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


def build(cls, overrides):
    """The dataclass `cls` with those of the overrides that are its fields."""
    return cls(
        **{
            field.name: overrides[field.name]
            for field in dataclasses.fields(cls)
            if field.name in overrides
        }
    )


def parse(argv, *classes):
    """{key: checked value} from config files and --key=value or --key value; UserError for anything
    else."""
    fields = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            assert field.name not in fields and field.name != 'base', (
                f'{cls.__name__}.{field.name}: name is taken'
            )
            fields[field.name] = alternatives(hints[field.name])
    overrides, args = {}, list(argv)
    while args:
        arg = args.pop(0)
        for where, key, value in (
            [read_option(arg, args, fields)] if arg.startswith('--') else read_file(arg)
        ):
            if key not in fields:
                raise UserError(
                    f'{where}: unknown option {key!r}{nearest(key, fields)} (--help lists all)'
                )
            overrides[key] = check(value, fields[key], f'{where}: {key}')
    return overrides


def at_least(config, **limits):
    """UserError unless each named field of the dataclass is None or a number of at least its limit,
    and not HUGE."""
    for name, least in limits.items():
        value = getattr(config, name)
        if value is not None and not least <= value < HUGE:
            raise UserError(
                f'{name}={value}: must be at least {least}'
                + f' and below {HUGE:g}' * (value >= HUGE)
            )


def between(config, **limits):
    """UserError unless each named field of the dataclass is None or lies inside its open interval
    (low, high)."""
    for name, (low, high) in limits.items():
        value, high = getattr(config, name), min(high, HUGE)
        if value is not None and not low < value < high:
            raise UserError(f'{name}={value}: must be above {low} and below {high:g}')


def convert(cls, values, where):
    """A dict from elsewhere (a checkpoint) as checked keyword arguments of the dataclass `cls`."""
    hints = typing.get_type_hints(cls)
    if unknown := [key for key in values if key not in hints]:
        raise UserError(f'{where}: unknown {cls.__name__} field {unknown[0]!r:.80}')
    return {
        key: check(value, alternatives(hints[key]), f'{where}: {key}')
        for key, value in values.items()
    }


def alternatives(annotation):
    """The types and values that a field takes: Literal['a', 'b'] | None -> ['a', 'b', None]."""
    if typing.get_origin(annotation) is tuple:
        return [tuple]
    if args := typing.get_args(annotation):
        return [alternative for arg in args for alternative in alternatives(arg)]
    return [None if annotation is type(None) else annotation]


def check(value, allowed, where):
    """`value` as what the field takes; UserError if it is something else."""
    is_number = type(value) is float or type(value) is int and abs(value) < MAX_INT
    choices = {str(choice): choice for choice in allowed if not isinstance(choice, type)}
    if str(value) in choices:  # as text, so that False means 'False' as well
        return choices[str(value)]
    for kind in allowed:
        if kind is int and is_number and abs(value) < MAX_INT and value == int(value):
            return int(value)
        if kind is float and is_number and not math.isnan(value):
            return float(value)
        if kind is bool and type(value) in (bool, int) and value in (0, 1):
            return bool(value)
        if kind is str and is_text(value):
            return value
        if (
            kind is tuple
            and isinstance(value, tuple)
            and all(item and is_text(item) for item in value)
        ):
            return value
    raise UserError(
        f'{where} takes {describe(allowed)}, not {value!r:.80}{nearest(str(value), choices)}'
    )


def is_text(value):
    """Whether it is a string that a command line could hold: no NUL, and no surrogates but those of
    undecodable bytes."""
    try:
        return isinstance(value, str) and b'\0' not in value.encode('utf-8', 'surrogateescape')
    except UnicodeEncodeError:
        return False


def describe(allowed):
    return ' or '.join(WORDS.get(kind, str(kind)) for kind in allowed)


def nearest(name, names):
    """'; did you mean X?' for the nearest of the names, '' if none is near."""
    return ''.join(
        f'; did you mean {near!r}?' for near in difflib.get_close_matches(name, names, n=1)
    )


def nearest_file(path):
    folder = os.path.join(ROOT, 'config')
    names = os.listdir(folder) if os.path.isdir(folder) else ()
    return nearest(f'config/{os.path.basename(path)}', [f'config/{name}' for name in names])


def read_option(arg, rest, fields):
    """(where, key, value) of the option `arg`; values that follow it are taken off `rest`."""
    key, equals, text = arg[2:].partition('=')
    allowed, texts = fields.get(key, ()), [text] if equals else []
    while rest and not rest[0].startswith('--') and (tuple in allowed or not texts):
        texts.append(rest.pop(0))
        arg += f' {texts[-1]}'
    if not texts and key in fields and bool not in allowed:
        raise UserError(
            f'{arg}: the value is missing; write --{key}=VALUE, where {key} takes {describe(allowed)}'
        )
    return arg, key, from_text(','.join(texts) if texts else 'True', allowed)


def from_text(text, allowed):
    """The Python value that a command line's `text` stands for."""
    if tuple in allowed:
        return tuple(text.split(','))
    if str in allowed or text == 'None':
        return None if text == 'None' and None in allowed else text
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return {'true': True, 'false': False}.get(text.lower(), text)


def read_file(path, asked_by='', seen=()):
    """Yield (where, key, value) for each assignment of a config file; `base = 'FILE.py'` yields
    those of FILE.

    `asked_by` is the line with that base, `seen` the files that led to it."""
    path = os.path.normpath(path)
    try:
        if not path.endswith('.py'):
            raise FileNotFoundError('options are written --key=value, config files config/NAME.py')
        with open(path, 'rb') as file:
            source = file.read(MAX_BYTES + 1)
        if len(source) > MAX_BYTES:
            raise ValueError(f'it has more than {MAX_BYTES} bytes')
        if os.path.realpath(path) in seen:
            raise ValueError('it is its own base, directly or through others')
        body = ast.parse(source).body
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        line = '' if isinstance(error, OSError) else f':{getattr(error, "lineno", None) or 1}'
        reason = (
            getattr(error, 'strerror', None)
            or getattr(error, 'msg', None)
            or str(error)
            or 'nested too deeply'
        )
        near = nearest_file(path) if isinstance(error, FileNotFoundError) else ''
        raise UserError(
            f'{asked_by}{path}{line}: cannot be read as a config file: {reason}{near}'
        ) from None
    names = {}
    for node in body:
        where = f'{path}:{node.lineno}'
        if not (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            raise UserError(f'{where}: a config file holds only assignments like `n_layer = 12`')
        key = node.targets[0].id
        try:
            value = evaluate(node.value, names)
        except (ArithmeticError, ValueError, RecursionError) as error:
            reason = error.args[-1]
            raise UserError(
                f'{where}: {key}: {reason}; write a literal or arithmetic over names above'
            ) from None
        if key != 'base':
            assignments = [(where, key, value)]
        elif node is body[0]:
            base = os.path.join(os.path.dirname(path), check(value, [str], f'{where}: base'))
            assignments = read_file(base, f'{where}: ', (*seen, os.path.realpath(path)))
        else:
            raise UserError(
                f'{where}: `base` must be the first assignment, for the others to override it'
            )
        for assignment in assignments:
            names[assignment[1]] = assignment[2]
            yield assignment


def evaluate(node, names):
    """The value of an expression's syntax tree; ValueError or ArithmeticError says why it has
    none."""
    match node:
        case ast.Constant(value=value):
            pass
        case ast.Name(id=name) if name in names:
            value = names[name]
        case ast.Name(id=name):
            raise ValueError(f'{name!r} is not assigned above, here or in the base')
        case ast.Tuple(elts=items) | ast.List(elts=items):
            value = tuple(evaluate(item, names) for item in items)
        case ast.UnaryOp(op=op, operand=left) | ast.BinOp(op=op, left=left) if (
            type(op) in OPERATORS
        ):
            operands = [
                evaluate(side, names) for side in (left, getattr(node, 'right', None)) if side
            ]
            if any(type(operand) not in (int, float) for operand in operands):
                raise ValueError('arithmetic is for numbers only')
            # 9**9**9 takes minutes
            if isinstance(op, ast.Pow) and abs(float(operands[0]) ** operands[1]) >= MAX_INT:
                raise ValueError('the power is too large')
            value = OPERATORS[type(op)](*operands)
        case _:
            raise ValueError(f'{ast.unparse(node):.60} is not allowed')
    if isinstance(value, int) and abs(value) >= MAX_INT:
        raise ValueError('the integer does not fit into 64 bits')
    return value
