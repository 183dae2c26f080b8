"""The repository as text: what its code may never do, and that the tests its table names are
there."""

import ast
import re
import sys

import pytest
from conftest import ROOT

TESTS = ROOT / 'tests'
SOURCES = sorted(
    path for pattern in ('*.py', 'data/*/*.py', 'nanonag/**/*.py') for path in ROOT.glob(pattern)
)
# what `import model` may need; all else is imported where it is used
REQUIRED = {'torch', 'numpy', 'safetensors', 'tqdm'}


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


def test_every_test_that_the_table_names_exists():
    text = (TESTS / 'README.md').read_text(encoding='utf-8')
    named = re.findall(r'`(test_\w+\.py)::([\w:]+)`', text)
    # none is written in a way that is not checked
    assert len(named) > 100 and len(named) == text.count('.py::')
    existing = {(path.name, name) for path in TESTS.glob('test_*.py') for name in names_in(path)}
    assert sorted(set(named) - existing) == []


def test_no_test_is_hidden_by_another_of_its_name():
    for path in TESTS.glob('test_*.py'):
        names = names_in(path)
        assert sorted(set(names)) == sorted(names), path.name


@pytest.mark.parametrize('path', SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
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


@pytest.mark.parametrize('path', SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
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


@pytest.mark.parametrize('path', SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
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


@pytest.mark.parametrize('path', ENGINE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_engine_imports_no_file_of_the_root(path):
    """So that model.py can be read, replaced and exported without what surrounds it."""
    root = {path.stem for path in ROOT.glob('*.py')} | {'data', 'tests'}
    assert not root & {name.split('.')[0] for name in imports(ast.walk(syntax(path)))}


def test_the_root_holds_what_one_runs_or_reads():
    assert len(list(ROOT.glob('*.py'))) <= 10
