"""Replicas: the router on real blocks without a model, the loop of a call on a Ray of lies, and then real processes"""
import os
import signal
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from random import Random
from threading import Thread
from types import SimpleNamespace

import pytest
from common import check_noticed, said_by

from pagedlm import LLM, SamplingParams, cluster
from pagedlm.async_engine import ShuttingDown, StepFailed
from pagedlm.bench import make_work
from pagedlm.blocks import BlockManager, BlockPool
from pagedlm.cluster import (
    Answerer, Call, Cluster, PrefixAware, ReplicaDied, RoundRobin, keys_of, local_ray, read_rows, share_of, write_rows)
from pagedlm.core import RequestOutputKind
from pagedlm.engine import Engine
from pagedlm.model import tiny_config, tiny_model
from pagedlm.request import Request
from pagedlm.scheduler import Scheduler
from pagedlm.tokenizer import ByteTokenizer

with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture(scope="module", autouse=True)
def few_threads(one_thread): pass


# ---- a model for the real ones

class Mischief:
    "Does what a request's `extra_args` ask for: a pause at each token, or the end of the process, once"
    def new_req_logits_processor(self, params):
        asked = params.extra_args or {}
        def act(answer, logits):
            time.sleep(asked.get("pause", 0))
            if len(answer) == asked.get("kill_at") and not (done := Path(asked["once"])).exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return logits
        return act if asked else None


WORK = make_work(32, (8, 100), (8, 60), 258)  # mix32's recipe, in little
GREEDY = [SamplingParams(temperature=0, max_tokens=r["n"], ignore_eos=True) for r in WORK]
PROMPTS = [r["prompt"] for r in WORK]


def options():
    return dict(model=tiny_model(tiny_config(width=32, n_layers=1, mlp_width=32), seed=1), tokenizer=ByteTokenizer(), block_size=4,
                num_gpu_blocks_override=400, max_num_seqs=16, enforce_eager=True, logits_processors=[Mischief])


# ---- the router

B = 4


def play(router, prompts, n=2, n_blocks=32*8 + 17, at_once=8):
    "Real schedulers and blocks, a model that always says 1; so many requests are under way"
    engines = [Engine(Scheduler(BlockManager(BlockPool(n_blocks), B), 16, 64), lambda plan: [1 for w in plan.works if w.sample])
               for _ in range(n)]
    params, sent = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), Counter()
    for number, ids in enumerate(prompts):
        while sum(len(e.scheduler) for e in engines) >= at_once:
            for e in engines:
                e.step()
        keys = keys_of(ids, B)
        i = router.pick(keys, {i: len(e.scheduler) for i, e in enumerate(engines)})
        router.saw(i, keys)
        sent[i] += 1
        engines[i].add(Request(str(number), ids, params))
    for e in engines:
        for _ in e.drain(): pass
    managers = [e.scheduler.manager for e in engines]
    return sum(m.n_found for m in managers)/sum(m.n_asked for m in managers), sent


def prompts_of(rnd, n_prefixes=64, times=20, n_blocks=8, common=0):
    shared = [rnd.randrange(1000) for _ in range(common*B)]
    begins = [shared + [rnd.randrange(1000) for _ in range((n_blocks - common)*B)] for _ in range(n_prefixes)]
    order = begins*times
    rnd.shuffle(order)
    return [ids + [rnd.randrange(1000) for _ in range(2)] for ids in order]


@pytest.mark.parametrize("seed", range(3))
def test_each_prefix_has_its_replica(seed):
    "64 prefixes, each pool holds half of them, 20 requests for each, shuffled"
    prompts = prompts_of(Random(seed))
    for at_once in 1, 24:
        turns, _ = play(RoundRobin(), prompts, at_once=at_once)
        follows, sent = play(PrefixAware(32*8 + 16), prompts, at_once=at_once)
        assert follows >= 1.8*turns, (follows, turns)
        assert max(sent.values()) < 1.2*min(sent.values())


