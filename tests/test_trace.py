"""Everything in a picture follows from the events, and agrees with the engine that told them"""
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from functools import cache
from random import Random

import numpy as np
import pytest
from common import World, play, random_arrivals, random_policy, random_world

from pagedlm import trace
from pagedlm.core import ManualClock
from pagedlm.trace import (Recorder, Replay, Trace, latency, latency_summary, percentile, pool_of, spans_of, stays_of,
                           steps_of, svg_block_map, svg_blocks, svg_gantt, svg_latency, svg_pool, svg_steps, tables_at,
                           text_blocks, text_steps, to_perfetto)

MISHAPS = dict(p_abort=.05, p_lose=.05, p_fail=.1)
PICTURES = [svg_steps, svg_gantt, svg_block_map, lambda events: svg_pool(events, 5), svg_latency,
            lambda events: svg_gantt(events, events), lambda events: svg_blocks(tables_at(events), 15)]


class Traced(World):
    "A world with a recorder, and with what the recording should say"
    def __init__(self, **kw):
        self.recorder = Recorder(lambda: self.engine.clock())
        self.pools, self.decodes = [], []  # of each step: what the pool holds, who decodes
        super().__init__(**kw)

    def emit(self, name, **fields):
        super().emit(name, **fields)
        self.recorder(name, **fields)
        if name == "step":
            self.note_step()

    def run(self, plan):
        self.engine.clock.advance(.25)  # the host's work
        return super().run(plan)

    def note_step(self):
        plan, owners = self.scheduler.under_way[0]
        done = {r.id: r.n_computed for r in self.scheduler.running.values()}
        done |= {owners[w.row].id: w.start + w.n for w in plan.works if w.row in owners}
        tables, pool, B = self.manager.tables, self.manager.pool, self.manager.block_size
        slots = {(tables[id][p//B], p % B) for id, n in done.items() for p in range(n)}
        used = {b for table in tables.values() for b in table}
        self.pools.append((len(used), len(set(pool.named.values()) - used), len(slots), len(used)*B))
        self.decodes.append({owners[w.row].id: w.ids is None for w in plan.works if w.row in owners})

    def step(self):
        news = super().step()
        self.check_replay()
        return news

    def check_replay(self):
        "The pool, rebuilt from nothing but events"
        self.replay = vars(self).get("replay") or Replay()
        for name, fields in self.events[vars(self).get("n_replayed", 0):]:
            self.replay(name, fields)
        self.n_replayed, r, pool = len(self.events), self.replay, self.manager.pool
        assert {id: t for id, t in r.tables.items() if t} == {id: t for id, t in self.manager.tables.items() if t}
        assert {b: len(x) for b, x in r.readers.items()} == {b: n for b, n in enumerate(pool.refs) if n}
        assert r.named == set(pool.named.values()) and r.cached == {b for b in r.named if not pool.refs[b]}


def games(seed, n=25, mishaps=MISHAPS, **fixed):
    rnd = Random(seed)
    for i in range(n):
        world = random_world(rnd, Traced, **dict(policy=random_policy(rnd)) if i % 2 else {}, **fixed)
        yield play(world, rnd, random_arrivals(rnd, world), **mishaps)


@cache
def a_run():
    "One of them, in which much happens"
    return next(w for w in games(3, 100) if min(w.counts()[name] for name in ("preempt", "share", "evict"))).recorder.events


def words(svg):
    return [e.text for e in ET.fromstring(str(svg)).iter("{http://www.w3.org/2000/svg}text")]


def test_a_replay_is_the_pool():
    "At each step; also when everything is reset in the middle"
    n = Counter()
    for w in games(0):
        n += w.counts()
        w.check_replay()
    assert min(n["evict"], n["name"], n["share"], n["preempt"], n["abort"]) > 0
    w = Traced(n_blocks=30)
    for i in range(3):
        w.add([1, 2, 3, 1, 2, 3, i], max_tokens=9)
    for _ in range(4):
        w.step()
    assert w.replay.named and w.replay.tables
    w.engine.reset()
    w.check_replay()
    assert not w.replay.named and not w.replay.tables


def test_lives_are_cut_without_gaps():
    "Spans of a request touch, from arrival to end; what it computed is what the steps say"
    seen, n_vain = Counter(), 0
    for w in games(1):
        events = w.recorder.events
        lives, waits, told = spans_of(events), latency(events), Counter()
        began = {}
        for s in steps_of(events):
            told.update({id: n for id, n, _ in s.works})
            began[s.end] = min(s.start, began.get(s.end, s.start))
        for r in w.requests:
            spans, wait = lives[r.id], waits[r.id]
            mine = [(t, name) for t, name, f in events if f.get("request") == r.id and name in trace._NEXT]
            assert all(a.end == b.start for a, b in zip(spans, spans[1:]))
            if spans:
                assert (spans[0].start, spans[-1].end) == (mine[0][0], mine[-1][0])
            assert sum(s.end - s.start for s in spans) == pytest.approx(wait["e2e"])
            if wait["queue"] is not None:
                assert sum(s.end - s.start for s in spans if s.kind == "queued") == pytest.approx(wait["queue"])
            last = max((i for i, s in enumerate(spans) if s.kind == "preempted"), default=-1)
            kinds = [s.kind for s in spans[last + 1:] if s.n]
            assert kinds == sorted(kinds, key="prefill decode".split().index)
            assert sum(s.n for s in spans) <= told[r.id]
            n_vain += told[r.id] - sum(s.n for s in spans)
            assert all(s.start >= began[s.end] for s in spans if s.n)  # nobody is computed between steps
            seen.update(s.kind for s in spans)
            if r.finish_reason != "abort" and not r.n_preempted and w.exact and not w.engine.ahead:
                assert r.n_cached + sum(s.n for s in spans) == len(r.tokens) - 1
    assert set(seen) == {"queued", "prefill", "decode", "idle", "preempted"}
    assert n_vain  # steps ahead that computed for somebody who had gone


def test_a_step_that_was_overtaken_computes_for_nobody():
    "Launched, then its request was preempted and admitted again, and only then did it land"
    story = [(0, "arrive", dict(request="r", n_prompt=8)), (0, "admit", dict(request="r", n_cached=0)),
             (2, "preempt", dict(request="r")), (3, "admit", dict(request="r", n_cached=7)),
             (4, "step", dict(works=(("r", 1),), start=1)), (5, "step", dict(works=(("r", 1),), start=3))]
    assert steps_of(story)[1].works == [("r", 1, False)]
    assert spans_of(story)["r"] == [("idle", 0, 2, 0), ("preempted", 2, 3, 0), ("prefill", 3, 5, 1)]
    assert pool_of(story, 4)[0].tokens == 7 and pool_of(story, 4)[1].tokens == 8


def test_decode_is_what_the_scheduler_calls_the_newest_id():
    n = Counter()
    for w in games(2, 20, dict(p_abort=.05)):
        for s, truth in zip(steps_of(w.recorder.events), w.decodes, strict=True):
            assert {id: decode for id, _, decode in s.works if id in truth} == truth
            n.update(truth.values())
    assert min(n.values()) > 100


def test_the_pool_over_time_is_the_pool():
    for w in games(4, 25):
        states = pool_of(w.recorder.events, w.manager.block_size)
        assert [tuple(p)[1:] for p in states] == w.pools


def test_waits_and_counts():
    for w in games(5, 15):
        waits = latency(w.recorder.events)
        assert list(waits) == [r.id for r in w.requests]
        for r in w.requests:
            x = waits[r.id]
            assert (x["n_prompt"], x["n_output"], x["n_preempt"]) == (r.n_prompt, r.n_output, r.n_preempted)
            assert (x["n_cached"], x["reason"]) == (r.n_cached, r.finish_reason)
            if r.n_output:
                assert x["ttft"] + sum(x["itl"]) <= x["e2e"] + 1e-9 and x["queue"] <= x["ttft"]
            assert len(x["itl"]) == max(0, r.n_output - 1)


def test_percentiles_are_numpys():
    rnd = Random(0)
    for _ in range(50):
        xs = [rnd.choice([rnd.random(), rnd.randint(0, 3)]) for _ in range(rnd.randint(1, 40))]
        for p in (0, 1, 50, 90, 99, 99.9, 100, rnd.random()*100):
            assert percentile(xs, p) == pytest.approx(np.percentile(xs, p))
    events = a_run()
    told, waits = latency_summary(events, (25, 75)), latency(events).values()
    itl = [x for r in waits for x in r["itl"]]
    assert told["itl"] == dict(n=len(itl), mean=pytest.approx(np.mean(itl)), p25=np.percentile(itl, 25),
                               p75=np.percentile(itl, 75))
    assert told["e2e"]["n"] == sum(r["reason"] != "abort" for r in waits)


def test_stays_of_a_block_do_not_overlap():
    for w in games(6, 15):
        events = w.recorder.events
        for block, stays in stays_of(events).items():
            assert all(a.start < a.end <= b.start for a, b in zip(stays, stays[1:]))
            for t in {s.start for s in stays}:
                held = Counter(id for id, table in tables_at(events, t).items() for b in table if b == block)
                now = [s.readers for s in stays if s.start <= t < s.end]
                assert Counter(now[0] if now else ()) == held


# ---- Perfetto: what the trace event format asks for

def check_perfetto(file):
    "Every event has what its phase needs; slices of a row nest; a row and a process have a name"
    assert set(file) == {"traceEvents", "displayTimeUnit"} and file["displayTimeUnit"] in ("ms", "ns")
    assert json.loads(json.dumps(file)) == file
    number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool)
    rows, names = {}, set()
    for e in file["traceEvents"]:
        assert isinstance(e["name"], str) and e["name"] and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        assert number(e["ts"]) and e["ts"] >= 0
        kind, more = e["ph"], set(e) - {"ph", "name", "pid", "tid", "ts"}
        if kind == "X":
            assert more == {"dur", "args"} and number(e["dur"]) and e["dur"] >= 0
            rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["dur"]))
        elif kind == "C":
            assert more == {"args"} and e["args"] and all(number(x) and x >= 0 for x in e["args"].values())
        elif kind == "i":
            assert more == {"s"} and e["s"] in "tpg"
        else:
            assert kind == "M" and more == {"args"}
            key = dict(process_name="name", thread_name="name", thread_sort_index="sort_index")[e["name"]]
            assert set(e["args"]) == {key}
            names.add((e["name"], e["pid"], e["tid"]))
    for (pid, tid), slices in rows.items():
        assert ("thread_name", pid, tid) in names and ("process_name", pid, 0) in names
        slices.sort(key=lambda s: (s[0], -s[1]))
        assert all(a + n <= b + .002 for (a, n), (b, _) in zip(slices, slices[1:])), "slices of a row overlap"
    return rows


