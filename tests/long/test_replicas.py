"Replicas of the default model, and deaths that take longer: minutes. `make long` runs it"
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("pyarrow")
ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT/"tests"))

from test_cluster import GREEDY, PROMPTS, alone, options, ray, said, settle, two, with_ray  # `alone`, `ray` and `two` are fixtures

from pagedlm import LLM, SamplingParams
from pagedlm.async_engine import QueueFull
from pagedlm.bench import find_work
from pagedlm.cluster import Answerer, Call, Cluster, PrefixAware, ReplicaDied, answer_rows, read_rows

pytestmark = with_ray


def test_mix32_on_the_default_model_and_a_replica_dies(ray):
    "As one engine says it; in this precision a token may differ where two are nearly as likely, so such answers are counted"
    work = find_work("mix32", 49152)
    prompts, params = [r["prompt"] for r in work], [SamplingParams(temperature=0, max_tokens=r["n"], ignore_eos=True) for r in work]
    want = [o.outputs[0].token_ids for o in LLM(enforce_eager=True, dtype="float32", max_model_len=1024).generate(prompts, params, use_tqdm=False)]
    with Cluster(enforce_eager=True, dtype="float32", max_model_len=1024) as two:
        for kill in False, True:
            heard, found, pid = Counter(), {}, settle(two).fleet.places[0].pid
            start = time.monotonic()
            for i, out in Call(two.fleet, two._take(prompts, params, None, quiet=True), 16).run():
                heard[i] += 1
                found[i] = out.outputs[0].token_ids
                if kill and len(found) == 10: os.kill(pid, signal.SIGKILL)
            print(f"\nmix32 on two replicas{', one killed' * kill}: {time.monotonic() - start:.0f} s")
            assert heard == dict.fromkeys(range(32), 1)
            wrong = [i for i in range(32) if found[i] != want[i]]
            assert not wrong, f"{len(wrong)} of 32 answers differ"


class Poison:
    def new_req_logits_processor(self, params):
        def act(prompt, answer, logits):
            if prompt[0] == 7: os.kill(os.getpid(), signal.SIGKILL)
            return logits
        return act


def test_poison_costs_three_replicas_and_nobody_elses_answer(ray):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    prompts, params = [*PROMPTS[:12], [7, 7, 7], *PROMPTS[12:20]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    want = said(LLM(**options()).generate(PROMPTS[:20], params, use_tqdm=False))
    class Counting(PrefixAware):
        n_forgotten = 0
        def forget(self, replica): self.n_forgotten += 1
    with Cluster(**options() | dict(logits_processors=[Poison]), router=Counting(400)) as two:
        with pytest.raises(ReplicaDied, match="prompt 12: 3 replicas died while they computed it") as e:
            two.generate(prompts, params, use_tqdm=False)
        assert e.value.answers[12] is None and two.fleet.router.n_forgotten == 3
        assert said(a for a in e.value.answers if a) == want
        assert said(two.generate(PROMPTS[:20], params, use_tqdm=False)) == want


HEAD = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT/"tests")!r})
from pathlib import Path
from threading import Thread
import test_cluster as t
from pagedlm import SamplingParams
from pagedlm.cluster import *
"""
CTRL_C = HEAD + """
with Cluster(**t.options() | dict(logits_processors=None)) as two:
    print("up", flush=True)
    try:
        while True: two.generate(t.PROMPTS, t.GREEDY, use_tqdm=False)
    except KeyboardInterrupt: pass
    t.settle(two)
    print(len(two.generate(t.PROMPTS, t.GREEDY, use_tqdm=False)), *[p.pid for p in two.fleet.places], flush=True)
"""
ROWS = HEAD + """
rows = [dict(id=i, prompt=p) for i, p in enumerate(t.PROMPTS)]
found = answer_rows(rows, sys.argv[1], SamplingParams(max_tokens=int(sys.argv[2]), ignore_eos=True), batch_size=2,
                    **t.options() | dict(logits_processors=None))