def check_router(module):
    "What must hold of `PrefixAware`: fails on each mutant"
    prompts = prompts_of(Random(9), n_prefixes=32, times=8)
    turns, _ = play(module.RoundRobin(), prompts, n_blocks=16*8 + 17)
    follows, sent = play(router := module.PrefixAware(16*8 + 16), prompts, n_blocks=16*8 + 17)
    assert follows > 1.6*turns and max(sent.values()) < 1.3*min(sent.values())
    assert all(len(seen) <= 16*8 + 16 for seen in router.seen.values())
    _, sent = play(module.PrefixAware(100), prompts_of(Random(3), 8, 10, n_blocks=10, common=4), n_blocks=101, at_once=1)
    assert sent[0] == sent[1] == 40, "everybody went after the system prompt"
    r, (a, b, c) = module.PrefixAware(4, slack=2), [keys_of([n]*9, B) for n in (1, 2, 3)]
    assert r.pick([], {0: 1, 1: 0}) == 1 and r.pick(a, {7: 3}) == 7
    for keys in a, b, a, c: r.saw(1, keys)  # b was used longest ago
    assert [r.n_cached(1, k) for k in (a, b, c)] == [2, 0, 2]
    r.saw(1, b[:1])
    assert [r.n_cached(1, k) for k in (a, b, c)] == [1, 1, 2], "of one prompt, the tail goes first"
    assert r.pick(c, {0: 0, 1: 2}) == 1 and r.pick(c, {0: 0, 1: 3}) == 0
    r.forget(1)
    r.forget(5)
    assert r.n_cached(1, c) == 0
    assert [module.LeastLoaded().pick(a, {0: 1, 1: 0}), module.LeastLoaded().pick(a, {0: 0, 1: 0})] == [1, 0]
    r = module.LeastLoaded()
    assert [r.pick(a, {0: 0, 1: 0}), r.pick(a, {0: 0, 1: 0}), r.pick(a, {0: 2, 1: 0}), r.pick(a, {0: 2, 1: 1})] == [0, 1, 1, 1]
    turn = module.RoundRobin()
    assert [turn.pick(a, {0: 5, 1: 0, 2: 0}) for _ in range(6)] == [0, 1, 2]*2
    assert {turn.pick(a, {1: 0, 2: 0}) for _ in range(4)} == {1, 2}


def test_routers(): check_router(cluster)


@pytest.mark.parametrize("old, new", [
    ("-n if n >= self.share*len(keys) else 0", "-n"),
    ("-n if n >= self.share*len(keys) else 0", "0"),
    ("loads[i], len(self.seen[i])", "loads[i], 0"),
    ("if loads[i] <= most)", ")"),
    ("for key in reversed(keys)", "for key in keys"),
    ("seen.move_to_end(key)", "pass"),
    ("while len(seen) > self.n_blocks: seen.popitem(last=False)", "pass"),
    ("seen.popitem(last=False)", "seen.popitem()"),
    ("def forget(self, replica): self.seen.pop(replica, None)", "def forget(self, replica): pass"),
    ("for n, key in enumerate(keys) if key not in seen), len(keys))", "for n, key in enumerate(keys) if key not in seen), 0)"),
    ("(loads[i], self.n_sent[i])", "(self.n_sent[i], loads[i])"),
])
def test_a_wrong_router_is_noticed(old, new, tmp_path):
    def notices(module):
        try: check_router(module)
        except (AssertionError, ValueError): return True
    check_noticed(notices, cluster, old, new, tmp_path/"changed.py")


# ---- a call, on a Ray of lies: no processes, and everything dies whenever it likes

class Gone(Exception): pass
class Wrong(Exception): pass


class Ref:
    def __init__(self, ray, actor): self.ray, self.actor, self.left = ray, actor, ray.rnd.randrange(4)
    def ready(self):
        self.left -= 1
        return not self.actor.alive or self.left < 0
    def get(self):
        if not self.actor.alive: raise Gone
        self.actor.up = True
        return None, self.actor.pid


