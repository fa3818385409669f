"""The order of the notebooks is the order of the modules: what imports what, and what it needs to be imported at all"""
import ast
import configparser
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import median

import pytest

import pagedlm

PACKAGE = Path(pagedlm.__file__).parent
SETTINGS = PACKAGE.parent/"settings.ini"
TORCH_FREE = {"core", "draw", "tokenizer", "config", "blocks", "request", "scheduler", "engine", "trace", "sim", "cluster"}
COLUMNS, FUNCTION_LINES, CLASS_LINES = 110, 45, 60


@cache
def notebooks():
    "module -> the notebook that makes it, `21_scheduler` say: sorted as they are read"
    found = {}
    for path in PACKAGE.glob("*.py"):
        if m := re.search(r"File to edit: \S*?(\w+)\.ipynb", path.read_text(encoding="utf-8")):
            found[path.stem] = m[1]
    return dict(sorted(found.items(), key=lambda item: item[1]))


@cache
def tree(module):
    return ast.parse((PACKAGE/f"{module}.py").read_text(encoding="utf-8"))


def imports(nodes):
    "Dotted names of what `nodes` import, relative ones starting with a dot"
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "."*node.level + (node.module or "")
            yield from (base.rstrip(".") + "." + name.name for name in node.names)


def ours(names):
    "Which of our modules these are"
    return {m[1] for name in names if (m := re.match(r"(?:pagedlm)?\.(\w+)", name)) and m[1] in notebooks()}


def at_module_level(module):
    "The nodes that run when the module is imported: functions wait"
    todo = list(tree(module).body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            todo += ast.iter_child_nodes(node)


def python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_modules_are_there():
    assert {"core", "blocks", "request", "scheduler", "engine", "runner"} <= set(notebooks())
    for module, notebook in notebooks().items():
        assert re.fullmatch(r"\d\d_" + module, notebook)


@pytest.mark.parametrize("module", notebooks())
def test_imports_run_downhill(module):
    "Also inside functions; tables of \"module:Class\" strings are the one way up"
    mine, order = ours(imports(ast.walk(tree(module)))), notebooks()
    assert {m: order[m] for m in mine if order[m] >= order[module]} == {}
    if module in TORCH_FREE:
        assert ours(imports(at_module_level(module))) <= TORCH_FREE


ONLY_OURS = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top != "pagedlm" and top not in sys.stdlib_module_names: raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
"""


@pytest.mark.parametrize("module", [m for m in notebooks() if m in TORCH_FREE])
def test_torch_free_modules_need_only_the_standard_library(module):
    python(ONLY_OURS + f"import pagedlm.{module}")


def test_the_blocker_blocks():
    for name in "torch", "numpy", "pagedlm.layers":
        with pytest.raises(AssertionError, match="is blocked"):
            python(ONLY_OURS + f"import {name}")


def test_import_pagedlm_is_light():
    loaded = python("import sys, pagedlm; pagedlm.__version__; pagedlm.SamplingParams; print(*sys.modules)").split()
    assert "pagedlm.core" in loaded and not {"torch", "numpy", "transformers", "tokenizers"} & set(loaded)


@pytest.mark.skipif(not SETTINGS.exists(), reason="not in the repository")
def test_version_is_that_of_the_settings():
    settings = configparser.ConfigParser()
    settings.read(SETTINGS, encoding="utf-8")
    assert pagedlm.__version__ == settings["DEFAULT"]["version"]


def test_lines_fit():
    "Those of exported cells: what nbdev writes above the first of them is its own"
    long = []
    for module in notebooks():
        lines = (PACKAGE/f"{module}.py").read_text(encoding="utf-8").splitlines()
        first = next(i for i, line in enumerate(lines) if re.match(r"# %% .*\.ipynb", line))
        long += [f"{module}.py:{i + 1} has {len(line)} columns" for i, line in enumerate(lines)
                 if i > first and len(line) > COLUMNS]
    assert not long, "\n".join(long)


def test_sizes_are_counted():
    "Never fails for a size: read the list with `pytest -s`"
    counts = []
    for module in notebooks():
        for node in ast.walk(tree(module)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                n_lines, is_class = node.end_lineno - node.lineno + 1, isinstance(node, ast.ClassDef)
                counts.append((n_lines, is_class, f"{module}.{node.name}"))
    functions = sorted((n, name) for n, is_class, name in counts if not is_class)
    print(f"\n{len(functions)} functions, the median has {median(n for n, _ in functions)} lines")
    for n, is_class, name in sorted(counts, reverse=True):
        if n > (CLASS_LINES if is_class else FUNCTION_LINES):
            print(f"{n:4} lines: {'class' if is_class else 'function'} {name}")
    assert functions
