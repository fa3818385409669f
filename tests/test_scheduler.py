"""Cases that schedulers got wrong elsewhere, on a model that is only arithmetic"""
from collections import Counter
from itertools import product
from random import Random

import pytest
from common import World, answer, play, random_arrivals, random_world, sweep

from pagedlm.core import SamplingParams, cdiv
from pagedlm.request import Status
from pagedlm.scheduler import Policy, policies

B = 4  # block size of every World here unless said otherwise


def ids_of(n, start=1):
    "A prompt of `n` ids"
    return [(start + i*i) % 6 + 1 for i in range(n)]


# ---- never fits, fits at first

def test_what_can_never_fit_is_refused_in_words():
    "Case 1: a pool of 8 blocks, one of them null"
    w = World(n_blocks=8, max_model_len=128)
    with pytest.raises(ValueError, match=r"50 tokens.* 27 .*max_model_len=128.*7 blocks x 4"):
        w.add(ids_of(50))
    short = w.add(ids_of(3), max_tokens=5)
    w.drain().check_done()
    assert short.finish_reason == "length" and short.n_output == 5


@pytest.mark.parametrize("n_prompt", [20, 26, 27])
@pytest.mark.parametrize("max_tokens", [None, 100])
def test_what_outgrows_the_pool_ends(n_prompt, max_tokens):
    "Case 1, variant: it fits at first"
    w = World(n_blocks=8, max_model_len=128)
    r, other = w.add(ids_of(n_prompt), max_tokens=max_tokens), w.add(ids_of(5, 2), max_tokens=3)
    w.drain().check_done()
    assert (r.finish_reason, r.n_output) == ("length", 28 - n_prompt) and other.n_output == 3


def test_longest_prompt():
    for limit in (2, 7, 28, 1000):
        w = World(n_blocks=8, max_model_len=limit)
        n = min(limit, 28)
        assert w.add(ids_of(n - 1)).n_prompt == n - 1
        with pytest.raises(ValueError, match=f"{n} tokens, but at most {n - 1} "):
            w.add(ids_of(n))
        w.drain().check_done()


def test_empty_prompt():
    "Case 26"
    w = World()
    running = w.add([1], max_tokens=9)
    w.step()
    with pytest.raises(ValueError, match="0 tokens"):
        w.add([])
    assert w.drain().check_done() and running.n_output == 9 and w.counts()["arrive"] == 1


def test_ids_are_unique_while_in_use():
    w = World(max_num_seqs=1)
    running, waiting = w.add([1]), w.add([2])
    w.step()
    for r in running, waiting:
        with pytest.raises(ValueError, match=r.id):
            w.add([3], id=r.id)
    w.drain()
    w.add([3], id=running.id)
    w.drain().check_done()
    with pytest.raises(ValueError, match=r.id):
        w.engine.add(r)  # a request is used once


@pytest.mark.parametrize("wrong", [dict(max_num_seqs=0), dict(max_chunk=0), dict(max_model_len=0),
                                   dict(max_num_seqs=17, max_num_batched_tokens=16)])
def test_sizes(wrong):
    name, n = list(wrong.items())[0]
    with pytest.raises(ValueError, match=f"{name}={n}"):
        World(**wrong)


# ---- preemption

def test_preemption_changes_no_answer():
    "Case 3, at all remainders of its length: tokens, counts and reasons are those of a pool that is big enough"
    remainders = set()
    for n_blocks, late, chunk in product(range(8, 13), range(6), (None, 3)):
        w = World(n_blocks=n_blocks, max_chunk=chunk)
        a = w.add(ids_of(5), max_tokens=20)
        for _ in range(late):
            w.step()
        b = w.add(ids_of(5, 3), max_tokens=20)
        w.drain().check_done()
        assert [(r.n_prompt, r.n_output, r.finish_reason) for r in (a, b)] == [(5, 20, "length")]*2
        lengths = {}
        for name, f in w.events:
            if name == "token":
                lengths[f["request"]] = 5 + f["n_output"]
            if name == "preempt":
                remainders.add(lengths[f["request"]] % B)
        assert [r.n_preempted for r in (a, b)] == [0, w.counts()["preempt"]]
    assert remainders == set(range(B))