class Flight:
    "An answer of so many tokens that comes token by token"
    def __init__(self, ray, actor, n_tokens, quiet, name):
        self.ray, self.actor, self.name, self.n, self.said = ray, actor, name, n_tokens, 0
        self.quiet, self.cancelled = quiet, False
        assert actor.up and actor.alive or not actor.alive
        actor.flights.append(self)
    def ready(self): return not self.actor.alive or self.ray.rnd.random() < .6
    def __next__(self): return self
    def get(self):
        if not self.actor.alive: raise Gone
        if self.name in self.ray.poison and self.ray.rnd.random() < self.ray.p_poison:
            self.ray.kills.setdefault(self.name, []).append(len(self.actor.flights))
            self.ray.kill(self.actor)
            raise Gone
        self.said = self.n if self.quiet else self.said + 1
        if self.said == self.n: self.actor.flights.remove(self)
        said = [SimpleNamespace(index=0, token_ids=list(range(self.said)))]
        return Said(self.name, said, self.said == self.n)


class Said(SimpleNamespace):
    def __init__(self, request_id, outputs, finished): super().__init__(request_id=request_id, outputs=outputs, finished=finished)
    def __replace__(self, **kw): return self


class Actor:
    def __init__(self, ray, options):
        self.ray, self.alive, self.up, self.flights, self.pid = ray, ray.n_starts > 0, False, [], ray.n_made
        ray.n_made, ray.n_starts = ray.n_made + 1, ray.n_starts - 1
        self.start = SimpleNamespace(remote=lambda: Ref(ray, self))
        self.answer = SimpleNamespace(options=lambda **kw: SimpleNamespace(remote=lambda *asks: Flight(ray, self, *asks[0], asks[2])))


class Lies:
    "What of Ray the fleet asks for"
    exceptions = SimpleNamespace(RayTaskError=Wrong, RayActorError=Gone, ObjectLostError=Gone)
    def __init__(self, rnd, p_death=0., poison=(), p_poison=.5, n_starts=10**6):
        self.rnd, self.p_death, self.poison, self.n_starts, self.n_made, self.actors = rnd, p_death, poison, n_starts, 0, []
        self.p_poison, self.idle, self.kills = p_poison, 0, {}  # poison -> requests that were with it, each time
    def sleep(self, seconds):
        self.idle += 1
        assert self.idle < 100, "it waits for nobody"
    def put(self, x): return x
    def remote(self, kind): return SimpleNamespace(options=lambda **kw: SimpleNamespace(remote=self._make))
    def _make(self, options):
        self.actors.append(Actor(self, options))
        return self.actors[-1]
    def kill(self, actor): actor.alive = False
    def cancel(self, flight):
        flight.cancelled = True
        if flight in flight.actor.flights: flight.actor.flights.remove(flight)
    def wait(self, refs, num_returns=1, timeout=None):
        for a in self.actors:
            if a.alive and self.rnd.random() < self.p_death*(1 if a.up else .3): a.alive = False
        done = []
        while not done:
            done = [r for r in refs if r.ready()]
            if timeout is not None: break
        return done[:num_returns], [r for r in refs if r not in done[:num_returns]]
    def get(self, ref): return ref.get()


def fleet_of(ray, module=cluster, put=setattr, n=2, max_deaths=3, n_seats=8):
    put(module, "load_ray", lambda: ray)
    put(module, "replace", lambda out, **kw: out)
    put(module, "time", SimpleNamespace(sleep=ray.sleep))
    fleet = module.Fleet({}, n, {}, max_deaths)
    fleet.n_seats, fleet.router = n_seats, module.PrefixAware(100)
    return fleet


def jobs_of(rnd, n, quiet, module=cluster):
    params = SimpleNamespace(output_kind=RequestOutputKind.CUMULATIVE)
    return [module.Job(i, str(i), [], ((rnd.randint(1, 9), quiet), params, str(i)), rnd.choice([1, 1, 2])) for i in range(n)]


