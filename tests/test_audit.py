"""What the site's build complains about: every fault is found, and a page without any is left alone"""
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT/"tools"))
from audit import faults

REPO = "https://example.org/blob/main/"
PAGE = '<html lang="en"><head><title>t</title></head><body><h1>one</h1>{}</body></html>'
GOOD = (f'<h2 id="a b">two</h2><h3>three</h3><h2>two</h2><a href="#a%20b">x</a><a href="other.html#there">x</a>'
        f'<a href="https://example.com/gone">x</a><a href="{REPO}README.md#L1">x</a><img src="x.png" alt="">'
        '<svg role="img" aria-label="a"><title>a</title><g id="g"/></svg><svg role="img" aria-label="b"><g id="g"/></svg>'
        '<table><tr><th>h</th></tr><tr><td>1</td></tr></table>')


def found(tmp_path, page):
    (tmp_path/"page.html").write_text(page, encoding="utf-8")
    (tmp_path/"other.html").write_text(PAGE.format('<p id="there"></p>'), encoding="utf-8")
    return faults(tmp_path, REPO, ROOT)


def test_nothing_to_say(tmp_path):
    assert found(tmp_path, PAGE.format(GOOD)) == []


@pytest.mark.parametrize("part, message", [
    ('<a href="gone.html">x</a>', "page that is not there"),
    ('<a href="other.html#gone">x</a>', "section that is not there"),
    ('<a href="#gone">x</a>', "section that is not there"),
    ('<svg role="img" aria-label="a"><a href="gone.html"></a></svg>', "page that is not there"),
    (f'<a href="{REPO}gone.py">x</a>', "file that the repository lacks"),
    ('<h3>three</h3>', "from a heading of level 1 to one of level 3"),
    ('<h1>again</h1>', "2 headings of the first level"),
    ('<img src="x.png">', "without alt text"),
    ('<svg role="img"><text>words</text></svg>', "figure without a name"),
    ('<table><tr><td>1</td></tr></table>', "table without headers"),
    ('<p id="i"></p><p id="i"></p>', "two parts with the id 'i'")])
def test_every_fault(tmp_path, part, message):
    assert [message in m for m in found(tmp_path, PAGE.format(part))] == [True]


def test_language_and_title(tmp_path):
    assert "no language" in found(tmp_path, "<html><body><h1>one</h1></body></html>")[0]