def test_perfetto_files_are_valid():
    for w in games(7, 15):
        events = w.recorder.events
        file = to_perfetto(events, w.manager.block_size)
        rows, steps = check_perfetto(file), steps_of(events)
        assert sum(len(x) for (pid, _), x in rows.items() if pid == 1) == len(steps)
        assert sum(len(x) for (pid, _), x in rows.items() if pid == 2) \
            == sum(s.kind != "idle" for spans in spans_of(events).values() for s in spans)
        counters = Counter(e["name"] for e in file["traceEvents"] if e["ph"] == "C")
        assert set(counters.values()) <= {len(steps)} and len(counters) == 4*bool(steps)
        n_live, told = 0, [e["args"] for e in file["traceEvents"] if (e["ph"], e["name"]) == ("C", "requests")]
        for _, name, _ in events:
            n_live += (name == "arrive") - (name in ("finish", "abort"))
            assert name != "step" or sum(told.pop(0).values()) == n_live
        ends = Counter(e["name"] for e in file["traceEvents"] if e["ph"] == "i")
        assert ends == Counter(r.finish_reason for r in w.requests)


def test_steps_that_overlap_have_rows_of_their_own():
    emit = Recorder(ManualClock())
    for start, end in [(0, 2), (1, 3), (2, 4), (3, 5)]:
        emit.clock.now = end
        emit("step", works=[("a", 1)], start=start)
    file = to_perfetto(emit.events)
    assert {tid: len(x) for (pid, tid), x in check_perfetto(file).items() if pid == 1} == {1: 2, 2: 2}


