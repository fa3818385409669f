"""The child's side of tools/peers.py, shared by the script of every engine. Standard library only: it runs in
whatever environment the engine lives in.

The script loads its model once and tells what it is in a line of JSON. Then, for every line on its standard input,
it answers with a line: `run FILE` answers all requests of a workload, `warm FILE` gives the first one four tokens.
"""
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

BUDGET = 512                                       # most tokens of one step, for every engine that has such a knob
THREADS = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count())
KV_GB = 2                                          # for K and V, where an engine wants to be told


def serve(
    name,   # the engine's package, for its version
    load,   # (*arguments of the script) -> (facts, run); run(list of {"prompt", "n"}, name) -> ids of each answer
):
    "Load, then answer line by line until the standard input ends"
    pipe = os.fdopen(os.dup(1), "w", buffering=1)  # ours alone: what the engine prints goes to the log
    os.dup2(2, 1)
    start = time.perf_counter()
    facts, run = load(*sys.argv[1:])
    tell = dict(version=version(name), load_s=time.perf_counter() - start, **facts)
    while True:
        pipe.write(json.dumps(tell) + "\n")
        line = sys.stdin.readline()
        if not line.strip():
            return
        tell = answer(run, *line.split(maxsplit=1))


def answer(
    run,   # see `serve`
    what,  # run or warm
    path,  # of the workload
):
    "Do what a line asks for and time it"
    path = Path(path.strip())
    work = json.loads(path.read_text(encoding="utf-8"))
    if what == "warm":
        work = [dict(work[0], n=4)]
    start = time.perf_counter()
    ids = run(work, path.stem)
    told = dict(seconds=time.perf_counter() - start)
    return told | (ids if isinstance(ids, dict) else dict(ids=ids))


def torch_units():
    "Which vector units torch found here and uses: unit -> whether"
    import torch
    level = torch.backends.cpu.get_cpu_capability()
    if level == "DEFAULT" and os.uname().machine in ("aarch64", "arm64"):
        return dict(asimd=True)
    return dict(avx2=level in ("AVX2", "AVX512"), avx512f=level == "AVX512", sve=level.startswith("SVE"))
