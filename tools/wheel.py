"""Build sdist and wheel into dist/, install the wheel alone, and use it away from the repository.

python tools/wheel.py
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALONE = """
import sys, time
start = time.perf_counter()
import pagedlm
seconds = time.perf_counter() - start
heavy = sorted({"torch", "transformers", "numpy", "tokenizers"} & set(sys.modules))
assert not heavy, f"import pagedlm imports {heavy}"
assert seconds < .5, f"import pagedlm took {seconds:.2f} s"
assert pagedlm.SamplingParams(temperature=0).max_tokens == 16
print(f"import pagedlm {pagedlm.__version__}: {seconds*1000:.0f} ms, without torch, from {pagedlm.__file__}")
"""


def call(*cmd, **kw):
    "Run a command; stop if it fails"
    done = subprocess.run([str(c) for c in cmd], stdin=subprocess.DEVNULL, text=True, **kw)
    if done.returncode:
        sys.exit(f"{' '.join(str(c) for c in cmd)}\nfailed{': ' + done.stdout if done.stdout else ''}")
    return done.stdout


def build()->Path:
    "The sdist, and from it the wheel: what the sdist forgets, the wheel lacks"
    shutil.rmtree(ROOT/"dist", ignore_errors=True)
    call(sys.executable, "-m", "build", "--outdir", ROOT/"dist", ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return next((ROOT/"dist").glob("*.whl"))


def main():
    "Build, then try the wheel twice: with nothing else installed, and with this environment's packages"
    wheel = build()
    with tempfile.TemporaryDirectory() as folder:
        away = Path(folder)
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        call(sys.executable, "-m", "venv", away/"bare")
        pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
        call(away/"bare"/"bin"/"python", *pip, wheel)
        print(call(away/"bare"/"bin"/"python", "-c", ALONE, cwd=away, env=env, stdout=subprocess.PIPE).strip())
        shown = call(away/"bare"/"bin"/"pagedlm", "--version", cwd=away, env=env, stdout=subprocess.PIPE).strip()
        print(f"pagedlm --version: {shown}")

        call(sys.executable, *pip, "--target", away/"lib", wheel)
        env["PYTHONPATH"] = str(away/"lib")
        where = call(sys.executable, "-c", "import pagedlm.llm as m; print(m.__file__)", cwd=away, env=env,
                     stdout=subprocess.PIPE).strip()
        if not where.startswith(str(away/"lib")):
            sys.exit(f"meant to try the wheel, but got {where}")
        cmd = (sys.executable, "-m", "pagedlm.cli", "generate", "The capital of France is", "--max-tokens", "4",
               "--temperature", "0")
        print("pagedlm generate, from the wheel:\n" + call(*cmd, cwd=away, env=env, stdout=subprocess.PIPE).rstrip())
    print(f"{wheel.relative_to(ROOT)} works without the repository")


if __name__ == "__main__":
    main()