def test_the_youngest_yields_and_the_oldest_comes_back_first():
    "Three that need 5 blocks each, of 8; a fourth would fit at any time, but does not overtake"
    w = World(n_blocks=9, max_num_seqs=3)
    for i in range(3):
        w.add(ids_of(5, i), max_tokens=14)
    w.add([1], max_tokens=1)
    w.drain().check_done()
    story = [name + f["request"] for name, f in w.events if name in ("admit", "preempt", "finish")]
    assert story == ["admitr0", "admitr1", "admitr2", "preemptr2", "preemptr1", "finishr0", "admitr1", "admitr2",
                     "finishr1", "admitr3", "finishr3", "finishr2"]


def test_a_victim_gives_its_tokens_back():
    "Planned as v, d, e, then f: e takes the last of a budget of 4, v yields to it, and f runs on what v gives back"
    w = World(n_blocks=12, max_num_batched_tokens=4, caching=False, max_pause=1000, policy=Policy(
        order=lambda r: r.number, victim=lambda r: r.id != "v", mix=lambda r: "vdef".index(r.id)))
    for id, n in zip("dvfe", (1, 1, 1, 20)):
        w.add([1]*n, id=id, max_tokens=9)
    w.drain().check_done()
    since = next(i for i, (name, _) in enumerate(w.events) if name == "preempt")
    works = next(f["works"] for name, f in w.events[since:] if name == "step")
    assert works == [("d", 1), ("e", 2), ("f", 1)]


# ---- prefix cache

@pytest.mark.parametrize("n_prompt", [1, 3, 4, 5, 7, 8, 9, 12])
def test_whole_prompt_cached(n_prompt):
    "Case 5: sent again when it is done, and while it runs; at least one token is computed"
    for steps, max_tokens in product((1, 2, 100), (1, 5)):
        w = World()
        first = w.add(ids_of(n_prompt), max_tokens=max_tokens)
        for _ in range(steps):
            w.step()
        again = [w.add(ids_of(n_prompt), max_tokens=max_tokens) for _ in range(2)]
        w.drain().check_done()
        assert again[0].output == again[1].output == first.output
        assert {r.n_cached for r in again} == {(n_prompt - 1)//B*B} and first.n_cached == 0


def test_two_identical_prefixes_in_one_step():
    "Case 7: the copies that got no name are freed and taken by a third while the others read theirs"
    for order in product([3, 10], repeat=2):
        w = World(n_blocks=14, max_num_batched_tokens=32)
        twins = [w.add(ids_of(12), max_tokens=n) for n in order]
        w.step()
        assert w.manager.tables == {"r0": [1, 2, 3], "r1": [4, 5, 6]}
        w.add(ids_of(26, 2), max_tokens=10)
        w.drain().check_done()
        assert [r.n_output for r in twins] == list(order)


def test_caching_off_shares_nothing():
    w = World(caching=False)
    for _ in range(3):
        w.add(ids_of(9), max_tokens=3)
        w.drain()
    w.check_done()
    assert not w.counts()["share"] and not w.manager.pool.named


def test_prompts_that_differ_by_256():
    "Case 9"
    w = World()
    for shift in (0, 256, 2**32):
        prompt = ids_of(12)
        prompt[1] += shift
        w.add(prompt, max_tokens=3)
        w.drain()
    w.check_done()
    assert [r.n_cached for r in w.requests] == [0, 0, 0]


# ---- chunks

@pytest.mark.parametrize("n_prompt", range(1, 3*B + 2))
def test_every_prompt_chunk_and_length(n_prompt):
    "Case 11: `World` checks after each step that a request holds ceil(computed / B) blocks"
    prompt = ids_of(n_prompt)
    for chunk, max_tokens in product(range(1, 2*B + 1), [1, 2, B, B + 1]):
        w = World(max_chunk=chunk)
        r = w.add(prompt, max_tokens=max_tokens)
        w.drain().check_done()
        taken = sum(len(f["blocks"]) for name, f in w.events if name == "take")
        assert taken == cdiv(n_prompt + r.n_output - 1, B)            # the last id is never written
        assert len(w.plans) == cdiv(n_prompt, chunk) + r.n_output - 1


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 30])
def test_chunks_tile_the_prompt(chunk):
    "Case 12, as far as it is the scheduler's"
    w = World(max_num_batched_tokens=32, max_chunk=chunk)
    r = w.add(ids_of(30), max_tokens=4)
    w.drain().check_done()
    works = [p.works[0] for p in w.plans]
    assert [i for x in works for i in range(x.start, x.start + x.n)] == list(range(33))
    assert [i for x in works if x.ids for i in x.ids] == r.tokens[:30]  # then the runner knows its own
    assert [x.sample for x in works] == [False]*(cdiv(30, chunk) - 1) + [True]*4