def play_call(fleet, jobs, module=cluster):
    "How often each prompt was answered, and those that were lost"
    ended, told, lost = Counter(), Counter(), {}
    try:
        for i, out in module.Call(fleet, jobs, None).run():
            told[i] += 1
            ended[i] += out.finished
            assert told[i] == out.outputs[0].token_ids[-1] + 1 or jobs[i].asks[0][1], "told twice"
            busy = Counter(id(j.place) for j in jobs if j.place)
            assert all(p.load <= fleet.n_seats for p in fleet.places)
            assert sum(p.load for p in fleet.places) <= sum(j.n_seats for j in jobs if j.place), "a seat is taken by nobody"
    except module.ReplicaDied as e:
        lost = e.lost
    assert [p.load for p in fleet.places] == [0]*len(fleet.places) and fleet.n_suspects == 0
    assert not any(a.flights for a in fleet.ray.actors if a.alive), "somebody still answers"
    assert all(ended[j.number] == (j.number not in lost) for j in jobs), (ended, lost)
    return ended, lost


def check_call(module, put=setattr, seeds=range(150)):
    "Deaths at random: each is answered once, or lost for a reason; fails on each mutant"
    total = Counter()
    for seed in seeds:
        rnd = Random(seed)
        quiet, n = rnd.random() < .5, rnd.randint(1, 16)
        ray = Lies(rnd, p_death=rnd.choice([0, .01, .05]), poison={str(rnd.randrange(n))} if rnd.random() < .4 else ())
        fleet = fleet_of(ray, module, put, n=rnd.randint(1, 3), max_deaths=rnd.randint(1, 4), n_seats=rnd.choice([2, 3, 8]))
        jobs = jobs_of(rnd, n, quiet, module)
        ended, lost = play_call(fleet, jobs, module)
        for i, why in lost.items():
            assert jobs[i].n_deaths == fleet.max_deaths or jobs[i].ids, why
            assert ("had been told" in why) == bool(jobs[i].ids)
        assert all(j.n_deaths <= fleet.max_deaths for j in jobs)
        total.update(lost=len(lost), deaths=ray.n_made - len(fleet.places), again=sum(j.n_deaths > 0 for j in jobs if j.number not in lost))
    assert total["lost"] > 50 and total["deaths"] > 200 and total["again"] > 100, total
    for seed in range(20):  # nothing dies but of poison: the others are answered, and three replicas is what it costs
        ray = Lies(Random(seed), poison={"3"}, p_poison=1)
        fleet = fleet_of(ray, module, put)
        jobs = jobs_of(ray.rnd, 10, True, module)
        _, lost = play_call(fleet, jobs, module)
        assert set(lost) == {3} and ray.n_made == 2 + 3, (lost, ray.n_made)
        assert ray.kills["3"][2] == 1, "it was not alone when it was convicted"


def test_a_call_answers_each_once(monkeypatch): check_call(cluster, monkeypatch.setattr, range(400))


@pytest.mark.parametrize("old, new", [
    ("if self.n_suspects: loads =", "if False: loads ="),
    ("if job.suspect and not n}", "if job.suspect}"),
    ("if job.suspect and not n}", "if not n}"),
    ("job.suspect = job.n_deaths == self.max_deaths - 1", "job.suspect = False"),
    ("self.n_suspects += job.suspect", "pass"),
    ("self.n_suspects -= job.suspect", "pass"),
    ("if job.place: job.place.load -= job.n_seats", "pass"),
    ("p.load += job.n_seats", "p.load += 1"),
    ("if p.load + job.n_seats <= self.n_seats", "if p.load < self.n_seats"),
    ("if self.places[dead.number] is dead:", "if True:"),
    ("job.n_deaths += 1", "pass"),
    ("if not job.ids and job.n_deaths < self.fleet.max_deaths", "if job.n_deaths < self.fleet.max_deaths"),
    ("if not job.ids and job.n_deaths < self.fleet.max_deaths", "if not job.ids and job.n_deaths <= self.fleet.max_deaths"),
    ("[job, *self.todo]", "self.todo"),
    ("key=lambda j: not j.suspect", "key=lambda j: 0"),
    ("for flight in () if self.fleet.closed else self.flights: self.fleet.ray.cancel(flight)", "pass"),
])
def test_a_wrong_call_is_noticed(old, new, tmp_path):
    def notices(module):
        try: check_call(module)
        except Exception: return True
    check_noticed(notices, cluster, old, new, tmp_path/"changed.py")


