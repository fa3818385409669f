"""A model that is only arithmetic, engines to try things on, planted bugs. Imports no torch"""
import faulthandler
import signal
import subprocess
import sys
import warnings
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from multiprocessing import get_context
from pathlib import Path

from pagedlm.blocks import BlockManager, BlockPool, WindowManager, real
from pagedlm.core import EVENTS, ManualClock, SamplingParams, cdiv
from pagedlm.engine import Engine
from pagedlm.request import Request, Status
from pagedlm.scheduler import Policy, Scheduler, fcfs

EOS = 0                            # of the arithmetic model; it says 0 … 6
IDS = 1, 2, 3, 257, 258, 2**32 + 1  # what its prompts are made of


# ---- the arithmetic model: like K and V, what it keeps of a token depends on the token and on all before it,
# or on a window of them, itself included

def remember(before, id, window=None):
    "What it keeps of `id`, coming after tokens of which it kept `before`"
    return hash((id, *(before if window is None else before[max(0, len(before) - window + 1):])))


def predict(kept, window=None):
    "The next id, from what it kept of all tokens"
    return hash(tuple(kept if window is None else kept[-window:])) % 7


def remember_all(tokens, kept=(), window=None):
    "What it keeps of each of `tokens`, of which the first were done before"
    kept = list(kept)
    for id in tokens[len(kept):]:
        kept.append(remember(kept, id, window))
    return kept


def answer(prompt, params, limit, window=None):
    "The oracle: ids and finish reason for one prompt, with no engine at all"
    kept, ids = remember_all(prompt, window=window), []
    while True:
        ids.append(predict(kept, window))
        kept.append(remember(kept, ids[-1], window))
        if ids[-1] == EOS and not params.ignore_eos:
            return ids, "stop"
        if len(ids) == params.max_tokens or len(kept) >= limit:
            return ids, "length"


