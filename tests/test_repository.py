"""The repository as text: what its code may never do, how long it may be, and that the tests which
docs/faults.md names exist."""

import ast
import re
import sys

import pytest
from conftest import ROOT

TESTS = ROOT / 'tests'
SOURCES = sorted(
    path for pattern in ('*.py', 'data/*/*.py', 'nanonag/**/*.py') for path in ROOT.glob(pattern)
)
FOLDERS = [
    folder
    for folder in ROOT.iterdir()
    if folder.is_dir() and folder.name[0] != '.' and not (folder / 'pyvenv.cfg').exists()
]
ALL_SOURCES = sorted(
    [*ROOT.glob('*.py'), *(path for folder in FOLDERS for path in folder.rglob('*.py'))]
)
# what `import model` may need; all else is imported where it is used
REQUIRED = {'torch', 'numpy', 'safetensors', 'tqdm'}


def in_root(paths):
    return pytest.mark.parametrize('path', paths, ids=lambda path: str(path.relative_to(ROOT)))


def syntax(path):
    return ast.parse(path.read_text(encoding='utf-8'))


def names_in(path):
    """The names of a file's tests as pytest gives them: NAME or CLASS::NAME."""
    tree = syntax(path)
    classes = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
    bodies = [
        ('', tree.body),
        *((f'{name}::', body) for name, body in classes.items() if name.startswith('Test')),
    ]
    return [
        prefix + node.name
        for prefix, body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith('test')
    ]


def calls(path):
    """(name, {keyword: literal or None}, line) of every call in a file, such as ('torch.load',
    {'weights_only': True}, 7)."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Call):
            options = {option.arg: getattr(option.value, 'value', None) for option in node.keywords}
            yield ast.unparse(node.func), options, node


def test_every_test_that_the_list_of_faults_names_exists():
    text = (ROOT / 'docs' / 'faults.md').read_text(encoding='utf-8')
    named = re.findall(r'`(test_\w+\.py)::([\w:]+)`', text)
    # none is written in a way that is not checked
    assert len(named) > 100 and len(named) == text.count('.py::')
    existing = {(path.name, name) for path in TESTS.glob('test_*.py') for name in names_in(path)}
    assert sorted(set(named) - existing) == []


def test_no_test_is_hidden_by_another_of_its_name():
    for path in TESTS.glob('test_*.py'):
        names = names_in(path)
        assert sorted(set(names)) == sorted(names), path.name


@in_root(SOURCES)
def test_nothing_that_was_read_is_executed(path):
    """A data folder, a checkpoint, a config file or a model's output may come from anyone."""
    imported = {name.split('.')[0] for name in imports(ast.walk(syntax(path)))}
    assert not imported & {
        'pickle',
        'dill',
        'cloudpickle',
        'joblib',
        'shelve',
        'marshal',
        'yaml',
        'runpy',
    }
    for name, options, node in calls(path):
        where = f'{path}:{node.lineno}'
        assert name not in ('eval', 'exec', 'compile', '__import__', 'os.system', 'os.popen'), where
        assert name != 'torch.load' or options.get('weights_only') is True, where
        assert not (
            name in ('np.load', 'numpy.load') and options.get('allow_pickle')
        ) and not options.get('shell'), where
        assert not options.get('trust_remote_code'), where


@in_root(SOURCES)
def test_text_files_are_opened_with_their_encoding(path):
    """Never with the platform's, which differs from machine to machine."""
    for name, options, node in calls(path):
        if (
            name.endswith(('.read_text', '.write_text'))
            or name == 'open'
            and 'b' not in mode_of(node)
        ):
            assert 'encoding' in options, f'{path}:{node.lineno}'


def mode_of(call):
    mode = call.args[1] if len(call.args) > 1 else None
    return '' if mode is None else ast.unparse(mode)


def imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def optional(node):
    """Whether it is a try that goes on without what it imports."""
    return isinstance(node, ast.Try) and any(
        ast.unparse(handler.type or node) == 'ImportError' for handler in node.handlers
    )


@in_root(SOURCES)
def test_importing_needs_torch_and_no_kernel_or_service_library(path):
    """So that any machine can train and test: flash_attn, wandb, transformers and the like are for
    those who ask for them."""
    ours = {path.stem for path in ROOT.glob('*.py')} | {'data', 'nanonag'}
    tree = syntax(path)
    at_import = [
        node
        for top in tree.body
        if not isinstance(top, (ast.FunctionDef, ast.ClassDef)) and not optional(top)
        for node in ast.walk(top)
    ]
    found = {name.split('.')[0] for name in imports(at_import)}
    assert found <= ours | REQUIRED | set(sys.stdlib_module_names)


ENGINE = sorted((ROOT / 'nanonag').rglob('*.py'))


@in_root(ENGINE)
def test_the_engine_imports_no_file_of_the_root(path):
    """So that model.py can be read, replaced and exported without what surrounds it."""
    root = {path.stem for path in ROOT.glob('*.py')} | {'data', 'tests'}
    assert not root & {name.split('.')[0] for name in imports(ast.walk(syntax(path)))}


def test_the_root_holds_what_one_runs_or_reads():
    assert len(list(ROOT.glob('*.py'))) <= 10


# ---- what a reader can take in -------------------------------------------------------------------


@in_root(ALL_SOURCES)
def test_lines_have_at_most_100_columns(path):
    lines = path.read_text(encoding='utf-8').splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > 100] == []


@in_root([path for path in ALL_SOURCES if TESTS not in path.parents])
def test_functions_have_at_most_60_lines(path):
    functions = [
        node
        for node in ast.walk(syntax(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > 60} == {}


@pytest.mark.parametrize('name, limit', [('train.py', 340), ('model.py', 480)])
def test_the_files_that_one_reads_first_stay_short(name, limit):
    assert len((ROOT / name).read_text(encoding='utf-8').splitlines()) <= limit


def test_an_installation_adds_the_engine_only():
    """Not modules called model or train, which others have, too."""
    text = (ROOT / 'pyproject.toml').read_text(encoding='utf-8')
    assert 'py-modules' not in text
    (packages,) = re.findall(r'^\[tool\.setuptools\.packages\.find\].*\n((?:.+\n)+)', text, re.M)
    assert packages.split() == ['include', '=', '["nanonag*"]']
