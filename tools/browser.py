"""Cells that run in the reader's browser: Pyodide and this package, put beside the pages, nothing from other hosts.

A notebook chooses a cell with `#| run-here`. What else must run before it is found here, from the names that cells define
and use. `tools/docs.py site` calls `add_runtime` at its end.

python tools/browser.py check  # after that: runs every chosen cell in the site's own Python, outside a browser
"""
import ast
import builtins
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from symtable import symtable

PYODIDE = "314.0.3"  # of npm: Python 3.14
CORE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
SOURCES = Path(__file__).parent/"browser"
ABSENT = {"torch", "numpy", "matplotlib", "tokenizers", "transformers", "triton", "numba", "nbdev"}
NOT_RUN = ("#| eval: false", "#| bench", "#| gpu", "#| slow", "#| notest", "#| default_exp", "nbdev_export()")


# ---- what a cell builds on

@cache
def scan(
    source:str, # of a cell
)->tuple:       # names it needs from before, names it binds, names whose object it may change
    "The names of a cell, statement by statement"
    needs, binds, changes = set(), set(), set()
    for statement in ast.parse(source).body:
        table = symtable(ast.unparse(statement), "cell", "exec")
        used, bound = referenced(table), {s.get_name() for s in table.get_symbols()
                                          if s.is_assigned() or s.is_imported() or s.is_namespace()}
        needs |= used - binds - set(dir(builtins))
        binds |= bound
        changes |= touched(statement)
    return needs, binds, changes - binds


def referenced(table)->set:
    "Names that a scope, or one within it, looks up outside"
    own = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (table.get_type() == "module" or s.is_global())}
    return own.union(*map(referenced, table.get_children()))


def touched(statement)->set:
    "Names of objects that a statement may change: whose methods it calls, whose parts it assigns, what it hands on"
    parts, is_call = [], isinstance(getattr(statement, "value", None), ast.Call)
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            parts += [node.func] if isinstance(node.func, ast.Attribute) else []
            parts += node.args if is_call else []
        elif isinstance(node, (ast.Assign, ast.Delete)):
            parts += node.targets
        elif isinstance(node, ast.AugAssign):
            parts.append(node.target)
    return {root.id for root in map(root_of, parts) if isinstance(root, ast.Name)}


def root_of(node):
    "`a` of `a.b[c].d`"
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node


def absent(
    source:str, # of a cell
)->set:
    "What a cell imports, not within a function, that a browser has not"
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    if "figure" in scan(source)[0]: # of pagedlm.draw
        names.add("matplotlib")
    return names & ABSENT


def pieces(
    nb:dict, # a notebook
)->dict:     # id -> source, in order
    "The code cells that a browser might run; one with nothing but imports in one piece for each"
    found = {}
    for cell in nb["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or any(mark in text for mark in NOT_RUN):
            continue
        body = ast.parse(text).body
        if all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body):
            found |= {f"{cell['id']}-{i}": ast.unparse(node) for i, node in enumerate(body)}
        else:
            found[cell["id"]] = text
    return found


def slice_of(
    cells:list, # sources, in order
    i:int,      # the cell that is to run
)->list:        # indices of the cells before it that it builds on
    "What must run before a cell: what binds the names it needs, and what changes their objects on the way"
    chosen, needs = pass_over(cells[:i], scan(cells[i])[0])
    while True: # a function may use a name that is bound after it: look again for what nobody bound
        needs -= set().union(*(scan(cells[j])[1] for j in chosen))
        more, needs = pass_over(cells[:i], needs, first=False)
        if more <= chosen:
            return sorted(chosen)
        chosen |= more


def pass_over(cells, needs, first=True):
    "One way back over the cells: which of them are needed, and what is needed then"
    chosen = set()
    for j in reversed(range(len(cells))):
        wants, binds, changes = scan(cells[j])
        if not needs & (binds | changes if first else binds):
            continue
        if absent(cells[j]):
            if first and needs & binds:
                raise ValueError(f"it needs {', '.join(sorted(needs & binds))}, from a cell that imports "
                                 f"{', '.join(sorted(absent(cells[j])))}")
            continue  # it may change an object, but most likely draws it
        needs = needs - (binds - wants) | wants
        chosen.add(j)
    return chosen, needs


def runnable(
    nb:dict, # a notebook
)->dict:     # id -> source; and for chosen cells what they need, and their stored outputs
    "The chosen cells of a notebook and what they build on"
    found, parts = {}, pieces(nb)
    ids, texts = list(parts), list(parts.values())
    for cell in nb["cells"]:
        if "#| run-here" not in "".join(cell["source"]).splitlines():
            continue
        i = ids.index(cell["id"])
        try:
            needs = [ids[j] for j in slice_of(texts, i)]
        except ValueError as e:
            sys.exit(f"the cell {cell['id']} cannot run in a browser: {e}\n{texts[i]}")
        found |= {id: dict(source=parts[id]) for id in needs if id not in found}
        found[cell["id"]] = dict(source=texts[i], needs=needs, outputs=cell["outputs"])
    return found


