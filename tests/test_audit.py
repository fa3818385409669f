"""What the site's build complains about: every fault is found, and a page without any is left alone"""
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT/"tools"))
from audit import faults

REPO = "https://example.org/blob/main/"
PAGE = ('<html lang="en"><head><title>t</title></head><body><a href="#text">to the text</a><main id="text"><h1>one</h1>{}'
        '</main></body></html>')
GOOD = (f'<h2 id="a b">two</h2><h3>three</h3><h2>two</h2><a href="#a%20b">x</a><a href="other.html#there">x</a>'
        f'<a href="https://example.com/gone">x</a><a href="{REPO}README.md#L1">x</a><img src="x.png" alt="">'
        '<svg role="img" aria-label="a"><title>a</title><g id="g"/></svg><svg role="img" aria-label="b"><g id="g"/></svg>'
        '<table><tr><th>h</th></tr><tr><td>1</td></tr></table><nav aria-label="n"><a href="#text"><img src="x" alt="x"></a></nav>'
        '<button aria-label="b"></button><a aria-hidden="true" tabindex="-1" data-bs-toggle="x"></a><input aria-label="i">')


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
    ('<svg role="img" aria-label="a"><a href="gone.html">x</a></svg>', "page that is not there"),
    (f'<a href="{REPO}gone.py">x</a>', "file that the repository lacks"),
    ('<h3>three</h3>', "from a heading of level 1 to one of level 3"),
    ('<h1>again</h1>', "2 headings of the first level"),
    ('<img src="x.png">', "without alt text"),
    ('<svg role="img"><text>words</text></svg>', "figure without a name"),
    ('<table><tr><td>1</td></tr></table>', "table without headers"),
    ('<p id="i"></p><p id="i"></p>', "two parts with the id 'i'"),
    ('<a href="#text"><img src="x.png" alt=""></a>', "without a name: <a"),
    ('<button class="c"> </button>', "without a name: <button"),
    ('<input type="search">', "without a name: <input"),
    ('<nav><a href="#text">x</a></nav>', "without a name: <nav"),
    ('<i role="img"></i>', "without a name: <i"),
    ('<a role="button" onclick="f()">x</a>', "that no key reaches"),
    ('<p tabindex="1">x</p>', "that no key reaches"),
    ('</main><main>', "no main part")])
def test_every_fault(tmp_path, part, message):
    assert [message in m for m in found(tmp_path, PAGE.format(part))] == [True]


def test_a_link_to_the_text_comes_first(tmp_path):
    page = PAGE.format("").replace('<a href="#text">', '<a href="other.html">')
    assert "no link to it before all others" in found(tmp_path, page)[0]


@pytest.mark.parametrize("css, message", [
    (":root { --plm-code: #767676; } :root[data-scheme=alternate] { --plm-code: #8f8f8f; }", None),
    (":root { --plm-code: #777; }", "--plm-code, #777 on #fff, has a contrast of 4.48, not 4.5"),
    (":root[data-scheme=alternate] { --bs-link-color: #777; }", "#777 on #222, has a contrast of 3.55"),
    (":root { --plm-out: #c26a05; }", None)])
def test_pale_colours(tmp_path, css, message):
    themes = tmp_path/"site_libs"/"themes"
    themes.mkdir(parents=True)
    for name, paper in (("cosmo", "#fff"), ("darkly", "#222")):
        (themes/f"{name}.min.css").write_text(f":root{{--bs-body-bg:{paper}}}")
    (tmp_path/"styles.css").write_text(css)
    assert [message in m for m in found(tmp_path, PAGE.format(""))] == [True]*bool(message)


def test_language_and_title(tmp_path):
    assert "no language" in found(tmp_path, "<html><body><h1>one</h1></body></html>")[0]
