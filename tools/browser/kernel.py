"What the worker runs: a cell and what it builds on, in a namespace of their own, its last value shown as Jupyter shows it"
import contextlib
import importlib
import io
import json
import sys
import traceback
import types

import page  # the worker's: send(mime, data)
from pyodide.code import eval_code_async

FORMS = {"image/svg+xml": "_repr_svg_", "text/html": "_repr_html_", "text/markdown": "_repr_markdown_"}
muted = False  # what a cell builds on shows nothing


def display(*values):
    "Show values: the first form that each of them has"
    for value in values:
        if muted:
            return
        ways = ((mime, getattr(value, way)()) for mime, way in FORMS.items() if hasattr(type(value), way))
        page.send(*next(((mime, data) for mime, data in ways if data is not None), ("text/plain", repr(value))))


def form(name, way):
    "IPython's class of that name: data, and how to show it"
    return type(name, (), {"__init__": lambda self, data: setattr(self, "data", data), way: lambda self: self.data})


def stand_in():
    "What notebooks import of IPython and of fastcore"
    shown = types.ModuleType("IPython.display")
    shown.display = display
    for name, way in zip(("SVG", "HTML", "Markdown"), FORMS.values()):
        setattr(shown, name, form(name, way))
    sys.modules["IPython"], sys.modules["IPython.display"] = types.ModuleType("IPython"), shown
    checks = types.ModuleType("fastcore.test")
    for check in (test_eq, test_close, test_fail, expect_fail):
        setattr(checks, check.__name__, check)
    sys.modules["fastcore"], sys.modules["fastcore.test"] = types.ModuleType("fastcore"), checks


def test_eq(a, b):
    assert a == b, f"{a!r} is not {b!r}"


def test_close(a, b, eps=1e-5):
    assert abs(a - b) < eps, f"{a!r} is not close to {b!r}"


@contextlib.contextmanager
def expect_fail(kind=Exception, contains=""):
    try:
        yield
    except kind as e:
        assert contains in str(e), f"{contains!r} is not in {str(e)!r}"
    else:
        raise AssertionError("nothing was raised")


def test_fail(f, msg="", contains="", args=(), kwargs={}):
    with expect_fail(contains=contains):
        f(*args, **kwargs)


async def run(sources):
    "Run cells one after the other in a new namespace; only the last one shows anything. The error, or nothing"
    global muted
    space = {"__name__": "__main__", "display": display}
    try:
        for i, source in enumerate(sources):
            muted = i + 1 < len(sources)
            with contextlib.redirect_stdout(io.StringIO()) if muted else contextlib.nullcontext():
                value = await eval_code_async(source, globals=space, filename="<cell>")
        if value is not None:
            display(value)
    except BaseException as e:  # KeyboardInterrupt and SystemExit too: there is no one else to tell
        own = e.__traceback__
        while own and own.tb_frame.f_code.co_filename != "<cell>":
            own = own.tb_next
        return "".join(traceback.format_exception(type(e), e, own, chain=False))
    finally:
        sys.stdout.flush()


figures = {}


def live(figure, where, method, arguments):
    "Call a method of a live figure's object, made on first use: JSON in; JSON or a drawing out"
    if figure not in figures:
        module, name = where.split(":")
        figures[figure] = getattr(importlib.import_module(module), name)()
    if method == "controls":
        return json.dumps(figures[figure].controls)
    return getattr(figures[figure], method)(**json.loads(arguments))


stand_in()
