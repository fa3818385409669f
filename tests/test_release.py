"""What a release promises without making one: versions that agree, the same bytes from the same files; and what pages offer"""
import shutil
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT/"tools"))
from pages import lead_on, offer, tell
from release import disagreements
from package import settled

TOLD = "settings.ini", "CITATION.cff", "CHANGELOG.md", "pagedlm/__init__.py"


def test_versions_agree():
    assert list(disagreements(ROOT)) == []


@pytest.mark.parametrize("name", TOLD)
def test_a_version_that_differs_is_named(tmp_path, name):
    (tmp_path/"pagedlm").mkdir()
    for file in TOLD:
        shutil.copy(ROOT/file, tmp_path/file)
    text = (tmp_path/name).read_text(encoding="utf-8")
    (tmp_path/name).write_text(text.replace("0.1.0", "0.1.1"), encoding="utf-8")
    said = " ".join(disagreements(tmp_path))
    assert Path(name).name in said and "0.1.0" in said


def test_an_sdist_has_the_same_bytes_whoever_made_it(tmp_path):
    def made(name, order, **about):
        with tarfile.open(tmp_path/name, "w:gz") as tar:
            for file in order:
                info = tarfile.TarInfo(f"p-1/{file}")
                info.size = len(file)
                for key, value in about.items():
                    setattr(info, key, value)
                tar.addfile(info, BytesIO(file.encode()))
        settled(tmp_path/name, 10**9)
        return (tmp_path/name).read_bytes()
    one = made("one.tar.gz", "ab", mtime=5, uid=1, uname="you", mode=0o600)
    assert one == made("two.tar.gz", "ba", mtime=7, uid=2, gname="us", mode=0o664)
    assert one != made("three.tar.gz", "ac")
    with tarfile.open(tmp_path/"one.tar.gz") as tar:
        assert [(m.name, m.mtime, m.mode, tar.extractfile(m).read()) for m in tar] == [
            ("p-1/a", 10**9, 0o644, b"a"), ("p-1/b", 10**9, 0o644, b"b")]


@pytest.fixture
def site(tmp_path):
    for name in "abcd":
        (tmp_path/f"{name}.html").write_text('<main><header id="title-block-header"></header><span data-told="n">?</span></main>')
    return tmp_path


def test_a_page_leads_on_along_every_way(site):
    stops = [(name, name.upper()) for name in "abcd"]
    lead_on(site, dict(Short=("i.html#short", [stops[2], stops[0]]), All=("i.html", stops)), rest="All")
    page = {name: (site/f"{name}.html").read_text() for name in "abcd"}
    assert 'rel="prev" href="c.html">← C<' in page["a"] and "All" not in page["a"]
    assert 'rel="next" href="a.html">A →<' in page["c"]
    assert 'rel="prev" href="a.html"' in page["b"] and 'rel="next" href="c.html"' in page["b"]
    assert 'rel="next"' not in page["d"] and 'href="i.html">All<' in page["d"]


def test_a_page_can_be_taken_away(site):
    for name in ("1_a.ipynb", "a.py"):
        (site/name).write_text(name)
    offer(site, dict(a=[site/"1_a.ipynb", site/"a.py"]))
    assert [f.read_text() for f in sorted((site/"downloads").iterdir())] == ["1_a.ipynb", "a.py"]
    assert 'href="downloads/1_a.ipynb" download' in (site/"a.html").read_text()


def test_a_page_is_told_what_only_the_site_knows(site):
    tell(site, dict(n="7 MB"))
    assert '<span data-told="n">7 MB</span>' in (site/"a.html").read_text()
