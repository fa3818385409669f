"""What the finished pages get that the site generator does not give: files to take away, ways to go on, HTML that screen
readers and keyboards can use, nothing from other hosts. `tools/docs.py site` calls it; nothing here reads notebooks.
"""
import os
import re
import shutil
from html import escape
from pathlib import Path

from browser import npm_package

KATEX, MERMAID = "0.16.11", "11.4.1" # the versions that smalldocs 0.5 links to


def change(
    path:Path, # a page
    *edits,    # functions from text to text
):
    "Rewrite a page"
    text = path.read_text(encoding="utf-8")
    for edit in edits:
        text = edit(text)
    path.write_text(text, encoding="utf-8")


# ---- what a page offers

def after_title(
    text:str, # a page
    more:str, # HTML
)->str:
    "Put something below title and promise"
    head, found, rest = text.partition('id="title-block-header"')
    return head + found + rest.replace("</header>", "</header>" + more, 1)


def offer(
    site:Path,  # the finished pages
    files:dict, # page name -> its notebook, and its module where there is one
):
    "Let every page be taken away: its notebook with all outputs, and what it exports"
    folder = site/"downloads"
    folder.mkdir()
    for name, paths in files.items():
        links = []
        for path in paths:
            shutil.copy(path, folder/path.name)
            kind = "notebook" if path.suffix == ".ipynb" else "module"
            links.append(f'{kind} <a href="downloads/{path.name}" download>{path.name}</a>')
        line = f'<p class="page-files">To take away: {", ".join(links)}</p>'
        change(site/f"{name}.html", lambda text: after_title(text, line))


def row(
    way:str,      # its name
    start:str,    # where it is described
    before:tuple, # page name and title, or nothing
    after:tuple,  # the same
)->str:           # HTML
    "Previous and next along one way to read"
    def link(end, rel, text):
        return f'<a rel="{rel}" href="{end[0]}.html">{text.format(escape(end[1]))}</a>' if end else "<span></span>"
    return f'<li>{link(before, "prev", "← {}")}<a class="way" href="{start}">{escape(way)}</a>{link(after, "next", "{} →")}</li>'


def lead_on(
    site:Path, # the finished pages
    ways:dict, # name of a way to read -> (where it is described, [(page name, title), …])
    rest:str,  # the way for pages that no other leads over
):
    "At the end of each page, the one before and the one after it, along every way that leads over it"
    rows = {}
    for way, (start, stops) in ways.items():
        for before, (name, _), after in zip([None, *stops], stops, [*stops[1:], None]):
            rows.setdefault(name, {})[way] = row(way, start, before, after)
    for name, found in rows.items():
        shown = [r for way, r in found.items() if way != rest] or found.values()
        nav = f'<nav class="ways" aria-label="Previous and next"><ul>{"".join(shown)}</ul></nav></main>'
        change(site/f"{name}.html", lambda text: text.replace("</main>", nav, 1))


def tell(
    site:Path,  # the finished pages
    facts:dict, # name -> words
):
    "Fill in what only a finished site can tell of itself: `<span data-told=\"name\">…</span>`"
    blank = re.compile(r'(<span data-told="(\w+)">)[^<]*')
    for path in site.rglob("*.html"):
        if "data-told=" in path.read_text(encoding="utf-8"):
            change(path, lambda text: blank.sub(lambda m: m[1] + facts[m[2]], text))


def megabytes(
    folder:Path,
    pattern="*", # which files
)->str:
    "How much the files of a folder take"
    return f"{sum(f.stat().st_size for f in folder.rglob(pattern) if f.is_file())/1e6:.1f} MB"


# ---- HTML that everybody can use

TOGGLE = r'<a class="sidebar-item-{}" data-bs-toggle="collapse" data-bs-target="(#[\w-]+)" role="navigation"'
REPAIRS = [(re.compile(old), new) for old, new in (
    (r'<svg alt="[^"]*"', "<svg"),                              # its name is in `aria-label`
    (r' role="img"></i>', ' aria-hidden="true"></i>'),          # icons beside words
    (r'<nav class="navbar ', '<nav aria-label="Site" class="navbar '),
    (r'<nav class="quarto-secondary-nav"', '<nav aria-label="Where you are" class="quarto-secondary-nav"'),
    (r'<nav id="quarto-sidebar"', '<nav aria-label="All pages" id="quarto-sidebar"'),
    (r'<nav id="TOC"', '<nav aria-labelledby="toc-title" id="TOC"'),
    (r'<div id="quarto-margin-sidebar"', '<div role="complementary" aria-label="Beside the text" id="quarto-margin-sidebar"'),
    # a section of the sidebar opens at the keyboard too; its arrow is for pointers
    (TOGGLE.format("text sidebar-link text-start"),
     r'<a class="sidebar-item-text sidebar-link text-start" data-bs-toggle="collapse" href="\1" role="button"'),
    (TOGGLE.format("toggle text-start") + r' aria-expanded="true" aria-label="Toggle section"',
     r'<a class="sidebar-item-toggle text-start" data-bs-toggle="collapse" data-bs-target="\1" aria-hidden="true" tabindex="-1"'),
    (r'role="button" id="quarto-back-to-top"', 'href="#" id="quarto-back-to-top"'),
    (r'(<a class="quarto-color-scheme-toggle nav-link" href="") title="Toggle dark mode"',
     r'\1 role="button" title="Light or dark" aria-label="Light or dark"'),
    (r"<th(\s[^>]*)?></th>", r"<td\1></td>"),                   # the corner of a table
)]


