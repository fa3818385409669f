"""Make the virtual environment that the Makefile's targets use, or say in words why that cannot be.

This file runs before anything is installed, on whatever `python3` is: standard library only, no new syntax.
"""
import os
import subprocess
import sys

try:
    from configparser import ConfigParser
except ImportError:
    sys.exit("pagedlm needs Python 3, but this is Python %s: run `make PYTHON=python3.11` or newer"
             % sys.version.split()[0])

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def min_python():
    "The oldest Python that settings.ini allows, as numbers"
    ini = ConfigParser(delimiters=["="])
    ini.read(os.path.join(ROOT, "settings.ini"))
    return tuple(int(part) for part in ini["DEFAULT"]["min_python"].split("."))


def check_python():
    "Stop, in words, on a Python that is too old or that cannot make environments"
    wanted = min_python()
    if sys.version_info[:2] < wanted:
        sys.exit("pagedlm needs Python %d.%d or newer, but %s is Python %d.%d.\n"
                 "Name a newer one: `make PYTHON=/path/to/python%d.%d demo`, for example."
                 % (wanted + (sys.executable,) + tuple(sys.version_info[:2]) + wanted))
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as e:
        sys.exit("%s has no module %r, which makes virtual environments.\n"
                 "Debian and Ubuntu keep it apart: `apt install python3-venv`." % (sys.executable, e.name))


def works(python):
    "Whether the environment's Python runs and has pip"
    try:
        return subprocess.call([python, "-c", "import pip"], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def main(folder):
    "Create `folder` unless it already holds an environment that works"
    python = os.path.join(folder, "bin", "python")
    if works(python):
        return
    check_python()
    if os.path.lexists(python):
        print("%s does not work any more: making it anew" % folder)
    if subprocess.call([sys.executable, "-m", "venv", "--clear", folder]):
        sys.exit("%s -m venv %s failed: see above" % (sys.executable, folder))


if __name__ == "__main__":
    main(sys.argv[1])