# ---- pictures

def test_pictures_of_anything():
    "Nothing, one event, any beginning and any end of a run: a picture, and the same one each time"
    events = a_run()
    some = [[], *([e] for e in events[:40]), *(events[i:] for i in range(0, len(events), 31)),
            *(events[:i] for i in range(0, len(events), 37))]
    for part in some:
        check_perfetto(to_perfetto(part, 4))
        text_steps(part), text_blocks(tables_at(part), 15)
        for draw in PICTURES:
            svg = draw(part)
            ET.fromstring(str(svg))
            assert svg.height > 0 and "nan" not in str(svg)
    for draw in PICTURES:
        assert str(draw(events)) == str(draw(list(events)))


def test_names_are_escaped():
    evil = '<script>&"\'\x00'
    events = [(t, name, {k: evil + x if k == "request" else [(evil + id, n) for id, n in x] if k == "works" else x
                         for k, x in f.items()}) for t, name, f in a_run()]
    for draw in PICTURES:
        assert "<script" not in str(draw(events))
    assert any("<script>&" in (w or "") for w in words(svg_gantt(events)))
    check_perfetto(to_perfetto(events))


def long_run(n):
    "Many requests in a large pool, one arriving at each step, with steps of all lengths"
    rnd, clock = Random(0), ManualClock()
    emit, alive = Recorder(clock), {}
    for i in range(n):
        emit("arrive", request=str(i), n_prompt=50)
        emit("admit", request=str(i), n_cached=0)
        emit("take", request=str(i), blocks=[1 + (7*i + k) % 4000 for k in range(6)])
        start, alive[str(i)] = clock(), 0
        clock.advance(rnd.expovariate(100))
        emit("step", works=[(id, 1 if k else 50) for id, k in alive.items()], start=start)
        for id in [*alive]:
            alive[id] += 1
            emit("token", request=id, n_output=alive[id])
            if alive[id] >= 20:
                emit("free", request=id, blocks=[1 + (7*int(id) + k) % 4000 for k in range(6)])
                emit("finish", request=id, reason="length")
                del alive[id]
    return emit.events


