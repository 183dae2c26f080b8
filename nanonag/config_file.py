"""Config files: assignments of literals and of arithmetic over the names assigned above.

A file is parsed and never executed, so one from a stranger can do no harm.
"""

import ast
import operator
import os
from collections.abc import Callable

from nanonag.cli import UserError, nearest
from nanonag.files import ROOT

MAX_BYTES = 2**16  # of a config file
MAX_INT = 2**63  # what a tensor can hold; the limit also keeps arithmetic fast
OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


def read_file(path, asked_by='', seen=()):
    """Yields (where, key, value) for each assignment of a config file.

    ``base = 'FILE.py'``, which must come first, yields the assignments of that file.

    Args:
        path: the file's name.
        asked_by: the place of the ``base`` that names the file, for messages.
        seen: the real paths of the files whose ``base`` led here.

    Raises:
        UserError: if the file cannot be read or holds anything but assignments.
    """
    path = os.path.normpath(path)
    names: dict[str, object] = {}
    for i, node in enumerate(parse_file(path, asked_by, seen)):
        where = f'{path}:{node.lineno}'
        key, value = assignment(node, where, names)
        if key != 'base':
            found = [(where, key, value)]
        elif i > 0:
            raise UserError(
                f'{where}: `base` must be the first assignment, for the others to override it'
            )
        elif not isinstance(value, str):
            raise UserError(f'{where}: base takes text, not {value!r:.80}')
        else:
            base = os.path.join(os.path.dirname(path), value)
            found = read_file(base, f'{where}: ', (*seen, os.path.realpath(path)))
        for where, key, value in found:
            names[key] = value
            yield where, key, value


def parse_file(path, asked_by, seen):
    """The statements of a config file as syntax trees; UserError if it cannot be read."""
    try:
        if not path.endswith('.py'):
            raise FileNotFoundError('options are written --key=value, config files config/NAME.py')
        with open(path, 'rb') as file:
            source = file.read(MAX_BYTES + 1)
        if len(source) > MAX_BYTES:
            raise ValueError(f'it has more than {MAX_BYTES} bytes')
        if os.path.realpath(path) in seen:
            raise ValueError('it is its own base, directly or through others')
        return ast.parse(source).body
    except OSError as error:
        near = nearest_file(path) if isinstance(error, FileNotFoundError) else ''
        line, reason = '', f'{error.strerror or error}{near}'
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        line = f':{getattr(error, "lineno", None) or 1}'
        reason = getattr(error, 'msg', None) or str(error) or 'nested too deeply'
    raise UserError(f'{asked_by}{path}{line}: cannot be read as a config file: {reason}')


def assignment(node, where, names):
    """The (name, value) that a statement assigns; UserError if it is no simple assignment."""
    is_assignment = isinstance(node, ast.Assign) and len(node.targets) == 1
    if not is_assignment or not isinstance(node.targets[0], ast.Name):
        raise UserError(f'{where}: a config file holds only assignments like `n_layer = 12`')
    key = node.targets[0].id
    try:
        return key, evaluate(node.value, names)
    except (ArithmeticError, ValueError, RecursionError) as error:
        raise UserError(
            f'{where}: {key}: {error.args[-1]}; write a literal or arithmetic over names above'
        ) from None


def evaluate(node, names) -> object:
    """The value of an expression's syntax tree.

    Raises ValueError or ArithmeticError, with the reason as the last argument, if there is none.
    """
    value: object
    match node:
        case ast.Constant(value=constant):
            value = constant
        case ast.Name(id=name) if name in names:
            value = names[name]
        case ast.Name(id=name):
            raise ValueError(f'{name!r} is not assigned above, here or in the base')
        case ast.Tuple(elts=items) | ast.List(elts=items):
            value = tuple(evaluate(item, names) for item in items)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            value = calculate(op, evaluate(operand, names))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATORS:
            value = calculate(op, evaluate(left, names), evaluate(right, names))
        case _:
            raise ValueError(f'{ast.unparse(node):.60} is not allowed')
    if isinstance(value, int) and abs(value) >= MAX_INT:
        raise ValueError('the integer does not fit into 64 bits')
    return value


def calculate(op, *operands):
    """An operator's result for one or two numbers; ValueError if they are none or too large."""
    if any(type(operand) not in (int, float) for operand in operands):
        raise ValueError('arithmetic is for numbers only')
    if isinstance(op, ast.Pow) and abs(float(operands[0]) ** operands[1]) >= MAX_INT:
        raise ValueError('the power is too large')  # as an integer, 9**9**9 would take minutes
    return OPERATORS[type(op)](*operands)


def nearest_file(path):
    """'; did you mean X?' for the file in config/ whose name is nearest, '' if none is near."""
    folder = os.path.join(ROOT, 'config')
    names = os.listdir(folder) if os.path.isdir(folder) else ()
    return nearest(f'config/{os.path.basename(path)}', [f'config/{name}' for name in names])
