"""Events: all that a picture or a number is made of"""
import re
from collections import Counter
from random import Random

import pytest
from common import Trouble, World, play, random_arrivals, random_policy, random_world

from pagedlm.core import EVENTS, ManualClock, SamplingParams
from pagedlm.engine import Engine
from pagedlm.request import Request

MISHAPS = dict(p_abort=.05, p_lose=.05, p_fail=.1)


def games(seed, n=60, fixed={}, **mishaps):
    rnd = Random(seed)
    for i in range(n):
        world = random_world(rnd, **dict(policy=random_policy(rnd)) if i % 2 else {}, **fixed)
        yield play(world, rnd, random_arrivals(rnd, world), **mishaps)


def life(world, request):
    "What happened to one request, a letter for each event"
    return "".join(name[0] for name, f in world.events
                   if name in LETTERS and f["request"] == request.id).replace("a", "A", 1)


LETTERS = ("arrive", "admit", "token", "preempt", "abort", "finish")


def test_all_events_happen_and_none_is_unknown():
    "`World.emit` refuses events and fields that are not in `EVENTS`"
    seen = set()
    for w in games(0, **MISHAPS):
        seen |= set(w.counts())
    assert seen == set(EVENTS)


@pytest.mark.parametrize("mishaps", [{}, MISHAPS])
def test_a_life_in_order(mishaps):
    "Arrive; admitted, some tokens, preempted, again and again; the last token finishes"
    for w in games(1, **mishaps):
        for r in w.requests:
            end = "a" if r.finish_reason == "abort" else "f"
            whole = r"A((at*p)*|(at*p)*at*)" + end if r.finish_reason in ("abort", "error") else r"A(at*p)*at+f"
            assert re.fullmatch(whole, life(w, r)), life(w, r)
            mine = [(name, f) for name, f in w.events if f.get("request") == r.id]
            assert mine[0] == ("arrive", dict(request=r.id, n_prompt=r.n_prompt))
            assert [f["n_output"] for name, f in mine if name == "token"] == list(range(1, r.n_output + 1))
            cached = [f["n_cached"] for name, f in mine if name == "admit"]
            assert r.n_cached == (cached[0] if cached else None)
            assert sum(name == "preempt" for name, _ in mine) == r.n_preempted
            assert end == "a" or mine[-1] == ("finish", dict(request=r.id, reason=r.finish_reason))


def test_steps_are_the_plans():
    "What ran, when it began; the tokens computed are those known, less the last, less what was cached"
    for w in games(2, fixed=dict(ahead=0)):
        steps = [f for name, f in w.events if name == "step"]
        assert [[n for _, n in f["works"]] for f in steps] == [[x.n for x in p.works] for p in w.plans]
        assert [f["start"] for f in steps] == list(range(len(steps)))  # `World.run` takes a second
        for r in w.requests:
            n = sum(n for f in steps for id, n in f["works"] if id == r.id)
            least = len(r.tokens) - 1 - (r.n_cached or 0)
            assert n == least if not r.n_preempted else n >= least


def test_a_step_that_failed_is_no_event():
    w = World()
    w.add([1, 2], max_tokens=2)
    w.trouble = "after"
    w.step()
    assert not w.counts()["step"] and not w.counts()["token"]
    w.drain().check_done()
    assert w.counts()["step"] == w.counts()["token"] == 2


@pytest.mark.parametrize("mishaps", [{}, MISHAPS])
def test_events_replayed_give_the_tables(mishaps):
    "Whoever listens to take, share, free and evict knows all tables and how many blocks are cached, at any time"
    rnd = Random(3)
    for _ in range(60):
        w = random_world(rnd)
        replay = Replay(w)
        w.step = lambda step=w.step, replay=replay: (step(), replay.check())[0]
        play(w, rnd, random_arrivals(rnd, w), **mishaps)


class Replay:
    def __init__(self, world):
        self.world, self.n, self.tables, self.readers = world, 0, {}, {}

    def check(self):
        for name, f in self.world.events[self.n:]:
            getattr(self, name, lambda f: None)(f)
        self.n = len(self.world.events)
        assert {id: t for id, t in self.tables.items() if t} == self.world.manager.tables
        refs = self.world.manager.pool.refs
        assert {b: n for b, n in self.readers.items() if n} == {b: n for b, n in enumerate(refs) if n}

    def take(self, f):
        assert not any(self.readers.get(b) for b in f["blocks"]) and f["blocks"]
        self.share(f)

    def share(self, f):
        self.tables.setdefault(f["request"], []).extend(f["blocks"])
        for b in f["blocks"]:
            self.readers[b] = self.readers.get(b, 0) + 1

    def free(self, f):
        assert self.tables.pop(f["request"]) == f["blocks"]
        for b in f["blocks"]:
            self.readers[b] -= 1

    def evict(self, f):
        assert not self.readers.get(f["block"])