def test_long_recordings_stay_small_pictures():
    events = long_run(120)
    for draw in PICTURES:
        assert len(str(draw(events))) < 60_000
    assert "not shown: 72 more requests" in words(svg_gantt(events))
    assert any(re.search(r"drawn: 1 of every \d+ blocks, \d+ in all", w or "") for w in words(svg_block_map(events)))
    part = svg_gantt(events, window=(.5, .7))
    assert 5 < sum((w or "").startswith("request") for w in words(part)) < 48


def test_two_recordings_in_one():
    "By id, or by order where ids differ; the second is below the first"
    events = a_run()
    renamed = [(t, name, {k: f"other {x}" if k == "request" else [(f"other {i}", n) for i, n in x] if k == "works" else x
                          for k, x in f.items()}) for t, name, f in events]
    a, b = svg_gantt(events, events), svg_gantt(events, renamed, names=("real", "simulated"))
    assert str(a) == str(b)
    assert "of two bars, the upper is real, the lower simulated" in words(b)
    later = [(t + 1000, name, f | ({"start": f["start"] + 1000} if name == "step" else {})) for t, name, f in events]
    assert str(svg_gantt(events, later)) == str(a)  # each counts from its own beginning


def test_a_trace_draws_itself(tmp_path):
    t = Trace(ManualClock(), n_blocks=15, block_size=4)
    assert repr(t) == "<Trace: 0 events, 0 requests, 0 steps>" and ET.fromstring(t._repr_svg_()) is not None
    t.events = a_run()
    assert t._repr_svg_() == str(svg_gantt(t.events)) and str(t.latency()) == str(svg_latency(t.events))
    assert str(t.steps()) == str(svg_steps(t.events)) and str(t.blocks()) == str(svg_block_map(t.events))
    assert str(t.pool()) == str(svg_pool(t.events, 4, 15)) and str(t.gantt(t)) == str(svg_gantt(t.events, t.events))
    path = t.perfetto(tmp_path/"trace.json")
    assert json.loads(path.read_text(encoding="utf-8")) == to_perfetto(t.events, 4)
