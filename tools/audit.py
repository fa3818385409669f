"""What a reader would stumble over in the finished pages: dead links, and what a screen reader cannot read.

Looks at files alone: no browser, no network. `tools/docs.py site` stops when there is anything to say.
"""
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")


class Page(HTMLParser):
    "The parts of a page that the checks below look at"
    def __init__(self, text:str):
        super().__init__()
        self.lang, self.title, self.ids, self.links, self.headings = "", "", [], [], []
        self.images, self.figures, self.tables = [], [], [] # without words; without a name; without a header
        self.open, self.svg, self.table, self.words = [], None, None, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if attrs.get("id") and self.svg is None else []
        if tag == "html":
            self.lang = attrs.get("lang") or ""
        elif tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        elif tag == "img" and "alt" not in attrs:
            self.images.append((attrs.get("src") or "")[:60])
        elif tag == "svg" and self.svg is None and attrs.get("aria-hidden") != "true":
            self.svg = bool(attrs.get("role") and attrs.get("aria-label"))
        elif tag == "th":
            self.table = True
        elif tag == "table":
            self.table = False
        elif tag in HEADINGS or tag == "title" and self.svg is None:
            self.words = ""

    def handle_data(self, data):
        self.words += data

    def handle_endtag(self, tag):
        if tag == "svg" and self.svg is not None:
            self.figures += [] if self.svg else ["a figure"]
            self.svg = None
        elif tag == "table":
            self.tables += [] if self.table else ["a table"]
        elif tag in HEADINGS:
            self.headings.append((int(tag[1]), " ".join(self.words.split())))
        elif tag == "title" and self.svg is None:
            self.title = self.words.strip()


def unreadable(page:Page):
    "What keeps somebody from finding their way through a page"
    if not page.lang or not page.title:
        yield "has no language or no title"
    first = [text for level, text in page.headings if level == 1]
    if len(first) != 1:
        yield f"has {len(first)} headings of the first level, not one: {first}"
    at = 1
    for level, text in page.headings:
        if level > at + 1:
            yield f"goes from a heading of level {at} to one of level {level}: {text!r}"
        at = level
    yield from (f"shows an image without alt text: {src}" for src in page.images)
    yield from ("shows a figure without a name: give Svg a title, or its cell a `#| fig-alt:`" for _ in page.figures)
    yield from ("has a table without headers" for _ in page.tables)
    twice = {i for i in page.ids if page.ids.count(i) > 1}
    yield from (f"has two parts with the id {i!r}" for i in sorted(twice))


def dead_links(
    page:Page, # where the links are
    path:Path, # its file
    pages:dict,# file -> page, all of the site
    repo:str,  # beginning of addresses of the repository's files
    root:Path, # where those are here
):
    "Links to pages, sections of pages and files of the repository that are not there"
    for href in dict.fromkeys(page.links):
        if href.startswith(repo):
            if not (root/urlsplit(href[len(repo):]).path).exists():
                yield f"links to a file that the repository lacks: {href}"
            continue
        url = urlsplit(href)
        if url.scheme or url.netloc or href == "#":
            continue
        target = (path.parent/unquote(url.path)).resolve() if url.path else path
        if target.is_dir():
            target /= "index.html"
        if not target.exists():
            yield f"links to a page that is not there: {href}"
        elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids:
            yield f"links to a section that is not there: {href}"


def faults(
    site:Path, # the finished pages
    repo:str,  # beginning of addresses of the repository's files
    root:Path, # where those are here
)->list:       # messages
    "Everything that is wrong, page by page"
    paths = [f.resolve() for f in sorted(site.rglob("*.html"))]
    pages = {f: Page(f.read_text(encoding="utf-8")) for f in paths}
    return [f"{f.name} {message}" for f, page in pages.items()
            for check in (unreadable(page), dead_links(page, f, pages, repo, root)) for message in check]
