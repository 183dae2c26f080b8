"""Options of every script: dataclasses declare them; config files and flags override the defaults.

    python train.py config/owt_lt_nag.py --n_layer=6 --dataset shakespeare_char

Arguments apply from left to right, the last one wins. Values in config files pass the same check as
those on the command line. A field's annotation is its type: int, float, bool, str, FilePath,
Literal[...], tuple[str, ...] (``a,b`` or ``a b``) or tuple[FilePath, ...], each possibly
``| None``. An int takes whole floats (6e5, 480 / 40), a float takes ints, neither takes True or
False. In a FilePath ``~`` stands for the home folder. A list given twice on the command line is
the two lists together.
"""

import contextlib
import dataclasses
import math
import os
import typing

from nanonag.cli import UserError, nearest, note
from nanonag.config_file import MAX_INT, read_file

FilePath = typing.Annotated[str, 'path']  # of a file or folder
Paths = tuple[FilePath, ...]
HUGE = 1e30  # every number option is smaller, so its float32 value and sums of them are finite
WORDS = {
    int: 'an integer',
    float: 'a number',
    bool: 'True or False',
    str: 'text',
    tuple: 'names like a,b',
    FilePath: 'a path',
    Paths: 'paths like a,b',
}
LISTS = (tuple, Paths)


class Options(dict):
    """{key: checked value}; ``typed`` holds the keys whose value comes from the command line."""

    def __init__(self, values=(), typed=()):
        super().__init__(values)
        self.typed = set(typed)

    def of(self, cls):
        """Those that are fields of a dataclass."""
        names = {field.name for field in dataclasses.fields(cls)}
        return Options({k: v for k, v in self.items() if k in names}, self.typed & names)


def parse(argv, *classes):
    """Reads config files, ``--key=value`` and ``--key value`` into :class:`Options`.

    Args:
        argv: the command line's arguments.
        classes: dataclasses whose fields are the options; no two share a field.

    Raises:
        UserError: for an unknown option, a value of another type, or an unreadable file.
    """
    fields = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            name_is_free = field.name not in fields and field.name != 'base'
            assert name_is_free, f'{cls.__name__}.{field.name}: name is taken'
            fields[field.name] = alternatives(hints[field.name])
    options = Options()
    args = list(argv)
    while args:
        arg = args.pop(0)
        typed = arg.startswith('--')
        for where, key, value in [read_option(arg, args, fields)] if typed else read_file(arg):
            if key not in fields:
                raise UserError(
                    f'{where}: unknown option {key!r}{nearest(key, fields)} (--help lists all)'
                )
            value = check(value, fields[key], f'{where}: {key}')
            if typed and key in options.typed and is_list(fields[key]):
                value = options[key] + value
            options[key] = value
            if typed:
                options.typed.add(key)
            else:
                options.typed.discard(key)
    return options


def build(cls, options):
    """The dataclass with those of the options (a dict) that are its fields."""
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{name: options[name] for name in names if name in options})


def drop_idle(idle, typed, reason):
    """Handles options that have no effect: refuses those on the command line, reports the others.

    Args:
        idle: {name: value} of the options.
        typed: the names that the user typed on the command line.
        reason: why they have no effect, such as 'optimizer=adamw'.

    Raises:
        UserError: if one of them was typed.
    """
    refused = [f'{name}={value}' for name, value in idle.items() if name in typed]
    if refused:
        verb, them = ('has', 'it') if len(refused) == 1 else ('have', 'them')
        raise UserError(f'{", ".join(refused)} {verb} no effect with {reason}; leave {them} out')
    if idle:
        dropped = ', '.join(f'{name}={value}' for name, value in idle.items())
        note(f'{dropped}: not used with {reason}')


def at_least(config, **limits):
    """Raises UserError unless each named field is None or a number >= its limit and < HUGE."""
    for name, least in limits.items():
        value = getattr(config, name)
        if value is None or least <= value < HUGE:
            continue
        below = f' and below {HUGE:g}' if value >= HUGE else ''
        raise UserError(f'{name}={value}: must be at least {least}{below}')


def between(config, **limits):
    """Raises UserError unless each named field is None or inside its open interval (low, high)."""
    for name, (low, high) in limits.items():
        value = getattr(config, name)
        if value is not None and not low < value < min(high, HUGE):
            raise UserError(f'{name}={value}: must be above {low} and below {min(high, HUGE):g}')


