"""Prepare a release, and upload nothing: sdist and wheel of the last commit in dist/, tried in empty environments.

python tools/release.py
"""
import os
import re
import shutil
import sys
import tarfile
import tempfile
from configparser import ConfigParser
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from subprocess import check_output
from zipfile import ZipFile

import yaml
from package import ROOT, build, call

TO_DO = """
Left for a person, after `make test` and `make long` have passed on this commit:
  1. In nbs/changelog.ipynb, write the day in place of "unreleased"; `make readme`, commit, `make release` again.
  2. git tag v{version} && git push origin v{version}
  3. Try it: python -m twine upload --repository testpypi dist/*
  4. python -m twine upload dist/*
  5. A release on {url}/releases with the version's part of CHANGELOG.md, and the site (`make docs`) to its host.
"""


def disagreements(
    tree:Path, # the repository, as committed
):
    "Places that tell another version than settings.ini"
    ini = ConfigParser(delimiters=["="])
    ini.read(tree/"settings.ini", encoding="utf-8")
    version = ini["DEFAULT"]["version"]
    cite = yaml.safe_load((tree/"CITATION.cff").read_text(encoding="utf-8"))
    init = (tree/ini["DEFAULT"]["lib_name"]/"__init__.py").read_text(encoding="utf-8")
    told = {"CITATION.cff": str(cite["version"]),
            "__init__.py": re.search(r'__version__ = "(.*)"', init)[1]}
    yield from (f"{name} says {other}, settings.ini says {version}" for name, other in told.items() if other != version)
    if not re.search(rf"^## {re.escape(version)} - ", (tree/"CHANGELOG.md").read_text(encoding="utf-8"), re.M):
        yield f"CHANGELOG.md has no entry `## {version} - …`"


def commit_into(
    folder:Path, # made here
)->Path:         # the same
    "The files of the last commit: nothing that lies about in the working tree"
    archive = check_output(["git", "archive", "HEAD"], cwd=ROOT)
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def relative_links(
    wheel:Path,
)->list:
    "Links of the description that lead nowhere on a package index"
    with ZipFile(wheel) as z:
        text = z.read(next(n for n in z.namelist() if n.endswith("/METADATA"))).decode()
    return re.findall(r'(?:\]\(|src="|srcset=")(?!\w+:|#)([^)"\s]+)', text.split("\n\n", 1)[1])


def try_out(
    file:Path, # sdist or wheel
    away:Path, # an empty folder
):
    "In an environment of its own, away from the repository, with everything the package asks for, the demo must pass"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    python = away/"env"/"bin"/"python"
    call(sys.executable, "-m", "venv", away/"env", env=env)
    call(python, "-m", "pip", "install", "--quiet", "-c", ROOT/"constraints.txt", file, cwd=away, env=env)
    call(python, "-m", "pip", "check", cwd=away, env=env)
    said = call(away/"env"/"bin"/"pagedlm", "demo", cwd=away, env=env)
    print(f"\n{file.name} installs in an empty environment, and its demo says\n\n{said}", flush=True)


def main():
    "Check, build twice, compare, try"
    os.umask(0o022)
    epoch = int(check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT))
    changed = check_output(["git", "status", "--porcelain"], cwd=ROOT, text=True).splitlines()
    if changed:
        print(f"{len(changed)} files differ from the last commit. A release is the commit: they are not in it.")
    with tempfile.TemporaryDirectory() as folder:
        one, two = (commit_into(Path(folder)/name) for name in ("one", "two"))
        bad = list(disagreements(one))
        if bad:
            sys.exit("\n".join(bad))
        files, again = build(one, ROOT/"dist", epoch), build(two, Path(folder)/"dist", epoch)
        for a, b in zip(files, again):
            if a.read_bytes() != b.read_bytes():
                sys.exit(f"{a.name} is not the same when it is built twice")
        bad = relative_links(files[1])
        if bad:
            sys.exit(f"README.md has links that lead nowhere on a package index: {', '.join(bad)}")
        for file in files:
            (Path(folder)/file.suffix).mkdir()
            try_out(file, Path(folder)/file.suffix)
            shutil.rmtree(Path(folder)/file.suffix)
    print("\nBuilt twice, the same bytes:")
    for file in files:
        print(f"  {sha256(file.read_bytes()).hexdigest()}  dist/{file.name}")
    version = files[1].name.split("-")[1]
    url = re.search(r"^repository-code: (.*)$", (ROOT/"CITATION.cff").read_text(encoding="utf-8"), re.M)[1]
    print(TO_DO.format(version=version, url=url))


if __name__ == "__main__":
    main()
