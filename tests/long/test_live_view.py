"The live view in a real browser: two chats at once, text only as text, a server that goes and comes back, a phone"
import json
import shutil
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("openai")
websocket = pytest.importorskip("websocket")
ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT/"tests"))

from test_server import Around, Server, empty, tiny, wait_for

from pagedlm.server import listen

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")


class Slow(Around):
    "Steps at a pace that a reader can follow"
    def __call__(self, plan):
        time.sleep(.03)
        return self.run(plan)


def slow(**kw):
    llm = tiny(**kw)
    llm.engine.run = Slow(llm.engine.run)
    return llm


class Page:
    "A tab of the browser, driven through its debugging socket"
    def __init__(self, port, url, width=1200, height=900, dark=False):
        tab = json.load(urlopen(Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT"), timeout=20))
        self.socket, self.ids, self.seen = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=30, suppress_origin=True), count(1), []
        for domain in "Page", "Runtime", "Network", "Log":
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[dict(name="prefers-color-scheme", value="dark" if dark else "light")])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && document.getElementById('link').textContent === 'connected'")

    def call(self, method, **params):
        id = next(self.ids)
        self.socket.send(json.dumps(dict(id=id, method=method, params=params)))
        while True:
            m = json.loads(self.socket.recv())
            if m.get("id") == id:
                assert "error" not in m, m
                return m["result"]
            self.seen.append(m)

    def js(self, code):
        r = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in r, r
        return r["result"].get("value")

    def until(self, fact, seconds=20):
        wait_for(lambda: self.js(f"!!({fact})"), seconds)

    def say(self, text):
        self.js(f"document.getElementById('text').value = {json.dumps(text)}; document.getElementById('ask').requestSubmit()")

    def text(self, id):
        return self.js(f"document.getElementById('{id}').innerText")

    def requests(self):
        self.js("1")
        return [m["params"]["request"]["url"] for m in self.seen if m.get("method") == "Network.requestWillBeSent"]

    def complaints(self):
        self.js("1")
        return [m for m in self.seen if m.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    child = subprocess.Popen([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run", "--disable-renderer-backgrounding",
                              f"--user-data-dir={folder}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = folder/"DevToolsActivePort"
        wait_for(lambda: port.exists() and port.read_text().strip(), 60)
        yield int(port.read_text().split()[0])
    finally:
        child.terminate()
        child.wait(20)


def test_two_chats_at_once(browser):
    with Server(slow(), "tiny") as server:
        a, b = Page(browser, server.url), Page(browser, server.url, 390, 800, dark=True)
        tricky = "<b>bold</b><script>document.title = 'taken'</script>"
        a.say(tricky)
        b.say("the other one's secret")
        a.until("document.querySelector('#said .assistant').textContent.length > 3")
        b.until("document.querySelector('#said .assistant').textContent.length > 3")
        a.call("Page.bringToFront")  # what is not seen is not drawn
        a.until("document.getElementById('running').textContent === '2'")
        assert a.js("engine.mine.size") == 1 == b.js("engine.mine.size")
        assert a.js("[...engine.tables.values()].flat().length > 8 && engine.steps.length > 5")
        assert tricky in a.text("said") and a.js("document.querySelectorAll('#said b, #said script').length") == 0
        assert a.js("document.title") == "pagedlm" and "secret" not in a.js("document.documentElement.outerHTML")
        assert b.js("document.documentElement.scrollWidth") <= 390
        a.js("document.getElementById('stop').click()")
        a.until("document.querySelector('#said .assistant small')?.textContent === 'stopped'")
        b.until("document.querySelector('#said .assistant small')", 60)
        a.until("document.getElementById('running').textContent === '0' && engine.readers.size === 0")
        for page in (a, b):
            assert all(url.startswith(server.url) for url in page.requests()) and not page.complaints()
        empty(server)


def test_what_the_page_knows_is_what_is(browser):
    "Its copy of the state, kept up by events alone, is the engine's own"
    with Server(slow(num_gpu_blocks_override=60, max_num_seqs=3), "tiny") as server:
        pages = [Page(browser, server.url) for _ in range(3)]
        for i, page in enumerate(pages):
            page.say(f"page {i} asks something long enough for a few blocks")
        time.sleep(.8)
        late = Page(browser, server.url)  # a snapshot in the middle
        for page in pages:
            page.until("document.querySelector('#said .assistant small, #said .error')", 60)
        empty(server)
        manager = server.engine.llm.engine.scheduler.manager
        for page in (pages[0], late):
            page.until("engine.readers.size === 0")
            assert page.js("[...engine.named].sort((a, b) => a - b)") == sorted(manager.pool.named.values())
            assert page.js("engine.tables.size") == 0


def test_a_server_that_goes_and_comes_back(browser):
    with Server(slow(), "tiny") as server:
        page, port = Page(browser, server.url), int(server.url.rpartition(":")[2])
    page.until("document.getElementById('link').className === 'off'")
    page.say("is anybody there?")
    page.until("document.querySelector('#said .error')")
    with Server(slow(), "tiny", listen(port=port)) as server:
        page.until("document.getElementById('link').textContent === 'connected'", 30)
        page.say("and now?")
        page.until("document.querySelector('#said .assistant small')", 60)
        empty(server)


def test_a_key_is_asked_for(browser):
    with Server(slow(), "tiny", key="sesame") as server:
        tab = Page.__new__(Page)
        Page.until, until = lambda self, *a: None, Page.until
        try:
            tab.__init__(browser, server.url)
        finally:
            Page.until = until
        tab.until("!document.getElementById('key-form').hidden")
        tab.js("document.getElementById('key').value = 'sesame'; document.getElementById('key-form').requestSubmit()")
        tab.until("document.getElementById('link').textContent === 'connected' && document.getElementById('model').textContent === 'tiny'")
        tab.say("hello")
        tab.until("document.querySelector('#said .assistant small')", 60)
        empty(server)