def require(condition, message):
    """Raises UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


def choose(config, choices, where):
    """Replaces None by the first of a field's allowed values, and refuses all other values.

    Args:
        config: a frozen dataclass, in its ``__post_init__``.
        choices: {field: allowed values}.
        where: what the choice depends on, such as 'update=gd'.
    """
    for name, allowed in choices.items():
        value = getattr(config, name)
        names = ' or '.join(map(str, allowed))
        problem = f'{name}={value}: {where} takes {names}'
        if allowed == (None,):
            problem = f'{name}={value} has no effect with {where}; leave it out'
        require(value is None or value in allowed, problem)
        if value is None:
            object.__setattr__(config, name, allowed[0])


def set_numbers(config, defaults, where):
    """Replaces None by a field's default; a field whose default is None must not be set.

    Args:
        config: a frozen dataclass, in its ``__post_init__``.
        defaults: {field: default, or None where the field has no effect}.
        where: what that depends on, such as 'update=gd'.
    """
    for name, default in defaults.items():
        value = getattr(config, name)
        has_effect = value is None or default is not None
        require(has_effect, f'{name}={value} has no effect with {where}; leave it out')
        if value is None:
            object.__setattr__(config, name, default)


def convert(cls, values, where):
    """Checks a dict from a file against the fields of a dataclass; returns keyword arguments.

    Raises UserError, beginning with ``where``, for an unknown field or a value of another type.
    """
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise UserError(f'{where}: unknown {cls.__name__} field {key!r:.80}')
    return {
        key: check(value, alternatives(hints[key]), f'{where}: {key}')
        for key, value in values.items()
    }


def alternatives(annotation):
    """The types and values that a field takes: Literal['a', 'b'] | None -> ['a', 'b', None]."""
    if annotation in (FilePath, Paths):
        return [annotation]
    if typing.get_origin(annotation) is tuple:
        return [tuple]
    if args := typing.get_args(annotation):
        return [alternative for arg in args for alternative in alternatives(arg)]
    return [None if annotation is type(None) else annotation]


def check(value, allowed, where):
    """Returns the value as the type that the field takes; UserError if it has another one.

    Args:
        value: from a config file, the command line or a checkpoint.
        allowed: the field's :func:`alternatives`.
        where: what the message begins with.
    """
    choices = {str(choice): choice for choice in allowed if not isinstance(choice, type)}
    if str(value) in choices:  # as text, so that False also means 'False'
        return choices[str(value)]
    for kind in allowed:
        if kind is int and is_number(value) and abs(value) < MAX_INT and value == int(value):
            return int(value)
        if kind is float and is_number(value):
            return float(value)
        if kind is bool and type(value) in (bool, int) and value in (0, 1):
            return bool(value)
        if kind is str and is_text(value):
            return value
        if kind is tuple and is_list_of_names(value):
            return value
        if kind == FilePath and is_text(value):
            return expanded(value, where)
        if kind == Paths and is_list_of_names(value):
            return tuple(expanded(path, where) for path in value)
    raise UserError(
        f'{where} takes {describe(allowed)}, not {value!r:.80}{nearest(str(value), choices)}'
    )


def expanded(path, where):
    """The path with ``~`` replaced by the home folder; UserError for one that cannot exist."""
    path = os.path.expanduser(path)
    parts = os.fsencode(path).split(b'/')
    if max(map(len, parts)) > 255 or sum(map(len, parts)) > 4000:
        raise UserError(
            f'{where}: File name too long ({len(path)} characters; a path has up to 4000 bytes, '
            f'each name in it up to 255): {path:.40}...; choose a shorter one'
        )
    return path


def is_list(allowed):
    """Whether a field's alternatives are lists."""
    return any(kind in LISTS for kind in allowed)


def is_number(value):
    """Whether it is a float other than NaN or an int of at most 64 bits, and no bool."""
    if type(value) is float:
        return not math.isnan(value)
    return type(value) is int and abs(value) < MAX_INT


def is_text(value):
    """Whether it is a string that a command line can hold.

    That excludes NUL, and surrogates but for those that stand for undecodable bytes.
    """
    try:
        return isinstance(value, str) and b'\0' not in value.encode('utf-8', 'surrogateescape')
    except UnicodeEncodeError:
        return False


def is_list_of_names(value):
    """Whether it is a tuple of strings, none of them empty."""
    return isinstance(value, tuple) and all(item and is_text(item) for item in value)


def describe(allowed):
    """A field's alternatives in words: 'an integer or None'."""
    return ' or '.join(WORDS.get(kind, str(kind)) for kind in allowed)


def read_option(arg, rest, fields):
    """The (where, key, value) of a command line's option.

    Args:
        arg: ``--key=value`` or ``--key``.
        rest: the arguments after it; the option's values are removed from it.
        fields: {key: alternatives}.
    """
    key, equals, text = arg[2:].partition('=')
    allowed = fields.get(key, ())
    texts = [text] if equals else []
    while rest and not rest[0].startswith('--') and (is_list(allowed) or not texts):
        texts.append(rest.pop(0))
        arg += f' {texts[-1]}'
    if not texts and key in fields and bool not in allowed:
        raise UserError(
            f'{arg}: the value is missing; write --{key}=VALUE, where {key} takes '
            f'{describe(allowed)}'
        )
    if Paths in allowed:
        return arg, key, split_paths(texts)
    return arg, key, from_text(','.join(texts) if texts else 'True', allowed)


def split_paths(texts):
    """The paths that the values of an option stand for, as a tuple.

    A single value is split at commas unless it names a file or folder that exists; several values
    are paths as they are.
    """
    if len(texts) > 1 or os.path.exists(os.path.expanduser(texts[0])):
        return tuple(texts)
    return tuple(texts[0].split(','))


def from_text(text, allowed):
    """The Python value that the text of an option on the command line stands for."""
    if tuple in allowed:
        return tuple(text.split(','))
    if text == 'None' and None in allowed:
        return None
    if str in allowed or FilePath in allowed or text == 'None':
        return text
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return {'true': True, 'false': False}.get(text.lower(), text)