# ---- everybody gets on

def test_decoding_goes_on_while_prompts_arrive():
    "Case 16: a running request that was not preempted gets a token in every step"
    w = World(n_blocks=200, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=120)
    first = w.add(ids_of(3), max_tokens=100)
    w.step()
    for i in range(50):
        w.add(ids_of(40, i), max_tokens=2)
        before = first.n_output
        w.step()
        assert first.n_output == before + 1
    w.drain().check_done()
    assert all(r.n_preempted == 0 for r in w.requests)


def test_three_times_as_many_requests_as_rows():
    "Case 16: all finish, `World` checks that no step runs more than `max_num_seqs`, and decodes never wait"
    w = World(n_blocks=30, max_num_seqs=4, max_num_batched_tokens=8)
    for i in range(12):
        w.add(ids_of(3 + 2*i, i), max_tokens=5 + i)
    while len(w.scheduler):
        decoding = {r: r.n_output for r in w.scheduler.running.values() if r.n_missing == 1}
        w.step()
        assert all(r.n_output == n + 1 for r, n in decoding.items() if r.status is not Status.WAITING)
    w.check_done()
    first_tokens = [f["request"] for name, f in w.events if name == "token" and f["n_output"] == 1]
    assert first_tokens == [f"r{i}" for i in range(12)]                # first come, first served


def test_policies_order_all_three_ways():
    "Shortest prompt first, the longest output yields, chunks before decodes"
    w = World(n_blocks=10, max_num_seqs=3, max_num_batched_tokens=4, caching=False, policy=Policy(
        order=lambda r: r.n_prompt, victim=lambda r: -r.n_output, mix=lambda r: r.n_missing == 1))
    for n in (9, 5, 2, 7):
        w.add(ids_of(n), max_tokens=12)
    admits, yields = [], []
    while len(w.scheduler):
        longest = max([r.n_output for r in w.scheduler.running.values()], default=0)
        w.step()
        for name, f in w.events[w.since:]:
            r = w.requests[int(f["request"][1:])] if "request" in f else None
            if name == "admit" and not r.n_preempted:
                admits.append(r.n_prompt)
            if name == "preempt":
                yields.append(longest - r.n_output)
        waits = [r for r in w.scheduler.running.values() if r.n_missing > 1]
        assert not waits or w.plans[-1].n_tokens == 4                 # a chunk left over: the budget was used up
    w.check_done()
    assert admits == [2, 5, 7, 9] and yields and set(yields) == {0}


@pytest.mark.parametrize("seed", range(4))
def test_random_games(seed):
    total = sweep(Random(seed), 250)
    assert total["preempt"] > 80 and total["share"] > 150 and total["evict"] > 1000


@pytest.mark.parametrize("seed", range(4))
def test_no_policy_changes_an_answer(seed):
    total = sweep(Random(10 + seed), 250, policy=True)
    assert total["preempt"] > 80


# ---- mishaps

