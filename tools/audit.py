"""What a reader would stumble over in the finished pages: dead links, what a screen reader cannot read, what a keyboard
cannot reach, colours too close to their paper.

Looks at files alone: no browser, no network. `tools/docs.py site` stops when there is anything to say. A browser looks
at the same pages in tests/long/test_pages.py.
"""
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
FIELDS = ("input", "select", "textarea")
CONTRAST, LINE = 4.5, 3 # of text with its paper, and of a line: WCAG 2, level AA


class Page(HTMLParser):
    "The parts of a page that the checks below look at"
    def __init__(self, text:str):
        super().__init__()
        self.lang, self.title, self.ids, self.links, self.headings = "", "", [], [], []
        self.images, self.figures, self.tables = [], [], [] # without words; without a name; without a header
        self.svg, self.table, self.words = None, None, ""
        self.open, self.mute, self.unreached, self.mains = [], [], [], 0 # links and buttons; those without a name
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
        self.mains += tag == "main"
        if attrs.get("aria-hidden") != "true":
            self.control(tag, attrs)

    def control(self, tag, attrs):
        "Note what needs a name, and what acts but cannot be reached"
        name = attrs.get("aria-label") or attrs.get("aria-labelledby") or attrs.get("title") or ""
        shown = " ".join(f'{k}="{v}"' for k, v in attrs.items())[:80]
        acts = {"onclick", "data-bs-toggle"} & attrs.keys() or attrs.get("role") == "button"
        if tag == "a" and "href" not in attrs and acts or int(attrs.get("tabindex") or 0) > 0:
            self.unreached.append(shown)
        if tag in ("a", "button"):
            self.open.append([tag, name, shown])
        elif self.open:
            self.open[-1][1] += attrs.get("alt") or name
        if not name and (tag == "nav" or tag in FIELDS or tag != "svg" and attrs.get("role") == "img"):
            self.mute.append(f"<{tag} {shown}>")

    def handle_data(self, data):
        self.words += data
        for part in self.open:
            part[1] += data

    def handle_endtag(self, tag):
        if self.open and self.open[-1][0] == tag:
            _, name, shown = self.open.pop()
            self.mute += [] if name.strip() else [f"<{tag} {shown}>"]
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
    yield from (f"has a part without a name: {part}" for part in page.mute)
    yield from (f"has a part that no key reaches: {part}" for part in page.unreached)
    if page.mains != 1 or not page.links or page.links[0][1:] not in page.ids:
        yield "has no main part, or no link to it before all others"
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


def luminance(
    colour:str, # `#1b62b5`
)->float:
    "As WCAG 2 defines it"
    digits = colour.strip("#")
    digits = digits if len(digits) == 6 else "".join(2*d for d in digits)
    parts = [int(digits[i:i + 2], 16)/255 for i in (0, 2, 4)]
    linear = [x/12.92 if x <= .03928 else ((x + .055)/1.055)**2.4 for x in parts]
    return .2126*linear[0] + .7152*linear[1] + .0722*linear[2]


def contrast(a, b)->float:
    "Of two colours, 1 to 21"
    dark, light = sorted(map(luminance, (a, b)))
    return (light + .05)/(dark + .05)


def pale(
    site:Path, # the finished pages
):
    "Colours of text in our own stylesheet that are too close to the paper of the theme they are for"
    papers = [re.search(r"--bs-body-bg: *(#\w+)", (site/"site_libs"/"themes"/f"{theme}.min.css").read_text())[1]
              for theme in ("cosmo", "darkly")]
    for block in re.finditer(r"(:root[^{]*)\{([^}]*)\}", (site/"styles.css").read_text(encoding="utf-8")):
        paper = papers[block[1].startswith(":root[data-scheme=alternate]")]
        for name, colour in re.findall(r"(--(?:plm|bs-link)[\w-]*): *(#[0-9a-f]{3,6});", block[2]):
            least = LINE if name == "--plm-out" else CONTRAST
            if contrast(colour, paper) < least:
                yield f"styles.css: {name}, {colour} on {paper}, has a contrast of {contrast(colour, paper):.2f}, not {least}"


def faults(
    site:Path, # the finished pages
    repo:str,  # beginning of addresses of the repository's files
    root:Path, # where those are here
)->list:       # messages
    "Everything that is wrong, page by page"
    paths = [f.resolve() for f in sorted(site.rglob("*.html"))]
    pages = {f: Page(f.read_text(encoding="utf-8")) for f in paths}
    found = list(pale(site)) if (site/"site_libs"/"themes").exists() else [] # Quarto has no such folder
    return found + [f"{f.name} {message}" for f, page in pages.items()
            for check in (unreadable(page), dead_links(page, f, pages, repo, root)) for message in check]