TABLE = re.compile(r'<table class="caption-top table">(?:(?!</table>).)*</table>', re.S)


def marked(
    found:re.Match, # of `TABLE`
)->str:
    "A table with something to say in the last of many columns gets a class, so that this column is not the one to shrink"
    rows = (re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in found[0].split("</tr>"))
    last = (re.sub("<[^>]*>|&[^;]*;", "", cells[-1]) for cells in rows if len(cells) > 3)
    return found[0].replace('top table"', 'top table words"', 1) if any(len(x) > 30 for x in last) else found[0]


def tidy(
    site:Path, # the finished pages
):
    "What smalldocs writes and a reader, a screen reader or a keyboard cannot use"
    def repaired(text):
        for old, new in REPAIRS:
            text = old.sub(new, text)
        return TABLE.sub(marked, text)
    for path in site.rglob("*.html"):
        change(path, repaired)


# ---- nothing from other hosts

def vendor(
    cache:Path, # folder for packages
)->bool:        # whether they are there
    "Get KaTeX and Mermaid with npm, once"
    for name, version in (("katex", KATEX), ("mermaid", MERMAID)):
        if not shutil.which("npm") and not (cache/f"{name}-{version}").exists():
            print("No npm here, so pages with formulas or diagrams load KaTeX and Mermaid from a public CDN.")
            return False
        npm_package(name, version, cache)
    return True


MERMAID_MODULE = re.compile(
    r"""<script type="module">\s*import mermaid from ['"]https://cdn[^'"]+['"];(.*?)</script>""", re.S)


def localise(
    site:Path,  # the finished pages
    cache:Path, # where `vendor` put the packages
):
    "Make the pages load nothing from other hosts: KaTeX and Mermaid are copied"
    libs, katex = site/"site_libs", cache/f"katex-{KATEX}"/"dist"
    for name in ("katex.min.css", "katex.min.js", "contrib/auto-render.min.js"):
        (libs/"katex"/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(katex/name, libs/"katex"/name)
    shutil.copytree(katex/"fonts", libs/"katex"/"fonts", dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("*.ttf", "*.woff"))
    shutil.copy(cache/f"mermaid-{MERMAID}"/"dist"/"mermaid.min.js", libs/"mermaid.min.js")
    for path in site.rglob("*.html"):
        up = os.path.relpath(libs, path.parent)
        # modules do not load from file://, so it is the plain script, and what followed the import waits
        later = rf"""<script src="{up}/mermaid.min.js" defer></script>
            <script>document.addEventListener("DOMContentLoaded",()=>{{\1}})</script>"""
        change(path, lambda text: text.replace(f"https://cdn.jsdelivr.net/npm/katex@{KATEX}/dist", f"{up}/katex"),
               lambda text: MERMAID_MODULE.sub(later, text),
               # the class comes after the page's first paint, the attribute before it
               lambda text: text.replace("document.documentElement.classList.contains('quarto-dark')",
                                         "document.documentElement.dataset.scheme==='alternate'"))


def drop_web_fonts(
    site:Path, # the finished pages
):
    "The themes import fonts from another host; the system's own serve as well"
    for path in (site/"site_libs"/"themes").rglob("*.css"):
        change(path, lambda text: re.sub(r"@import\s*url\([\"']?https?:[^)]*\)\s*;", "", text))


HOST = r"(?:https?:)?//[^\"'\s)>]+"
LOADED_BY_HTML = re.compile(
    rf"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?{HOST}"
    rf"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|icon|preload|modulepreload))[^>]*\bhref=[\"']?{HOST}"
    rf"|\bfrom [\"']https?:{HOST}")
LOADED_BY_CSS = re.compile(rf"(?:@import|url)\s*\(?\s*[\"']?{HOST}")


def requests_elsewhere(
    site:Path, # the finished pages
)->list:       # messages
    "What a browser would fetch from another host while showing these pages"
    found = []
    for pattern, loads in (("*.html", LOADED_BY_HTML), ("*.css", LOADED_BY_CSS)):
        for path in sorted(site.rglob(pattern)):
            found += [f"{path.name}: {m[0][:120]}" for m in loads.finditer(path.read_text(encoding="utf-8"))]
    return found
