"""A server in a process of its own, and all kinds of clients and faults at once. Round after round: nothing may be
lost, nothing may crash, and when a signal comes in the middle of answers it must end in good order.

python tests/soak.py 60    # for so many seconds: what `make test` runs beside its other steps
"""
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryFile

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
PROMPTS = "Once upon a time", "A", "x"*100
LONG = dict(prompt="Tell me everything", max_tokens=220, ignore_eos=True)
BAD_CHATS = ("{{ raise_exception('not that') if m[0].content == 'raise' }}{{ 1 // 0 if m[0].content == 'divide' }}"
             "{{ m.nothing.of.this if m[0].content == 'attribute' }}").replace("m[0]", "messages[0]")
HUGE = dict(regex="(a{900}){900}")  # 200 MB for most of a second, then it is refused
BAD_FORMS = (dict(regex="("), dict(grammar="start: nobody"), dict(grammar="{"), dict(json=dict(type="nonsense")),
             dict(json={"$ref": "#/nowhere"}), dict(json_object=True, regex="a"), dict(choice=[]))


def serve(grace):
    "The child: a tiny model that cannot bear a `!`, at a pace of 2 ms a step"
    from test_server import TEMPLATE, Allergic, Limits, Server, tiny

    class Slow(Allergic):
        def __call__(self, plan):
            time.sleep(.002)
            return super().__call__(plan)
    llm = tiny(chat_template=TEMPLATE + BAD_CHATS)
    llm.engine.run = Slow(llm.engine.run, 0)
    server = Server(llm, "tiny", max_queue=8, limits=Limits(body_seconds=2), grace=float(grace))
    print(server.url, flush=True)
    server.run()


def right_answers():
    from test_server import SamplingParams, tiny
    params = SamplingParams(temperature=0, max_tokens=12)
    return {o.prompt: o.outputs[0].text for o in tiny().generate(list(PROMPTS), params, use_tqdm=False)}


