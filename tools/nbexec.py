"""Run notebooks top to bottom, each in a kernel of its own, and store their outputs.

python tools/nbexec.py                               # all of them, two at a time
python tools/nbexec.py --fname nbs/00_core.ipynb     # one
python tools/nbexec.py --check                       # run only: nothing is written

Cells that `nbdev_test` skips (`eval: false`, flags in `tst_flags`, `nbdev_export()`) are skipped and keep the
outputs they have. A notebook with an error is left as it was, and the exit code is 1.
"""
import asyncio
import os
import re
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from uuid import uuid4

import nbformat
from execnb.nbio import dict2nb
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbdev.clean import nbdev_clean
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.process import extract_directives
from traitlets.config import Config

FAILURES = (CellExecutionError, CellTimeoutError, DeadKernelError)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SOCKETS = Config({"KernelManager": {"transport": "ipc"}}) # files, not ports: nobody else can listen


class Client(NotebookClient):
    "A client that skips the cells that `nbdev_test` skips"
    def __init__(self, *args, skip=(), **kw):
        super().__init__(*args, **kw)
        self.skip = set(skip)

    async def async_execute_cell(self, cell, cell_index, **kw):
        if cell.cell_type == "code" and skipped(cell, self.skip):
            return cell
        return await super().async_execute_cell(cell, cell_index, **kw)


def skipped(
    cell,  # a code cell
    flags, # names of directives that keep a cell from running
)->bool:
    "Whether a checked run leaves this cell out"
    if "nbdev_export(" in cell.source:
        return True
    copy = dict2nb({"cells": [dict(cell)], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).cells[0]
    found = extract_directives(copy, remove=False, lang="python")
    return found.get("eval:", [""])[0].lower() == "false" or bool(flags & found.keys())


def quiet_kernels(
    n:int,     # kernels at work at the same time
    folder:str # scratch folder for IPython's and Jupyter's own files
):
    "Settings that kernels inherit: a share of the cores, the same figures each time, nobody's startup files"
    threads = str(max(1, (os.cpu_count() or 1) // n))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(name, threads)
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0") # matplotlib writes the date into an SVG
    os.environ["IPYTHONDIR"] = os.environ["JUPYTER_RUNTIME_DIR"] = folder
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"


async def run(
    path:Path,   # a notebook
    skip:set,    # directives of cells that are not run
    timeout:int, # seconds for each cell
    store:bool,  # write the outputs back?
)->tuple:        # seconds, and the error or None
    "Run one notebook"
    nb = nbformat.read(path, as_version=4)
    client = Client(nb, skip=skip, timeout=timeout, kernel_name="python3", record_timing=False,
                    coalesce_streams=True, config=SOCKETS, resources={"metadata": {"path": str(path.parent)}})
    folder = Path(os.environ["JUPYTER_RUNTIME_DIR"])
    client.create_kernel_manager().connection_file = str(folder/f"{uuid4()}.json")
    start = time.perf_counter()
    try:
        await client.async_execute()
    except FAILURES as e:
        return time.perf_counter() - start, e
    if store:
        nbformat.write(nb, path)
        nbdev_clean.__wrapped__(str(path))
    return time.perf_counter() - start, None


async def run_all(
    paths:list, # notebooks
    n:int,      # how many at a time
    **kw,       # for `run`
)->list:        # the paths that failed
    "Run notebooks, `n` at a time, telling the time of each as it ends"
    gate, failed = asyncio.Semaphore(n), []
    async def one(path):
        async with gate:
            seconds, error = await run(path, **kw)
        print(f"  {path.name:<28} {seconds:6.1f} s{'   FAILED' if error else ''}", flush=True)
        if error:
            failed.append(path)
            print(f"\n{path}\n{COLOURS.sub('', str(error))}", file=sys.stderr, flush=True)
    await asyncio.gather(*map(one, paths))
    return failed


def main():
    "The command line"
    p = ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--fname", nargs="+", help="notebooks or folders; default: all")
    p.add_argument("--check", action="store_true", help="only run: write nothing")
    p.add_argument("--n", type=int, default=2, help="how many at a time (default 2)")
    p.add_argument("--flags", default="", help="run cells with these flags though tst_flags has them")
    p.add_argument("--timeout", type=int, default=300, help="seconds for each cell (default 300)")
    args = p.parse_args()
    cfg = get_config()
    paths = []
    for name in args.fname or [cfg.nbs_path]:
        path = Path(name)
        if not path.exists():
            p.error(f"there is no notebook {path}")
        paths += [path] if path.is_file() else nbglob(path, as_path=True).sorted()
    n = max(1, min(args.n, len(paths)))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        quiet_kernels(n, folder)
        failed = asyncio.run(run_all(paths, n, skip=set(cfg.tst_flags.split()) - set(args.flags.split()),
                                     timeout=args.timeout, store=not args.check))
    done = "ran" if args.check else "ran and stored"
    seconds = time.perf_counter() - start
    print(f"{done} {len(paths) - len(failed)} of {len(paths)} notebooks in {seconds:.0f} s, {n} at a time")
    if failed:
        sys.exit("failed: " + ", ".join(path.name for path in failed))


if __name__ == "__main__":
    main()
