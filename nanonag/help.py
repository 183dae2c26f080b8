"""--help: the options of a script, read from its source, so that help needs no torch."""

import ast
import os
import re
import sys

from nanonag.cli import run
from nanonag.files import ROOT


def show_help(doc, *sources):
    """With -h or --help: print `doc` and the fields of each source 'FILE.py:Class', then exit."""
    if {'-h', '--help'} & set(sys.argv[1:]):
        run(lambda _: print(help_text(doc, *sources)))
        sys.exit(0)


def comment_of(field, lines):
    """The comment on a field's line, or else the one on the lines directly above it."""
    comment = lines[field.end_lineno - 1].encode()[field.end_col_offset :].decode().strip('# ')
    above = field.lineno - 2
    while lines[above].strip().startswith('# ') and '# ----' not in lines[above]:
        above -= 1
    return comment or ' '.join(line.strip('# ') for line in lines[above + 1 : field.lineno - 1])


def help_text(doc, *sources):
    """`doc` and the fields of each source, read from the source text, so that help is instant. A
    dict that the comment of a field names, like SCHEMES, is printed as its keys."""
    parts = [doc.strip()]
    for source in sources:
        path, name = source.split(':')
        with open(os.path.join(ROOT, path), encoding='utf-8') as file:
            text = file.read()
        lines, body = text.splitlines(), ast.parse(text).body
        dicts = {
            ast.unparse(node.targets[0]): ', '.join(
                ast.unparse(key).strip("'") for key in node.value.keys if key
            )
            for node in body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        }
        rows = []
        for node in next(
            node for node in body if isinstance(node, ast.ClassDef) and node.name == name
        ).body:
            if isinstance(node, ast.AnnAssign) and node.value:
                kind = ast.unparse(node.annotation).replace(' | ', '|')
                kind = re.sub(
                    r'Literal\[(.*?)\]', lambda m: m[1].replace("'", '').replace(', ', '|'), kind
                )
                comment = comment_of(node, lines)
                comment = re.sub(r'\w+', lambda m: dicts.get(m[0], m[0]), comment)
                rows.append((f'--{node.target.id}', kind, ast.unparse(node.value), comment))
        widths = [max(map(len, column)) for column in zip(*rows)][:3] + [0]
        parts.append(f'\n{name} in {path}:')
        parts += ['  ' + '  '.join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return '\n'.join(parts)