# ---- the runtime

def npm_package(
    name:str,    # of npm
    version:str,
    cache:Path,  # folder for packages
)->Path:         # it, unpacked
    "Get a package with npm, once"
    folder = cache/f"{name}-{version}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"{name}@{version}"]
        quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        if subprocess.run(command, cwd=cache, **quiet).returncode:
            sys.exit(f"npm could not get {name} {version}, see above; `--cdn` leaves KaTeX and Mermaid to a CDN")
        shutil.unpack_archive(cache/f"{name}-{version}.tgz", cache/"unpacked")
        (cache/"unpacked"/"package").rename(folder)
    return folder


def wheel_of(
    package:Path, # the package's folder
    where:Path,   # folder for the file
)->Path:
    "The modules as a wheel: what Pyodide unpacks. Same bytes for the same modules"
    where.mkdir(parents=True, exist_ok=True)
    path = where/f"{package.name}-0-py3-none-any.whl"
    info = f"{package.name}-0.dist-info"
    files = {f.relative_to(package.parent).as_posix(): f.read_bytes() for f in sorted(package.rglob("*"))
             if f.is_file() and f.suffix != ".pyc" and f.stat().st_size < 500_000}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {package.name}\nVersion: 0\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: tools/browser.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD")).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in files.items():
            z.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return path


def lock(
    core:Path,  # Pyodide
    wheel:Path, # the package
)->str:         # pyodide-lock.json
    "The list of packages: ours only, at an address that changes with its bytes"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    name = wheel.name.split("-")[0]
    info = json.loads((core/"pyodide-lock.json").read_text(encoding="utf-8"))["info"]
    entry = dict(name=name, version="0", file_name=f"{digest[:12]}/{wheel.name}", install_dir="site", sha256=digest,
                 package_type="package", imports=[name], depends=[], unvendored_tests=False)
    return json.dumps(dict(info=info, packages={name: entry}))


def add_runtime(
    site:Path,    # the finished pages
    pages:dict,   # page name -> notebook
    package:Path, # the package's folder
    cache:Path,   # folder for what npm brings
)->tuple:         # how many cells run, and what was done in a line
    "Put Pyodide and the package into `run/`, and tell the pages that have something to run"
    chosen = {name: found for name, nb in pages.items() if (found := runnable(nb))}
    live = [p for p in site.rglob("*.html") if "data-live=" in p.read_text(encoding="utf-8")]
    if not chosen and not live:
        return 0, "nothing runs in the browser"
    if not shutil.which("npm"):
        return 0, "No npm here, so no cell runs in the reader's browser."
    core, out = npm_package("pyodide", PYODIDE, cache), site/"run"
    folder = out/f"pyodide-{PYODIDE}"
    wheel = wheel_of(package, cache/"wheel")
    listed = lock(core, wheel)
    folder.mkdir(parents=True)
    for name in CORE:
        shutil.copy(core/name, folder/name)
    (folder/"pyodide-lock.json").write_text(listed, encoding="utf-8")
    at = folder/next(iter(json.loads(listed)["packages"].values()))["file_name"]
    at.parent.mkdir()
    shutil.copy(wheel, at)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    for f in SOURCES.iterdir():
        text = f.read_text(encoding="utf-8").replace("PYODIDE", folder.name).replace("MEGABYTES", f"{size/1e6:.0f}")
        (out/f.name).write_text(text, encoding="utf-8")
    (out/"pages").mkdir()
    for name, cells in chosen.items():
        told = {id: {k: v for k, v in c.items() if k != "outputs"} for id, c in cells.items()}
        (out/"pages"/f"{name}.json").write_text(json.dumps(told), encoding="utf-8")
        (cache/"expected").mkdir(exist_ok=True)
        (cache/"expected"/f"{name}.json").write_text(json.dumps(cells), encoding="utf-8")
    for path in {*live, *(site/f"{name}.html" for name in chosen)}:
        text, up = path.read_text(encoding="utf-8"), os.path.relpath(out, path.parent)
        tags = (f'<link rel="stylesheet" href="{up}/run.css">'
                f'<script type="module" src="{up}/run.js" data-run-page="{path.stem}"></script></body>')
        path.write_text(text.replace("</body>", tags), encoding="utf-8")
    n = sum("needs" in c for cells in chosen.values() for c in cells.values())
    return n, f"{n} cells on {len(chosen)} pages run in the browser, {len(live)} live figures: {size/1e6:.1f} MB, on demand"


def check(
    root:Path, # of the repository
)->int:        # what a shell wants to know
    "Run every chosen cell as a browser would"
    if not shutil.which("node"):
        print("No node here, so nothing is checked.")
        return 0
    return subprocess.run(["node", "tools/browser_check.mjs", "_docs", "build/vendor/expected"], cwd=root).returncode


if __name__ == "__main__":
    if sys.argv[1:] != ["check"]:
        sys.exit(__doc__)
    sys.exit(check(Path(__file__).parent.parent))