def moments():
    "Worlds that stand still after each of their steps: requests running, mid-chunk, waiting, about to end"
    for stop in range(1, 100):
        w = World(n_blocks=9, max_num_seqs=3, max_chunk=3)
        for i, n in enumerate((5, 5, 11, 4, 9)):
            w.add(ids_of(n, i), max_tokens=(6, 1, 4, 9, 2)[i])
        for _ in range(stop):
            w.step()
        if not len(w.scheduler):
            return
        yield w
    raise AssertionError("it never ends")


def test_abort_at_every_moment():
    "Case 14, as far as it is the scheduler's: waiting, mid-chunk, decoding, before its last token"
    found = set()
    for i in range(5):
        for w in moments():
            r = w.requests[i]
            found.add((r.status, r.n_missing > 1, r.n_preempted > 0, r.n_output > 0))
            w.engine.abort(r.id)
            w.check()
            if r.finish_reason == "abort":
                assert r.status is Status.FINISHED and r.id not in w.manager.tables
            w.engine.abort(r.id)  # again: no error
            w.drain().check_done()
    R, W = Status.RUNNING, Status.WAITING
    assert {(R, True, False, False), (R, False, False, True), (W, True, False, False), (W, True, True, True)} <= found
    World().engine.abort("nobody")


def test_abort_all_at_every_moment():
    for w in moments():
        for r in w.requests:
            w.engine.abort(r.id)
        assert w.step() == [] and w.check_done()
        w.add(ids_of(9), max_tokens=5)
        w.drain().check_done()


def test_abort_while_it_runs():
    "From inside `run`, as a thread may: the id that comes is nobody's"
    for w in moments():
        victim = next(iter(w.scheduler.running), None)
        run, w.engine.run = w.engine.run, lambda plan: (run(plan), w.engine.abort(victim))[0]
        news = w.step()
        w.engine.run = run
        assert all(r.id != victim for r, _ in news)
        w.drain().check_done()


def test_reset_at_every_moment():
    for w in moments():
        w.engine.reset()
        assert not w.manager.pool.named and w.check_done()
        assert all(r.finish_reason for r in w.requests)
        w.add(ids_of(9), max_tokens=5)
        w.drain().check_done()


@pytest.mark.parametrize("trouble", ["before", "after"])
def test_trouble_at_every_moment(trouble):
    "`run` raises, before or after it took the plan in; then step again, or reset"
    for w in moments():
        w.trouble = trouble
        assert w.step() == []
        w.drain().check_done()
    for w in moments():
        w.trouble = trouble
        w.step()
        w.engine.reset()
        assert w.check_done()
        w.add(ids_of(9), max_tokens=5)
        w.drain().check_done()


def test_rows_lost_at_every_moment():
    for w in moments():
        w.lose_rows()
        w.drain().check_done()


@pytest.mark.parametrize("seed", range(4))
def test_random_mishaps(seed):
    rnd = Random(20 + seed)
    for mishaps in (dict(p_lose=.3), dict(p_fail=.3), dict(p_abort=.1), dict(p_abort=.05, p_lose=.1, p_fail=.2)):
        sweep(rnd, 80, **mishaps)
        sweep(rnd, 80, policy=True, **mishaps)


def test_wrong_number_of_ids():
    for ids in [], [1, 2]:
        w = World()
        r = w.add(ids_of(5), max_tokens=3)
        w.step()
        w.engine.run = lambda plan: ids
        with pytest.raises(ValueError, match=f"{len(ids)} ids for a plan that samples 1"):
            w.engine.step()
        assert r.n_computed == 5 and r.n_output == 1
        w.engine.reset()
        w.check_done()


# ---- how an answer ends