print(len(found), all(r["outputs"] for r in found))
"""


def process(code, *args):
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)


def of_session(p):
    "Processes that this one started, directly or not"
    table = subprocess.run(["ps", "-eo", "pid=,sid=,ppid=,args="], capture_output=True, text=True).stdout.splitlines()
    rows = [line.split(None, 3) for line in table]
    family = {str(p.pid)}
    while more := {pid for pid, sid, parent, _ in rows if (parent in family or sid in family) and pid not in family}:
        family |= more
    return family - {str(p.pid)}


def gone(pids, seconds=60):
    end = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "somebody is left"
        time.sleep(.1)
    return True


def test_ctrl_c_in_a_terminal_hits_the_call_and_not_the_replicas():
    "Which sends it to the whole group of processes"
    p = process(CTRL_C)
    assert p.stdout.readline() == "up\n"
    time.sleep(1)
    family = of_session(p)
    os.killpg(p.pid, signal.SIGINT)
    n, *pids = p.stdout.read().split()
    assert n == "32" and p.wait(60) == 0 and set(pids) <= family and gone(family)


def test_rows_survive_the_death_of_everything(tmp_path):
    p = process(ROWS, tmp_path/"answers", 100)
    while len(list((tmp_path/"answers").glob("*.jsonl"))) < 3: time.sleep(.005)
    family = of_session(p)
    os.kill(p.pid, signal.SIGKILL)
    assert gone(family, 150)  # Ray's agents look for its head for a minute before they give up
    first = {path.name: path.read_text() for path in (tmp_path/"answers").glob("*.jsonl")}
    n_first = len(read_rows(tmp_path/"answers"))
    assert 0 < n_first < 32
    out, _ = process(ROWS, tmp_path/"answers", 100).communicate(timeout=300)
    assert out == "32 True\n"
    files = {path.name: path.read_text() for path in (tmp_path/"answers").glob("*.jsonl")}
    assert {name: files[name] for name in first} == first
    assert sorted(json.loads(line)["id"] for text in files.values() for line in text.splitlines()) == list(range(32))


def test_rows_are_answered_once_whatever_happens(ray, tmp_path):
    "Ctrl-C in the first run; in the second, the actor dies in the middle of a batch"
    kw, batches = options(), tmp_path/"answers"
    ask = SamplingParams(max_tokens=30, ignore_eos=True, extra_args=dict(pause=.002, kill_at=20, once=str(tmp_path/"killed")))
    rows = [dict(id=i, prompt=p) for i, p in enumerate(PROMPTS[:15])] + [dict(id=15, prompt=[258])]
    (tmp_path/"killed").touch()  # not in the first run
    def ctrl_c():
        while not list(batches.glob("*.jsonl")): time.sleep(.005)
        os.kill(os.getpid(), signal.SIGINT)
    Thread(target=ctrl_c).start()
    with pytest.raises(KeyboardInterrupt): answer_rows(rows, batches, ask, replicas=1, batch_size=2, **kw)
    first = read_rows(batches)
    assert 0 < len(first) < 16
    (tmp_path/"killed").unlink()
    found = answer_rows(rows, batches, ask, replicas=1, batch_size=2, **kw)
    assert (tmp_path/"killed").exists() and [r["id"] for r in found] == list(range(16))
    assert sum(len(path.read_text().splitlines()) for path in batches.glob("*.jsonl")) == 16
    assert {i: found[i] for i in first} == first and "258 is outside the vocabulary" in found[15]["error"]
    again = Answerer(tmp_path/"again", ask, kw)  # in other batches, the same answers
    (tmp_path/"again").mkdir()
    import numpy as np
    again(dict(id=np.array([7, 3]), prompt=np.array([PROMPTS[7], PROMPTS[3]], dtype=object)))
    assert read_rows(tmp_path/"again") == {i: found[i] for i in (7, 3)}
    with pytest.raises(ValueError, match="was begun with sampling_params"): answer_rows(rows, batches, SamplingParams(), **kw)


def test_what_it_is_not_asked_in_vain(two, alone):
    settle(two).desk.texts._n_added = alone.texts._n_added  # the numbers in the messages
    for prompts, params in (([], None), ([[1], [258]], None), (["a", "x"*400], None), ({"tex": "a"}, None), ("a", SamplingParams(logprobs=21)),
                            (["a"], [SamplingParams()]*2), ("a", "b"), ("a", SamplingParams(stop_token_ids=[999]))):
        why = []
        for x in alone, two:
            with pytest.raises(ValueError) as e: x.generate(prompts, params, use_tqdm=False)
            why.append(str(e.value))
        assert why[0] == why[1]
    with pytest.raises(ValueError, match="policy does not look at it"): two.generate("a", priority=1)
    with pytest.raises(ValueError, match="17 answers at once, but at most 16 are possible"): two.generate("a", SamplingParams(n=17))
    with pytest.raises(ValueError, match="router='best', but there is only prefix"): Cluster(router="best")
    with pytest.raises(ValueError, match="replicas=0, but it must be at least 1"): Cluster(replicas=0)
    settle(two)


def test_leaving_and_ctrl_c_reach_the_replicas(two, alone):
    slow = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, extra_args=dict(pause=.01))
    for n, _ in enumerate(two.stream(["a", "b", "c"], slow)):
        if n == 5: break
    settle(two)
    Thread(target=lambda: (time.sleep(.3), os.kill(os.getpid(), signal.SIGINT))).start()
    with pytest.raises(KeyboardInterrupt): two.generate(["a", "b", "c"], slow, use_tqdm=False)
    settle(two)
    assert said(two.generate(PROMPTS[:4], GREEDY[:4], use_tqdm=False)) == said(alone.generate(PROMPTS[:4], GREEDY[:4], use_tqdm=False))


def test_when_all_are_full(two):
    slow, heard = SamplingParams(max_tokens=30, ignore_eos=True, extra_args=dict(pause=.002)), []
    crowd = Thread(target=lambda: heard.append(two.generate(["a"]*48, slow, use_tqdm=False)))  # 32 rows: 16 wait in their own call
    crowd.start()
    while sum(p.load for p in two.fleet.places) < 32: time.sleep(.005)
    with pytest.raises(QueueFull, match="every replica has 16 requests"): two.generate("b", use_tqdm=False)
    crowd.join()
    assert all(o.finished for o in heard[0])
    settle(two)