def test_leaving_takes_back_the_rest(monkeypatch):
    ray = Lies(Random(1))
    fleet = fleet_of(ray, put=monkeypatch.setattr)
    run = Call(fleet, jobs_of(Random(1), 12, False), None).run()
    for _ in range(8): next(run)
    assert sum(p.load for p in fleet.places)
    run.close()
    assert not sum(p.load for p in fleet.places) and not any(a.flights for a in ray.actors)


def test_a_failed_step_is_not_tried_again(monkeypatch):
    ray = Lies(Random(1))
    fleet = fleet_of(ray, put=monkeypatch.setattr)
    monkeypatch.setattr(Flight, "get", lambda self: "an id")
    with pytest.raises(StepFailed, match="an id"):
        list(Call(fleet, jobs_of(Random(1), 5, False), None).run())
    assert not sum(p.load for p in fleet.places) and not any(a.flights for a in ray.actors)


def test_fewer_and_fewer(monkeypatch):
    ray = Lies(Random(2), p_death=.02, n_starts=3)  # the first to die is started again; after that nobody
    fleet = fleet_of(ray, put=monkeypatch.setattr)
    with pytest.raises(RuntimeError, match="no replica is left"):
        for _ in range(500):
            try: list(Call(fleet, jobs_of(Random(2), 4, True), None).run())
            except ReplicaDied: pass
    assert [(p.gone, p.n_tries) for p in fleet.places] == [(True, 3)]*2 and ray.n_made == 3 + 2*3


# ---- without Ray, and what Ray has

def test_without_ray_the_router_works_and_the_rest_says_what_to_install():
    said = said_by("""
import sys
sys.modules["ray"] = None
from pagedlm.cluster import Cluster, PrefixAware, keys_of
print(PrefixAware(8).pick(keys_of([1]*9, 4), {0: 0, 1: 0}), "torch" in sys.modules)
try: Cluster()
except ImportError as e: print(e)
""")
    assert said == "0 False\nRay is not installed: pip install 'pagedlm[cluster]'\n"


def test_shares():
    assert share_of(dict(CPU=16.0), 3) == dict(num_cpus=5) and share_of(dict(CPU=2.0), 4) == dict(num_cpus=1)
    assert share_of(dict(CPU=16.0, GPU=2.0), 2) == dict(num_gpus=1)


def test_rows_are_written_whole(tmp_path):
    write_rows(tmp_path, [dict(id=1, x="é\n"), dict(id=2, x=None)])
    write_rows(tmp_path, [dict(id=1, x="é\n"), dict(id=2, x=None)])  # the same once more: an actor died before it could report
    write_rows(tmp_path, [dict(id="1", x=0)])
    (tmp_path/"half.draft").write_text("{")
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    assert read_rows(tmp_path) == {1: dict(id=1, x="é\n"), 2: dict(id=2, x=None), "1": dict(id="1", x=0)}


class Poison:
    "A logits processor: whoever begins with 7 ends the process, or nearly"
    def new_req_logits_processor(self, params):
        def act(prompt, answer, logits):
            if prompt[0] == 7: raise SystemExit
            return logits
        return act


def test_a_poisoned_row_is_given_up_and_the_others_are_answered(tmp_path):
    import numpy as np
    answerer = Answerer(tmp_path, GREEDY[0], options() | dict(logits_processors=[Poison]))
    prompts, n_deaths = [[9], [8, 1], [7, 1], [6]], 0
    batch = dict(id=np.arange(4), prompt=np.array([*prompts, None], dtype=object)[:4])
    for _ in range(9):  # as `ray.data` would, with a new actor each time
        try: answerer(batch)
        except SystemExit: n_deaths += 1
        else: break
    found = read_rows(tmp_path)
    want = LLM(**options()).generate(prompts, GREEDY[0], use_tqdm=False)
    assert n_deaths == 3 and found[2]["error"].startswith("2 engines died")
    assert [found[i]["outputs"][0]["token_ids"] for i in (0, 1, 3)] == [want[i].outputs[0].token_ids for i in (0, 1, 3)]
    assert sum(len(path.read_text().splitlines()) for path in tmp_path.glob("*.jsonl")) == 4