def test_reasons_to_stop():
    prompt = next(p for p in (ids_of(5, i) for i in range(50)) if 0 in answer(p, SamplingParams(
        max_tokens=12, ignore_eos=True), 40)[0][1:8])
    said = answer(prompt, SamplingParams(max_tokens=12, ignore_eos=True), 40)[0]
    eos = said.index(0)
    cases = [
        (dict(ignore_eos=True), None, ("length", None, 12)),
        (dict(ignore_eos=False), None, ("stop", None, eos + 1)),
        (dict(ignore_eos=False, max_tokens=eos + 1), None, ("stop", None, eos + 1)),  # the last allowed id is EOS
        (dict(ignore_eos=False, max_tokens=eos), None, ("length", None, eos)),
        (dict(ignore_eos=True, stop_token_ids=[said[0]]), None, ("stop", said[0], 1)),
        (dict(ignore_eos=True, stop_token_ids=[0]), None, ("stop", 0, eos + 1)),
        (dict(ignore_eos=True), lambda ids: "enough", ("stop", "enough", 1))]
    for params, watch, (reason, why, n) in cases:
        w = World()
        r = w.add(prompt, watch=watch, **dict(max_tokens=12) | params)
        w.drain()
        assert (r.finish_reason, r.stop_reason, r.output) == (reason, why, said[:n])
        assert w.manager.pool.n_free == w.manager.pool.n_blocks - 1


@pytest.mark.parametrize("name", policies)
def test_every_policy_gives_the_same_answers(name):
    "Whoever goes first, everybody ends, with the oracle's answer"
    total = Counter()
    for seed in range(60):
        rnd = Random(seed)
        w = random_world(rnd, policy=policies[name])
        arrivals = [dict(a, priority=rnd.randint(-1, 1)) for a in random_arrivals(rnd, w)]
        total += play(w, rnd, arrivals, p_fail=.05).counts()
    assert total["preempt"] > 20 and total["finish"] > 100


def test_prefill_first_lets_newcomers_go_before_decodes():
    w = World(n_blocks=40, max_num_seqs=3, max_num_batched_tokens=8, policy=policies["prefill_first"])
    old = w.add([1, 2], max_tokens=9)
    w.step()
    w.step()
    new = w.add([2]*20, max_tokens=2)
    before = old.n_output
    for n in (8, 16):
        w.step()
        assert (new.n_computed, old.n_output) == (n, before)
    w.step()  # its last four, and what is left goes to the other
    assert (new.n_output, old.n_output) == (1, before + 1)
    w.drain().check_done()


# ---- how long anybody waits

def pauses(world, request):
    "Steps between its tokens, while it ran all the time"
    at = [i for i, (name, f) in enumerate(steps_and_tokens(world)) if name == "token" and f["request"] == request.id]
    steps = [sum(name == "step" for name, _ in steps_and_tokens(world)[:i]) for i in at]
    return [b - a for a, b in zip(steps, steps[1:])]


def steps_and_tokens(world):
    return [(name, f) for name, f in world.events if name in ("step", "token")]


@pytest.mark.parametrize("name", policies)
@pytest.mark.parametrize("max_pause", [1, 2, 8])
def test_a_decode_is_never_passed_over_for_long(name, max_pause):
    "Case 16: a 40-token prompt in each of 50 steps; then three times as many requests as rows"
    w = World(n_blocks=200, policy=policies[name], max_num_batched_tokens=8, max_pause=max_pause)
    old = w.add([1, 2, 3], max_tokens=30)
    for i in range(50):
        w.add(ids_of(40, i), max_tokens=2)
        w.step()
        assert len(w.scheduler.running) <= 4
    w.drain().check_done()
    assert max(pauses(w, old)) <= (max_pause if name == "prefill_first" else 1)
    many = [w.add(ids_of(5, i), max_tokens=3) for i in range(12)]
    w.drain().check_done()
    assert all(r.finish_reason == "length" for r in many)


def test_urgent_requests_take_rows_and_blocks_of_others():
    for n_blocks, rows in ((40, 2), (8, 4)):  # no row; no block
        w = World(n_blocks=n_blocks, max_num_seqs=rows, policy=policies["priority"])
        low = [w.add(ids_of(8, i), max_tokens=8, priority=2 + i) for i in range(2)]
        for _ in range(3):
            w.step()
        assert all(r.status is Status.RUNNING for r in low)
        equal = w.add(ids_of(8, 3), max_tokens=2, priority=3)
        w.step()
        assert not any(r.n_preempted for r in low) and equal.status is Status.WAITING
        urgent = w.add(ids_of(8, 4), max_tokens=2, priority=0)
        w.step()
        w.step()
        assert urgent.status is Status.RUNNING and (low[0].n_preempted, low[1].n_preempted) == (0, 1)
        w.drain().check_done()
        done = [f["request"] for name, f in w.events if name == "finish"]
        assert done.index(urgent.id) < done.index(low[1].id)


