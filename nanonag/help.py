"""--help: the options of a script, read from its source, so that no import delays the answer."""

import ast
import re
import sys
import textwrap

from nanonag.cli import run
from nanonag.files import ROOT
from nanonag.report import table

SECTION = '# ---- '  # begins a comment that heads the options after it


def show_help(doc, *sources):
    """With -h or --help on the command line, prints the script's help and exits.

    Args:
        doc: the script's docstring.
        sources: the dataclasses of its options, each as 'FILE.py:Class'.
    """
    if {'-h', '--help'} & set(sys.argv[1:]):
        run(lambda _: print(help_text(doc, *sources)))
        sys.exit(0)


def help_text(doc, *sources):
    """The docstring, and a table of the fields of each source."""
    parts = [doc.strip()]
    for source in sources:
        path, name = source.split(':')
        rows = options((ROOT / path).read_text(encoding='utf-8'), name)
        parts += [f'\n{name} in {path}:', textwrap.indent(table(rows), '  ')]
    return '\n'.join(parts)


def options(source, name):
    """A (name, type, default, comment) of each field of a dataclass.

    A dict that a comment names, such as SCHEMES, is shown as its keys.
    """
    lines = source.splitlines()
    body = ast.parse(source).body
    keys = dict_keys(body)
    cls = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    rows = []
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            comment = re.sub(r'\w+', lambda m: keys.get(m[0], m[0]), comment_of(node, lines))
            kind = kind_of(node.annotation)
            rows.append((f'--{node.target.id}', kind, ast.unparse(node.value), comment))
    return rows


def kind_of(annotation):
    """A field's annotation as shown to users: Literal['a', 'b'] | None -> a|b|None."""
    text = ast.unparse(annotation).replace(' | ', '|').replace('FilePath', 'path')
    return re.sub(
        r'Literal\[(.*?)\]', lambda m: re.sub(r"'|( )", '', m[1].replace(', ', '|')), text
    )


def dict_keys(body):
    """{name: 'key, key, ...'} of the dicts that a module assigns."""
    found = {}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            keys = [ast.unparse(key).strip("'") for key in node.value.keys if key]
            found[ast.unparse(node.targets[0])] = ', '.join(keys)
    return found


def comment_of(field, lines):
    """The comment on a field's line, or else the one on the lines directly above it."""
    code = lines[field.end_lineno - 1].encode()  # offsets of a syntax tree count bytes
    comment = code[field.end_col_offset :].decode().strip('# ')
    above = field.lineno - 1
    while lines[above - 1].strip().startswith('# ') and SECTION not in lines[above - 1]:
        above -= 1
    return comment or ' '.join(line.strip('# ') for line in lines[above : field.lineno - 1])