# ---- real processes: one Ray and two replicas for all

@pytest.fixture(scope="module")
def ray():
    for last in False, False, True:  # a machine that is busy may be too slow for Ray's own limits
        try: ray, _ = cluster.find_ray() if os.environ.get("RAY_ADDRESS") else (local_ray(2), True)
        except Exception:
            if last: raise
            cluster.load_ray().shutdown()
        else: break
    assert ray.util.get_node_ip_address() == "127.0.0.1", "somebody from outside may reach it"
    assert type(print) is type(len), "Ray has put its own `print` in place of Python's"
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not find this file
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def two(ray):
    with Cluster(**options(), max_queue=0) as two:
        yield two


@pytest.fixture(scope="module")
def alone():
    return LLM(**options())


def said(outputs): return [[(c.text, c.token_ids, c.finish_reason) for c in o.outputs] for o in outputs]


def settle(two):
    "Until both are up, and have nothing to do"
    end = time.monotonic() + 60
    while any(p.starting for p in two.fleet.places) or any(two.ray.get(p.actor.look.remote())["requests"] for p in two.fleet.places):
        assert time.monotonic() < end
        time.sleep(.02)
        two.fleet.look()
    assert [p.load for p in two.fleet.places] == [0, 0] and two.fleet.n_suspects == 0
    return two


@with_ray
def test_two_replicas_answer_as_one_engine(two, alone):
    assert said(two.generate(PROMPTS, GREEDY, use_tqdm=False)) == said(alone.generate(PROMPTS, GREEDY, use_tqdm=False))
    params = SamplingParams(temperature=1, n=2, logprobs=1, max_tokens=9, stop=["e"])
    ours, theirs = (x.generate(["abc", dict(prompt="d", cache_salt="s")], params, use_tqdm=False) for x in (two, alone))
    assert said(ours) == said(theirs) and [o.request_id for o in ours] == [o.request_id for o in theirs]
    for kind in RequestOutputKind:
        params = SamplingParams(max_tokens=20, seed=3, output_kind=kind)
        last = lambda pairs: {i: o.outputs[0].text for i, o in pairs}
        parts = lambda pairs: {i: "".join(o.outputs[0].text for j, o in pairs if j == i) for i, _ in pairs}
        read = parts if kind is RequestOutputKind.DELTA else last
        assert read(list(two.stream(PROMPTS[:5], params))) == read(list(alone.stream(PROMPTS[:5], params)))


@with_ray
def test_a_replica_is_killed_in_the_middle(two, alone):
    "SIGKILL, when half of the answers are there: each is given once, and right"
    slow = [p.clone() for p in GREEDY]
    for p in slow: p.extra_args = dict(pause=.001)
    victim, heard = settle(two).fleet.places[1], Counter()
    stream = Call(two.fleet, two._take(PROMPTS, slow, None, quiet=True), 4).run()
    outputs = {}
    for i, out in stream:
        heard[i] += 1
        outputs[i] = out
        if len(outputs) == 12: os.kill(victim.pid, signal.SIGKILL)
    assert heard == dict.fromkeys(range(32), 1)
    assert said(outputs[i] for i in range(32)) == said(alone.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert settle(two).fleet.places[1].pid != victim.pid
    assert said(two.generate(PROMPTS, GREEDY, use_tqdm=False)) == said(outputs[i] for i in range(32))


@with_ray
def test_closing(two):
    pids = [p.pid for p in settle(two).fleet.places]
    slow, heard = SamplingParams(max_tokens=150, ignore_eos=True, extra_args=dict(pause=.01)), []
    def wait():
        try: two.generate("a", slow, use_tqdm=False)
        except ShuttingDown as e: heard.append(str(e))
    Thread(target=lambda: (time.sleep(.3), two.close())).start()
    wait()
    wait()
    assert heard == ["the cluster was closed before this answer was complete", "the cluster is closed"]
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and sys.platform == "linux":
        assert time.monotonic() < end
        time.sleep(.02)