def test_nobody_is_ousted_in_vain():
    "What the urgent one needs is more than the less urgent ones hold: they go on"
    w = World(n_blocks=8, max_num_seqs=4, policy=policies["priority"])
    high = w.add(ids_of(14, 1), max_tokens=6, priority=0)
    low = w.add(ids_of(3, 2), max_tokens=6, priority=2)
    w.step()
    urgent = w.add(ids_of(14, 3), max_tokens=2, priority=1)
    w.step()
    assert low.n_preempted == 0 and urgent.status is Status.WAITING
    w.drain().check_done()
    assert high.finish_reason == "length"


@pytest.mark.parametrize("seed", range(3))
def test_priorities_at_random(seed):
    rnd, total = Random(seed), Counter()
    for _ in range(60):
        world = random_world(rnd, policy=policies["priority"])
        arrivals = [a | dict(priority=rnd.choice([0, 1, 5])) for a in random_arrivals(rnd, world)]
        total += play(world, rnd, arrivals, **rnd.choice([{}, dict(p_abort=.03, p_lose=.05, p_fail=.05)])).counts()
    assert total["preempt"] > 30


def test_twenty_thousand_requests_leave_nothing_behind():
    "Every container is as large as before"
    def sizes(world):
        s, m = world.scheduler, world.manager
        return [len(x) for x in (s.waiting._heap, s.waiting._live, s.running, s.by_row, s.under_way, s.rows._untold, s.rows._free,
                                 m.tables, m._n_named, world.engine.flights)]
    w = World(n_blocks=30, max_num_seqs=8, max_num_batched_tokens=64)
    w.check_plan = w.check = lambda *_: None  # they look at all requests there ever were
    rnd = Random(0)

    def some(n):
        for i in range(n):
            r = w.add([rnd.randrange(200) for _ in range(rnd.randint(1, 6))], max_tokens=rnd.randint(1, 2))
            if i % 7 == 0:
                w.engine.abort(r.id)
            if i % 3 == 0:
                w.engine.step()
            w.requests.clear()
            w.events.clear()
            w.plans.clear()
        while len(w.scheduler):
            w.engine.step()
    some(500)
    before = sizes(w)
    some(20_000)
    assert sizes(w) == before and len(w.scheduler.rows._gone) <= 16
    pool = w.manager.pool
    pool.check()
    assert pool.n_free == 29 and len(pool.named) <= 29


def test_an_id_is_one_requests_at_a_time():
    "Waiting or running, its id is taken, and whoever tries changes nothing; when it is done or taken back, it is free"
    w = World(max_num_seqs=1)
    running, waiting = (w.add(ids_of(5), max_tokens=3, id=id) for id in "ab")
    for steps in range(2):
        for id in "ab":
            with pytest.raises(ValueError, match=f"request {id}: id in use"):
                w.add(ids_of(4), id=id)
        assert len(w.scheduler) == 2
        w.step()
    assert w.scheduler.running == {"a": running}
    w.engine.abort("b")
    again = w.add(ids_of(4), max_tokens=1, id="b")
    w.drain()
    w.add(ids_of(4), max_tokens=1, id="a")
    w.drain()
    assert waiting.finish_reason == "abort" and again.finish_reason == running.finish_reason == "length"


def test_hits_are_counted():
    w = World()
    for _ in range(2):
        w.add(ids_of(9), max_tokens=1)
        w.drain()
    assert (w.manager.n_asked, w.manager.n_found) == (18, 8)
    assert [r.n_cached for r in w.requests] == [0, 8]
    w.add(ids_of(9), max_tokens=1, skip_reading_prefix_cache=True)
    w.drain().check_done()
    assert w.requests[-1].n_cached == 0 and w.manager.n_found == 8
