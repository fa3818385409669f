"""Everything that CI checks, one step after the other; a failing step does not keep the next from running.

python tools/test.py            # all of `STEPS`
python tools/test.py sync site  # some
"""
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

ROOT = Path(__file__).parent.parent
CORES = os.cpu_count() or 1
STEPS = dict( # name: (what it shows, command)
    sync=("modules, README.md and sidebar in step with the notebooks", ["tools/check.py"]),
    site=("site built, every link leads somewhere", ["tools/docs.py", "site"]),
    browser=("cells that run in the reader's browser show what is stored", ["tools/browser.py", "check"]),
    notebooks=("every notebook runs from top to bottom", ["tools/nbexec.py", "--check", "--n", "2"]),
    kernels=("Triton kernels compiled for GPUs that are not here", ["tools/aot_check.py"]),
    pytest=("tests/", ["-m", "pytest", "-q", "-n", str(min(4, CORES)), "--durations", "5"]),
    soak=("a server among faults of all kinds for a minute, beside the other steps", ["tests/soak.py", "60"]))
BESIDE = "soak" # it mostly waits


def start(
    name:str,    # of a step
    output=None, # a file; None: where ours goes
)->tuple:        # its process, when it began
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    if name in ("pytest", BESIDE):
        env.setdefault("OMP_NUM_THREADS", str(max(1, CORES // min(4, CORES)))) # the workers share the cores
    how = dict(cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    return subprocess.Popen([sys.executable, *STEPS[name][1]], **how), time.perf_counter()


def run(
    name:str, # of a step
)->tuple:     # passed?, seconds
    "Run one step; its output goes where ours goes"
    print(f"\n==== {name}: {STEPS[name][0]}", flush=True)
    process, begin = start(name)
    try:
        return process.wait() == 0, time.perf_counter() - begin
    except BaseException: # Ctrl-C went to it, too
        process.wait()
        raise


@contextmanager
def beside(names):
    "While the others run, one more; `finish` waits for it, and says what it said"
    if BESIDE not in names:
        yield lambda: {}
        return
    with TemporaryFile() as output:
        process, begin = start(BESIDE, output)
        def finish():
            print(f"\n==== {BESIDE}: {STEPS[BESIDE][0]}", flush=True)
            passed = process.wait() == 0
            output.seek(0)
            print(output.read().decode(errors="replace"), flush=True)
            return {BESIDE: (passed, time.perf_counter() - begin)}
        try:
            yield finish
        finally:
            process.kill()


def main(names):
    "Run the steps, then say in one table how they went"
    unknown = [n for n in names if n not in STEPS]
    if unknown:
        sys.exit(f"no such step: {', '.join(unknown)}; there are {', '.join(STEPS)}")
    names = names or list(STEPS)
    with beside(names) as finish:
        done = {name: run(name) for name in names if name != BESIDE}
        done |= finish()
    print()
    for name, (passed, seconds) in done.items():
        print(f"{'ok    ' if passed else 'FAILED'}  {name:<10} {seconds:5.0f} s  {STEPS[name][0]}")
    left_out = [name for name in STEPS if name not in done]
    if left_out:
        print("not asked for: " + ", ".join(left_out))
    sys.exit(not all(passed for passed, _ in done.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