class FakeRunner:
    "Runs plans on the arithmetic model. Its memory is addressed by slot; reading what nobody wrote is a KeyError"
    def __init__(self, block_size, window=None):
        self.block_size, self.window, self.memory, self.rows = block_size, window, {}, Rows()

    def __call__(self, plan):
        for row in plan.gone:
            self.rows.pop(row, None)
        for a in plan.admitted:
            self.rows[a.row] = [list(a.blocks), a.ids[-1]]
        ids = [self.work(w) for w in plan.works]
        return [id for w, id in zip(plan.works, ids) if w.sample]

    def work(self, w):
        table, last = self.rows[w.row]
        table += w.new_blocks
        slots, seen = self.slots(table, w.start + w.n), max(0, w.start + 1 - (self.window or w.start + 1))
        kept = [self.memory[s] for s in slots[seen:w.start]]
        for slot, id in zip(slots[w.start:], [last] if w.ids is None else w.ids, strict=True):
            self.memory[slot] = remember(kept, id, self.window)
            kept.append(self.memory[slot])
        if w.sample:
            self.rows[w.row][1] = predict(kept, self.window)
        return self.rows[w.row][1]

    def slots(self, table, n):
        return [table[p//self.block_size]*self.block_size + p % self.block_size for p in range(n)]


class Rows(dict):
    "row -> [table, newest id]"
    forget = dict.clear


# ---- an engine with everything in reach

class Trouble(Exception):
    "What a runner raises when it is told to"


class World:
    "An engine, its clock, its events, its plans, and the requests it was given; checked before and after every step"
    def __init__(self, n_blocks=11, block_size=4, caching=True, run=None, ahead=0, window=None, **scheduling):
        self.window, self.events, self.plans, self.requests, self.names = window, [], [], [], count()
        self.since, self.trouble, self.exact, self.trial = 0, None, True, False
        self.kept, self.means = {}, {}  # request -> what the model keeps of its tokens; key -> the same of one block
        scheduling = dict(max_num_seqs=4, max_num_batched_tokens=16) | scheduling
        pool, chunk = BlockPool(n_blocks, self.emit), scheduling.get("max_chunk") or scheduling["max_num_batched_tokens"]
        self.manager = (BlockManager(pool, block_size, caching) if window is None
                        else WindowManager(pool, block_size, window, chunk*(1 + ahead), caching))
        self.scheduler = Scheduler(self.manager, emit=self.emit, **scheduling)
        self.runner = run(self.scheduler) if run else FakeRunner(block_size, window)
        self.engine = Engine(self.scheduler, self.run, ManualClock(), self.emit, ahead)

    def emit(self, name, **fields):
        assert set(fields) == set(EVENTS[name]), (name, fields)
        self.events.append((name, fields))

    def run(self, plan):
        self.plans.append(plan)
        self.check_plan(plan)
        self.engine.clock.advance(1)
        trouble, self.trouble = self.trouble, None
        self.exact = self.exact and not trouble  # what a failed step took stays in the tables, what it forgot is untold
        ids = None if trouble == "before" else self.runner(plan)
        if trouble:
            raise Trouble
        if self.exact and isinstance(self.runner, FakeRunner):
            assert set(self.runner.rows) <= set(self.scheduler.by_row), "the runner was not told who is gone"
        return ids

    # what a user does

    def add(self, prompt, id=None, eos_ids=(EOS,), priority=0, salt=None, watch=None, bad_word_ids=None, **params):
        params = SamplingParams(**dict(temperature=0, ignore_eos=True) | params)
        params.bad_word_ids = bad_word_ids
        name = id or f"r{next(self.names)}"
        request = Request(name, prompt, params, eos_ids, priority=priority, salt=salt, watch=watch)
        self.engine.add(request)
        self.requests.append(request)
        return request

    def step(self):
        self.since, before, waiting = len(self.events), len(self.plans), len(self.engine.flights)
        self.trial = bool(self.engine.trials)
        try:
            news = self.engine.step()
            calm = not self.trial and not any(r.error for r, _ in news)
        except Trouble:
            news, calm = [], False
        self.check()
        assert len(self.engine.flights) == len(self.scheduler.under_way) <= self.engine.ahead
        if len(self.plans) == before and calm:
            assert not self.scheduler.running or waiting, "it has work, but made no plan"
        if not self.scheduler.running and not self.engine.flights:
            self.runner.rows.forget()  # an idle step has no plan that could tell the runner who is gone
        return news

    def drain(self, patience=3000):
        for _ in range(patience):
            if not len(self.scheduler):
                return self
            self.step()
        raise AssertionError(f"still at work after {patience} steps: {self.requests}")

    def lose_rows(self):
        "What the runner remembers may be lost at any time"
        self.exact = self.exact and not self.engine.flights  # what lost steps took stays in the tables
        self.runner.rows.forget()
        self.engine.rewind()

    def expected(self, request):
        "Ids and finish reason that `request` must end with"
        return answer(request.tokens[:request.n_prompt], request.params, self.scheduler.limit, self.window)

    def counts(self):
        return Counter(name for name, _ in self.events)

    # what must always be so

    def check_plan(self, plan):
        s, rows = self.scheduler, [w.row for w in plan.works]
        assert plan.n_tokens <= s.max_num_batched_tokens and len(rows) == len(set(rows))
        happened = {name for name, _ in self.events[self.since:]}
        if self.trial:
            assert "admit" not in happened
            return self.check_works(plan)
        if "admit" in happened:
            assert "preempt" not in happened, "a step that preempted admitted"
            lacks = sum(self.manager.lacking(self.manager.tables[r.id], max(len(r.tokens), r.n_planned)) for r in s.running.values())
            assert lacks <= self.manager.pool.n_free, "admitted what does not fit beside the others"
        self.check_works(plan)
        for w in plan.works:
            r = s.by_row[w.row]
            assert plan.n_tokens == s.max_num_batched_tokens or "preempt" in happened \
                or w.n == min(max(len(r.tokens) - w.start, 1), s.max_chunk), "budget is left, but not used"
        idle = [r for r in s.running.values() if r.row not in rows 
                and not (r.n_known > len(r.tokens) and r.full(r.n_known, s.limit))]
        assert plan.n_tokens == s.max_num_batched_tokens or not idle, "budget is left, but not used"
        assert all(r.n_passed < s.max_pause for r in idle if r.n_missing == 1), "a decode waits for too long"
        if s.policy is fcfs:
            assert all(r.n_missing > 1 for r in idle), "a decode waits"
        self.check()

    def check_works(self, plan):
        for w in plan.works:
            r = self.scheduler.by_row[w.row]
            assert 1 <= w.n <= self.scheduler.max_chunk and w.start + w.n == r.n_planned and w.start >= r.n_computed
            assert self.engine.ahead or w.start == r.n_computed
            assert w.sample == (w.start + w.n >= len(r.tokens))
            assert w.start < len(r.tokens) or not r.full(w.start + 1, self.scheduler.limit), "a token after the last"

    def check(self):
        m, s = self.manager, self.scheduler
        m.check()
        used = {b for table in m.tables.values() for b in real(table)}
        assert len(used) + m.pool.n_free + 1 == m.pool.n_blocks
        assert set(m.tables) == set(s.running) and len(s.running) <= s.max_num_seqs
        assert all(r.row is None and not r.n_computed and not r.n_planned for r in s.waiting)
        assert m.caching or not m.pool.named
        assert sorted([*s.rows._free, *s.by_row]) == list(range(s.max_num_seqs))
        for r in s.running.values():
            table, full = m.tables[r.id], r.n_computed//m.block_size
            assert s.by_row[r.row] is r and r.status is Status.RUNNING
            assert all(m.pool.refs[b] == 1 for b in table[full:]), "others read a block that is still written"
            first = 0 if self.window is None else m.n_behind(r.n_computed)
            assert all(table[first:]), "a block is gone that a token will read"
            if self.exact:
                assert len(table) == cdiv(r.n_planned, m.block_size)
        if isinstance(self.runner, FakeRunner):
            self.check_names()

    def check_names(self):
        "Each named block holds what its name says, and its readers have the salt of its writer"
        B, memory = self.manager.block_size, self.runner.memory
        for r in self.requests:
            kept = self.kept[r] = remember_all(r.tokens, self.kept.get(r, ()), self.window)
            for i, key in enumerate(r.keys):
                means = self.means.setdefault(key, (r.salt, kept[i*B:(i + 1)*B]))
                assert means == (r.salt, kept[i*B:(i + 1)*B]), "one name for two contents"
        for key, block in self.manager.pool.named.items():
            assert [memory[s] for s in range(block*B, (block + 1)*B)] == self.means[key][1]
        for r in self.scheduler.running.values():
            keys = [self.manager.pool.keys[b] for b in self.manager.tables[r.id]]
            assert all(self.means[key][0] == r.salt for key in keys if key)

    def check_done(self):
        "Nothing is left, nothing leaked, and every answer is the oracle's"
        assert not len(self.scheduler) and not self.manager.tables
        assert self.manager.pool.n_free == self.manager.pool.n_blocks - 1
        for r in self.requests:
            assert r.status is Status.FINISHED and r.row is None
            ids, reason = self.expected(r)
            assert (r.finish_reason == "error") == isinstance(r.error, Trouble) == (r.error is not None)
            if r.finish_reason in ("abort", "error"):
                assert r.output == ids[:r.n_output]
            else:
                assert (r.output, r.finish_reason) == (ids, reason), r
        return self


def play(world, rnd, arrivals, p_abort=0, p_lose=0, p_fail=0, patience=3000):
    "Let requests arrive (keyword arguments of `World.add`) and mishaps happen at random, until nothing is left"
    for _ in range(patience):
        if not arrivals and not len(world.scheduler):
            return world.check_done()
        while arrivals and rnd.random() < .5:
            world.add(**arrivals.pop())
        live = [*world.scheduler.waiting, *world.scheduler.running.values()]
        if live and rnd.random() < p_abort:
            world.engine.abort(rnd.choice(live).id)
        if rnd.random() < p_lose:
            world.lose_rows()
        if rnd.random() < p_fail:
            world.trouble = rnd.choice(["before", "after"])
        world.step()
    raise AssertionError(f"still at work after {patience} steps: {world.requests}")


# ---- chance

def random_policy(rnd):
    "Three arbitrary orders, some of a new mind at every look; often who is planned first is also the first to yield"
    def order():
        if rnd.random() < .3:
            return lambda r: rnd.random()
        by_number = [rnd.random() for _ in range(64)]
        return lambda r: by_number[r.number % 64]
    victim = order()
    return Policy(order(), victim, rnd.choice([victim, order()]))


def random_prompts(rnd, n, longest, vocab=IDS):
    "Prompts of which many begin alike"
    base = [rnd.choice(vocab) for _ in range(longest)]
    for _ in range(n):
        size = rnd.randint(1, longest)
        k = rnd.choice([0, rnd.randint(0, size), size, size])
        yield base[:k] + [rnd.choice(vocab) for _ in range(size - k)]


def random_world(rnd, kind=World, **fixed):
    "An engine of random shape, its pool often too small for all who come"
    rows = rnd.choice([1, 2, 3, 4, 5, 6])
    shape = dict(block_size=rnd.randint(1, 5), n_blocks=rnd.randint(3, 14), max_num_seqs=rows,
                 max_num_batched_tokens=rows + rnd.choice([0, 0, 1, 3, 8]), max_chunk=rnd.choice([None, None, 1, 2, 3]),
                 max_model_len=rnd.choice([None, None, 8, 40, 1000]), caching=rnd.random() < .8, ahead=rnd.choice([0, 0, 1, 2]), max_pause=rnd.choice([8, 8, 1, 2]))
    return kind(**shape | fixed)


def random_arrivals(rnd, world, n=8, vocab=IDS, **fixed):
    "What to `add` to it"
    return [dict(prompt=prompt, max_tokens=rnd.choice([None, 1, 2, 5, 12, 20]), ignore_eos=rnd.random() < .5,
                 salt=rnd.choice([None, None, None, "salt"]), **fixed)
            for prompt in random_prompts(rnd, rnd.randint(1, n), min(24, world.scheduler.limit - 1), vocab)
            if world.scheduler.limit > 1]


def sweep(rnd, n, policy=False, **mishaps):
    "Play `n` random games on the arithmetic model; how often each event happened"
    total = Counter()
    for _ in range(n):
        world = random_world(rnd, **dict(policy=random_policy(rnd)) if policy else {})
        try:
            world.add([1]*world.scheduler.limit)
        except ValueError:
            total += play(world, rnd, random_arrivals(rnd, world), **mishaps).counts()
        else:
            raise AssertionError("a prompt that leaves no room for an answer was not refused")
    return total


# ---- other processes

def real_engine(block_size=3):
    "An engine for another process to make: its model is random, but the same everywhere"
    import torch

    from pagedlm.model import tiny_config, tiny_model
    from pagedlm.paged import load_backend
    from pagedlm.runner import Runner
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # empty memory is NaN there, too
    model = tiny_model(tiny_config(vocab_size=64), seed=3, dtype=torch.float64)
    s = Scheduler(BlockManager(BlockPool(60), block_size), 4, 16, max_model_len=80)
    return Engine(s, Runner(model, load_backend("torch"), 60, block_size, 4, s.limit))


def said_by(code):
    "What a fresh Python prints that runs this"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def mutant(module, old, new, path):
    "The module with one change in its source, which is kept at `path`"
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{source.count(old)} times in the source: {old}"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = spec_from_file_location(f"{module.__package__}.{path.stem}", path)
    spec.loader.exec_module(changed := module_from_spec(spec))
    return changed


def _try_mutant(notices, *change):
    import numpy as np
    faulthandler.disable()
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
        found = notices(mutant(*change))
    sys.exit(0 if found else "nobody noticed")


def check_noticed(notices, module, old, new, path, seconds=60):
    "Does `notices(mutant)` see it? In a process of its own, since some write where they must not; a crash is noticed, too"
    process = get_context("fork").Process(target=_try_mutant, args=(notices, module, old, new, path))
    process.start()
    process.join(seconds)
    assert process.exitcode in (0, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


# ---- checkpoints

def loaded(path, dtype=None, **changes):
    "Our model of a checkpoint, tokenizer or not; float32 if nothing else, with changes of its config"
    from dataclasses import replace

    import torch

    from pagedlm.model import Transformer
    from pagedlm.weights import config_of, load_into, open_source
    source = open_source(path)
    model = Transformer(replace(config_of(source), **changes), dtype=dtype or torch.float32)
    load_into(model, source)
    return model