class Clients:
    "All that may come to a server; each kind is a method, and says what is wrong with what it hears"
    OFTEN = dict(good=5, streams=3, leaves=3)

    def __init__(self, port, right, seed):
        self.address, self.right, self.rnd, self.done = ("127.0.0.1", port), right, random.Random(seed), Counter()
        self.kinds = [k for k in vars(Clients) if not k.startswith("_") and k[0].islower() for _ in range(self.OFTEN.get(k, 1))]

    def _send(self, body, path="/v1/completions", method="POST"):
        with closing(HTTPConnection(*self.address, timeout=60)) as http:
            data = json.dumps(body).encode() if isinstance(body, dict) else body
            http.request(method, path, data, {"Content-Type": "application/json"})
            r = http.getresponse()
            return r.status, r.read()

    def _refused(self, body, path="/v1/completions", status=400):
        got, text = self._send(body, path)
        assert got in (status, 429) and set(json.loads(text)["error"]) == {"message", "type", "param", "code"}, (got, text)

    def _raw(self, data, seconds=0):
        with socket.create_connection(self.address) as s, suppress(ConnectionError):
            s.sendall(data)
            time.sleep(seconds)

    def good(self):
        prompt = self.rnd.choice(PROMPTS)
        status, text = self._send(dict(prompt=prompt, temperature=0, max_tokens=12))
        assert status == 429 or json.loads(text)["choices"][0]["text"] == self.right[prompt], text

    def streams(self):
        prompt = self.rnd.choice(PROMPTS)
        status, text = self._send(dict(prompt=prompt, temperature=0, max_tokens=12, stream=True))
        said = [json.loads(line[6:]) for line in text.split(b"\n\n") if line.startswith(b"data: {")]
        assert status == 429 or "".join(s["choices"][0]["text"] for s in said) == self.right[prompt], text

    def leaves(self):
        body = json.dumps(LONG | self.rnd.choice([dict(stream=True), {}, dict(n=3), dict(prompt=["a"]*3)])).encode()
        self._raw(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body), self.rnd.random()*.1)

    def half_a_body(self): self._raw(HEAD + b"Content-Length: 500\r\n\r\n{\"prompt\":", self.rnd.choice([0, .1]))

    def oversized(self): self._refused(b" "*(2**21 + 10), status=413)

    def no_utf8(self): self._refused(b'{"prompt": "\xff"}')

    def garbage(self): self._raw(self.rnd.randbytes(200) + b"\r\n\r\n")

    def template_raises(self):
        word = self.rnd.choice(["raise", "divide", "attribute"])
        self._refused(dict(messages=[dict(role="user", content=word)]), "/v1/chat/completions")

    def no_grammar(self): self._refused(dict(prompt="a", max_tokens=4, structured_outputs=self.rnd.choice(BAD_FORMS)))

    def bad_request(self): self._refused(dict(prompt="!", stream=self.rnd.random() < .5), status=500)

    def looks_on(self):
        with closing(HTTPConnection(*self.address, timeout=60)) as http:
            http.request("GET", "/events")
            assert http.getresponse().read(20).startswith(b"event: snapshot")

    def numbers(self): assert self._send(None, "/metrics", "GET")[0] == 200

    def _work(self, end, pace):
        while time.monotonic() < end:
            kind = self.rnd.choice(self.kinds)
            getattr(self, kind)()
            self.done[kind] += 1
            time.sleep(self.rnd.random()*2*pace)

    def _gauges(self):
        lines = self._send(None, "/metrics", "GET")[1].decode().splitlines()
        told = {s.partition("{")[0]: float(s.rpartition(" ")[2]) for s in lines if s.startswith(("pagedlm:num_", "pagedlm:kv_"))}
        return [told["pagedlm:" + name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]

    def _until(self, fact, seconds=20):
        end = time.monotonic() + seconds
        while not fact(said := self._gauges()):
            assert time.monotonic() < end, said
            time.sleep(.05)


def one_round(seconds, pace, right, seed):
    "A server's life"
    rnd, grace = random.Random(seed), (60, .3)[seed % 2]  # the long one ends when all is said
    with TemporaryFile("w+") as log:
        child = subprocess.Popen([sys.executable, __file__, "serve", str(grace)], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            clients = Clients(int(child.stdout.readline().rpartition(":")[2]), right, seed)
            with ThreadPoolExecutor(6) as many:  # the worst comes first: not all that it takes is given back at once
                for c in [many.submit(clients._refused, dict(prompt="a", structured_outputs=HUGE)) for _ in range(6)]:
                    c.result()
            sizes, end = [], time.monotonic() + seconds
            for stop in (end - seconds/2, end):
                with ThreadPoolExecutor(6) as many:
                    for c in [many.submit(clients._work, stop, pace) for _ in range(6)]:
                        c.result()
                clients._until(lambda said: said == [0, 0, 0])  # nothing is left
                sizes.append(int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])*os.sysconf("SC_PAGE_SIZE")
                             if Path("/proc").is_dir() else 0)
            with ThreadPoolExecutor(16) as many:
                asked = [many.submit(clients._send, LONG | dict(stream=bool(i % 2), max_tokens=rnd.randint(100, 220))) for i in range(16)]
                clients._until(lambda said: said[0] >= 8)
                child.send_signal(signal.SIGTERM)
                replies = [a.result() for a in asked]
            assert child.wait(grace + 20) == 0
        finally:
            child.kill()
        log.seek(0)
        said = log.read()
    for status, text in replies:  # a whole answer, or a word that there will be none
        assert b"shutting_down" in text or status == 200 and b'"finish_reason":"length"' in text, (status, text)
        assert status in (200, 503)
    if grace > 1:
        assert not any(b"shutting_down" in text for _, text in replies)
    for word in "Traceback", "thread ends", "a listener raised", "failed, id":
        assert word not in said, said
    return clients.done, sizes[1] - sizes[0]


def soak(seconds, pace=.15, longest=120):
    "Rounds for so many seconds: how often each kind of client came, and the most bytes by which a server grew"
    n, right, done, grown = max(2, round(seconds/longest)), right_answers(), Counter(), 0
    start = time.monotonic()
    for i in range(n):
        left = max(2, (seconds - time.monotonic() + start)/(n - i) - 5)  # it takes a while to start and to end
        counts, more = one_round(left, pace, right, i)
        done, grown = done + counts, max(grown, more)
    assert grown < 48e6, f"{grown/1e6:.0f} MB more in half a round"
    return dict(done), grown


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        begin = time.monotonic()
        done, grown = soak(float(sys.argv[1]))
        print(f"{time.monotonic() - begin:.0f} s, {sum(done.values())} clients, {grown/1e6:.1f} MB grown: {done}")