# ---- the loop itself

def test_arrival_is_on_the_clock():
    w = World()
    w.engine.clock.advance(2.5)
    assert w.add([1]).arrival == 2.5
    w.step()
    assert w.add([1]).arrival == 3.5


def test_clock():
    clock = ManualClock(3)
    clock.advance(.5)
    assert clock() == clock.now == 3.5 and ManualClock()() == 0


def test_drain_yields_what_each_step_brought():
    w = World()
    requests = [w.add([1, i], max_tokens=i) for i in (1, 2, 3)]
    news = [[(r.id, len(ids)) for r, ids in step] for step in w.engine.drain()]
    assert news == [[("r0", 1), ("r1", 1), ("r2", 1)], [("r1", 1), ("r2", 1)], [("r2", 1)]]
    assert [r.n_output for r in requests] == [1, 2, 3] and list(w.engine.drain()) == []


def test_nothing_to_do_runs_nothing():
    w = World()
    assert w.engine.step() == [] and not w.plans and not w.events


def test_interrupt_passes_through():
    "Not only exceptions: Ctrl-C in the middle of a step, then on, as if it had not been"
    for error in Trouble, KeyboardInterrupt:
        w = World()
        w.add([1, 2, 3], max_tokens=4)
        w.step()

        def run(plan):
            w.runner.rows.forget()
            raise error
        good, w.engine.run = w.engine.run, run
        with pytest.raises(error):
            w.engine.step()
        w.engine.run = good
        w.drain().check_done()


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_trouble_while_ids_are_written_down(at):
    "A stopping rule that raises once: its own answer and its neighbours' end as if it had not"
    w, calls = World(), []

    def watch(ids):
        calls.append(ids)
        if len(calls) == at:
            w.exact = False  # the step's blocks stay in the tables, as after any failed step
            raise Trouble
    w.add([1, 2, 3], max_tokens=at, watch=watch)
    w.add([2, 2, 3, 257, 258], max_tokens=9)
    w.add([1, 2, 3, 1], max_tokens=7)
    w.drain()
    assert len(calls) >= at
    assert [r.output for r in w.requests[1:]] == [w.expected(r)[0] for r in w.requests[1:]]
    # an interrupt may come between the last id and the rule that ends the answer: then one id more, not all that fit
    assert w.requests[0].n_output in (at, at + 1)
    assert w.manager.pool.n_free == w.manager.pool.n_blocks - 1


def test_silent_by_default():
    "`emit` and the clock have defaults"
    w = World()
    r = Engine(w.scheduler, w.runner).add(Request("a", [1], SamplingParams(max_tokens=1)))
    engine = Engine(w.scheduler, w.runner)
    assert list(engine.drain()) == [[(r, r.output)]] and r.arrival > 0


# ---- one request that makes every step raise which it is in

def poison(world, at, n_tokens, late):
    "Steps raise with the `at`-th request in them, once it knows so many tokens; late: only when their ids are fetched"
    good, raised = world.engine.run, []

    def fail():
        raised.append(len(world.plans))
        raise Trouble

    def run(plan):
        ids = good(plan)
        rows = [world.scheduler.by_row[w.row] for w in plan.works]
        if not any(world.requests.index(r) == at and len(r.tokens) >= n_tokens for r in rows):
            return ids
        return fail if late else fail()
    world.exact, world.engine.run = False, run
    return raised


@pytest.mark.parametrize("late", [False, True])
def test_who_makes_steps_raise_is_found_and_nobody_else(late):
    rnd, n_found = Random(late), 0
    for _ in range(80):
        w = random_world(rnd)
        at, n_tokens = rnd.randrange(4), rnd.choice([0, 0, 3, 8, 12])  # in its prompt; then, or while it answers
        raised = poison(w, at, n_tokens, late)
        play(w, rnd, random_arrivals(rnd, w), p_abort=rnd.choice([0, .02]))
        ended = [i for i, r in enumerate(w.requests) if r.error]
        assert ended in ([], [at]) and (not raised or ended or w.requests[at].finish_reason == "abort")
        n_found += len(ended)
    assert n_found > 30


