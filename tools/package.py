"""Build sdist and wheel into dist/, install the wheel alone, and use it away from the repository.

python tools/package.py
"""
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from gzip import GzipFile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parent.parent
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
ALONE = """
import sys, time
start = time.perf_counter()
import pagedlm
seconds = time.perf_counter() - start
heavy = sorted({"torch", "transformers", "numpy", "tokenizers"} & set(sys.modules))
assert not heavy, f"import pagedlm imports {heavy}"
assert seconds < .5, f"import pagedlm took {seconds:.2f} s"
assert pagedlm.SamplingParams(temperature=0).max_tokens == 16
print(f"import pagedlm {pagedlm.__version__}: {seconds*1000:.0f} ms, without torch")
"""


def call(
    *cmd, # the command
    **kw, # for `subprocess.run`
)->str:   # what it wrote
    "Run a command and return its output; stop with it if the command fails"
    cmd = [str(part) for part in cmd]
    done = subprocess.run(cmd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, **kw)
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {' '.join(cmd)}")
    return done.stdout.strip()


def settled(
    sdist:Path, # made by setuptools: with today's times, this user's name
    epoch:int,  # seconds
):
    "Write an sdist anew so that the same files give the same bytes"
    with tarfile.open(sdist) as tar:
        parts = sorted(((m, tar.extractfile(m)) for m in tar), key=lambda part: part[0].name)
        parts = [(m, f and f.read()) for m, f in parts]
    with open(sdist, "wb") as raw, GzipFile("", "wb", fileobj=raw, mtime=epoch) as packed, \
         tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for m, data in parts:
            m.mtime, m.uid, m.gid, m.uname, m.gname, m.pax_headers = epoch, 0, 0, "", "", {}
            m.mode = 0o755 if m.isdir() or m.mode & 0o100 else 0o644
            tar.addfile(m, data and BytesIO(data))


def build(
    source:Path, # a tree of the repository
    out:Path,    # folder for the two files, made anew
    epoch:int,   # the time that the files in them get, seconds
)->tuple:        # sdist, wheel
    "The sdist, and from it the wheel: what the sdist forgets, the wheel lacks. The same files give the same bytes"
    shutil.rmtree(out, ignore_errors=True)
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PIP_CONSTRAINT": str(ROOT/"constraints.txt")}
    call(sys.executable, "-m", "build", "--sdist", "--outdir", out, source, env=env)
    sdist = next(out.glob("*.tar.gz"))
    settled(sdist, epoch)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as tar:
            tar.extractall(folder, filter="data")
        call(sys.executable, "-m", "build", "--wheel", "--outdir", out, next(Path(folder).iterdir()), env=env)
    return sdist, next(out.glob("*.whl"))


def try_bare(
    wheel:Path, # the wheel
    away:Path,  # a folder away from the repository
    env:dict,   # environment variables
):
    "In an environment where nothing else is installed, the package must import and tell its version"
    call(sys.executable, "-m", "venv", away/"bare")
    call(away/"bare"/"bin"/"python", *PIP, wheel)
    print(call(away/"bare"/"bin"/"python", "-c", ALONE, cwd=away, env=env))
    print("pagedlm --version:", call(away/"bare"/"bin"/"pagedlm", "--version", cwd=away, env=env))


def try_whole(
    wheel:Path, # the wheel
    away:Path,  # a folder away from the repository
    env:dict,   # environment variables
):
    "With this environment's packages, but pagedlm from the wheel, it must answer"
    call(sys.executable, *PIP, "--target", away/"lib", wheel)
    env = {**env, "PYTHONPATH": str(away/"lib")}
    where = call(sys.executable, "-c", "import pagedlm; print(pagedlm.__file__)", cwd=away, env=env)
    if not where.startswith(str(away/"lib")):
        sys.exit(f"meant to try the wheel, but got {where}")
    command = (sys.executable, "-c", "from pagedlm.cli import main; main()")
    print(call(*command, "generate", "The capital of France is", "--max-tokens", "4", cwd=away, env=env))


def main():
    "Build, then try the wheel bare and whole"
    _, wheel = build(ROOT, ROOT/"dist", epoch=315532800) # 1980, the first time a zip file can tell
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as folder:
        try_bare(wheel, Path(folder), env)
        try_whole(wheel, Path(folder), env)
    print(f"{wheel.relative_to(ROOT)} works without the repository")


if __name__ == "__main__":
    main()
