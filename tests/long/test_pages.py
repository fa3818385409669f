"""The finished site in Chromium: can everybody use it, do its cells run, does it ask nobody else? Minutes.

Needs Chromium (Debian's will do), node and npm, which brings playwright-core and axe-core into build/vendor once.
"""
import json
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT/"_docs"
sys.path.insert(0, str(ROOT/"tools"))

from browser import npm_package  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if not (CHROMIUM and shutil.which("node") and shutil.which("npm")):
    pytest.skip("needs chromium, node and npm", allow_module_level=True)


class Quiet(SimpleHTTPRequestHandler):
    "A server that says nothing"
    def log_message(self, *args): pass


@pytest.fixture(scope="module")
def served():
    "The site, built and served: its address"
    subprocess.run([sys.executable, "tools/docs.py", "site"], cwd=ROOT, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def browse(task, site, *names):
    "What one of the tasks of pages.mjs found"
    cache = ROOT/"build"/"vendor"
    playwright, axe = npm_package("playwright-core", "1.65.1", cache), npm_package("axe-core", "4.14.1", cache)/"axe.min.js"
    done = subprocess.run(["node", "tests/long/pages.mjs", task, playwright, CHROMIUM, site, axe, *names], cwd=ROOT,
                          stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def test_every_page_is_fit_to_be_used(served):
    "axe finds nothing on any page, wide and phone, light and dark; from disk, with nothing from elsewhere, in two seconds"
    names = sorted(f.stem for f in SITE.glob("*.html") if f.stem != "404")
    found = browse("look", SITE.as_uri(), *names)
    assert len(found) == 4*len(names) > 200
    bad = {k: [(f["name"], f["width"], f["colorScheme"], f[k]) for f in found if f[k]] for k in ("axe", "raw", "elsewhere", "python", "errors")}
    bad["over"] = [(f["name"], f["width"], f["over"]) for f in found if f["over"] > 0]
    bad["slow"] = [(f["name"], f["ms"]) for f in found if f["ms"] > 2000]
    print(f"slowest page from disk: {max(f['ms'] for f in found):.0f} ms")
    assert not any(bad.values()), json.dumps({k: v for k, v in bad.items() if v}, indent=1)[:8000]


def test_cells_run(served):
    "First result, an edit, an error, a stop, a reload, another page"
    r = browse("run", served, "blocks", "scheduler")
    same = lambda a, b: a.split() == b.split()
    assert r["before"] == 0, "Python was asked for before the first click"
    assert same(r["first"], r["stored"]) and r["hidden"]
    assert r["edited"] == "42"
    assert r["error"].splitlines()[-1] == "ZeroDivisionError: division by zero" and "<cell>" in r["error"]
    assert r["stopped"].startswith("Stopped.")
    assert same(r["again"], r["stored"]) and same(r["reloaded"], r["stored"])
    assert r["other"] and not r["elsewhere"] and not r["errors"]


def test_the_figure_lives(served):
    r = browse("live", served)
    assert r["before"] != r["fresh"] != r["stepped"]
    assert {"budget", "block size", "pool"} <= {label.split("\n")[0].strip(" 0123456789") for label in r["labels"]}
    assert not r["elsewhere"]


def test_a_browser_without_python(served):
    r = browse("without", served, "blocks")
    assert r["said"].startswith("Python could not start in this browser") and "stored" in r["said"]
    assert r["stays"], "the stored output is gone"


def test_keyboard(served):
    stops = (r := browse("keyboard", served, "blocks"))["stops"]
    assert stops[0]["text"] == "Skip to the text"
    assert stops[-1]["text"] == "Run here" and r["said"]
    assert not [s for s in stops if not (s["seen"] and s["shown"])]


@pytest.mark.parametrize("disk", [False, True])
def test_a_page_can_be_taken_away(served, disk):
    files = browse("take", SITE.as_uri() if disk else served, "blocks")
    assert files == {f.name: f.read_text(encoding="utf-8") for f in (ROOT/"nbs"/"12_blocks.ipynb", ROOT/"pagedlm"/"blocks.py")}