def test_it_is_found_among_many_in_a_few_steps():
    for at in range(0, 64, 9):
        w = World(n_blocks=200, max_num_seqs=64, max_num_batched_tokens=200)
        raised = poison(w, at, 5, False)
        for i in range(64):
            w.add([1, 2, i % 3], max_tokens=4)
        w.drain().check_done()
        assert len(raised) == 7 and len(w.plans) <= 1 + 1 + 12 + 4 and [r for r in w.requests if r.error] == [w.requests[at]]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_stopping_rule_that_always_raises(n):
    "Its neighbours hear of every id, and of their end; nothing is told twice"
    w, heard = World(), Counter()

    def watch(ids):
        w.exact = False
        if w.requests[1].n_output >= n:
            raise Trouble
    for prompt, max_tokens, rule in (([1, 2, 3], 1, None), ([2, 2], 9, watch), ([3, 1, 2, 1], n, None), ([1], 9, None)):
        w.add(prompt, max_tokens=max_tokens, watch=rule)
    while len(w.scheduler):
        heard.update({r.id: len(ids) for r, ids in w.step()})
    assert [r.finish_reason for r in w.requests] == ["length", "error", "length", "length"]
    for r in (w.requests[0], *w.requests[2:]):
        assert (r.output, r.finish_reason) == w.expected(r) and heard[r.id] == r.n_output
    assert w.manager.pool.n_free == w.manager.pool.n_blocks - 1 and isinstance(w.requests[1].error, Trouble)


def test_who_listens_may_raise_for_one():
    w = World()
    for prompt in ([1, 2, 3], [2, 2], [3, 1]):
        w.add(prompt, max_tokens=5)
    emit = w.scheduler.emit

    def fails(name, **fields):
        emit(name, **fields)
        if name == "token" and fields["request"] == "r1":
            w.exact = False
            raise Trouble
    w.scheduler.emit = fails
    w.drain()
    assert [r.finish_reason for r in w.requests] == ["length", "error", "length"]
    assert all((r.output, r.finish_reason) == w.expected(r) for r in (w.requests[0], w.requests[2]))


@pytest.mark.parametrize("ahead", [0, 2])
def test_if_everybody_raises_everybody_ends(ahead):
    "Those who wait, too, after a number of steps that does not depend on how many there are; a newcomer is tried again"
    w = World(ahead=ahead, n_blocks=50)
    w.exact, w.engine.patience, good = False, 10, w.engine.run

    def lost(plan):
        raise Trouble
    w.engine.run, requests = lost, [w.add([1, i], max_tokens=3) for i in (1, 2, 3)*10]
    for n_steps in range(11):
        if not len(w.scheduler):
            break
        w.step()
    assert n_steps == 10 and {r.finish_reason for r in requests} == {"error"} and not w.engine.trials
    assert w.manager.pool.n_free == w.manager.pool.n_blocks - 1
    w.engine.run = good
    w.add([2, 1], max_tokens=3)
    w.drain().check_done()


def test_a_scheduler_that_raises_for_one():
    "Its policy does, and who that is about is found in the same way; if it is nobody, all end"
    w = World()
    for prompt in ([1, 2, 3], [2, 2], [3, 1]):
        w.add(prompt, max_tokens=5)
    w.step()
    w.exact, whole = False, w.scheduler.policy.mix

    def mix(r):
        if r.id == "r1":
            raise Trouble
        return whole(r)
    w.scheduler.policy = w.scheduler.policy._replace(mix=mix)
    w.drain()
    assert [r.finish_reason for r in w.requests] == ["length", "error", "length"]
    assert all((r.output, r.finish_reason) == w.expected(r) for r in (w.requests[0], w.requests[2]))


def test_patience_is_for_steps_in_a_row():
    "Many bad requests, but each time somebody else's step was fine"
    w = World(n_blocks=100)
    w.exact, w.engine.patience, good = False, 6, w.engine.run

    def run(plan):
        ids = good(plan)
        if any(len(w.scheduler.by_row[work.row].tokens) > 5 for work in plan.works):
            raise Trouble
        return ids
    w.engine.run = run
    for i in range(1, 31):
        w.add([1, i % 3 + 1, *[2]*(3*(i % 3 == 0))], max_tokens=2)
    w.drain().check_done()
    assert [bool(r.error) for r in w.requests] == [i % 3 == 0 for i in range(1, 31)]
