"""The simulator is the engine with another runner: event by event, whether it goes step by step or glides"""
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from common import check_noticed, random_prompts

import pagedlm.sim as sim_module
from pagedlm.config import DEVICES, EXAMPLES
from pagedlm.core import ManualClock
from pagedlm.scheduler import fcfs, policies
from pagedlm.sim import (SOURCES, CostModel, FittedCost, Job, Load, SimRunner, Workload, block_keys, bursty, closed_loop, fit_cost, load_of,
                         load_samples, load_trace, poisson, simulate, sweep)
from pagedlm.trace import latency_summary

BENT = lambda load: .01 + .0007*load.n_tokens + .00003*load.n_kv + .1*(load.n_seqs % 3 == 0) + .0001*load.n_before  # no two steps alike


# ---- gliding is stepping

def random_workload(rnd, longest):
    "Some know their ids, some bring hashes, some wait for others; many come at once"
    jobs, t, kind = [], 0.0, rnd.choice(["ids", "hashes", "lengths"])
    prompts = list(random_prompts(rnd, rnd.randint(2, 14), min(20, longest - 1), range(50)))
    for i, ids in enumerate(prompts):
        t += rnd.choice([0, 0, rnd.random(), 3*rnd.random()])
        n, after = len(ids), rnd.randrange(i) if i and rnd.random() < .2 else None
        hashes = tuple(rnd.randrange(2) for _ in range(n//8)) if kind == "hashes" else ()
        jobs.append(Job(rnd.random() if after is not None else t, n, rnd.choice([1, 2, 9, 30, 60]),
                        tuple(ids) if kind == "ids" else None, hashes, rnd.randrange(3), after, rnd.random() < .1))
    return Workload(jobs, hash_size=8)


def random_setting(rnd):
    rows = rnd.choice([1, 2, 3, 6])
    return dict(n_blocks=rnd.randint(6, 30), block_size=rnd.choice([1, 2, 4, 8]), caching=rnd.random() < .6, max_num_seqs=rows,
                max_num_batched_tokens=rows + rnd.choice([0, 1, 5, 30]), max_chunk=rnd.choice([None, None, 1, 3]),
                max_model_len=rnd.choice([None, None, 40]), policy=rnd.choice(list(policies.values())), max_pause=rnd.choice([1, 2, 8]))


def compare(glide, n=80):
    "Play random workloads with `simulate` and `glide` of a module in place of step after step; how often what happened"
    total = Counter()
    for seed in range(n):
        rnd = Random(seed)
        setting = random_setting(rnd)
        limit = min(setting["max_model_len"] or 10**9, (setting["n_blocks"] - 1)*setting["block_size"])
        work = random_workload(rnd, limit)
        plain = simulate(work, BENT, plain=True, events=True, **setting)
        told, quiet = (glide(work, BENT, events=events, **setting) for events in (True, False))
        assert told.events == plain.events
        assert told.requests == quiet.requests == plain.requests
        assert told.steps.values == quiet.steps.values == plain.steps.values
        assert quiet.events is None and (quiet.n_found, quiet.n_asked, quiet.n_evicted) == (plain.n_found, plain.n_asked, plain.n_evicted)
        exact, summed = latency_summary(plain.events), quiet.summary()
        for k, v in exact.items():
            assert list(summed[k].values()) == pytest.approx(list(v.values())), k
        total.update(name for _, name, _ in plain.events)
        total["in bulk"] += len(quiet.gaps) < len(plain.gaps)
    return total


def test_gliding_is_stepping():
    total = compare(simulate)
    assert total["preempt"] > 40 and total["evict"] > 500 and total["share"] > 30 and total["in bulk"] > 20


MUTANTS = {
    "one step too many": ("- len(r.tokens) for r in rows) - 1 #", "- len(r.tokens) for r in rows) #"),
    "past an arrival": ("while n < most and (start := clock()) < until:", "while n < most and (start := clock()) <= until + .5:"),
    "past the end of the pool": ("if len(takers) > manager.pool.n_free: break", "if len(takers) > manager.pool.n_free + 1: break"),
    "who waits is not asked": ("if head and manager.fits(", "if False and manager.fits("),
    "a block taken late": ("takers = filling[(n - 1) % B]", "takers = filling[n % B]"),
    "nothing is named": ("if known % B == 0:", "if False:"),
    "named too early": ("manager.name_full(_speak(r, known), known)", "manager.name_full(_speak(r, known + B), known + B)"),
    "context does not grow": ("n_kv + n*R, n_kv + n*R, run.load", "n_kv, n_kv, run.load"),
    "what came before is forgotten": ("n_kv + n*R, run.load.n_tokens", "n_kv + n*R, R"),
    "progress is lost": ("r.n_computed = r.n_planned = len(r.tokens) - 1", "r.n_computed = r.n_planned = len(r.tokens) - 2"),
    "chunks count as decodes": ("if unsure or not 0 < R == sum(r.finish_reason is None for r, _ in news):", "if unsure or not R:"),
    "who ended counts as running": ("sum(r.finish_reason is None for r, _ in news)", "len(news)"),
}


def notices(module):
    try:
        compare(module.simulate)
    except Exception:
        return True


@pytest.mark.parametrize("bug", MUTANTS)
def test_a_wrong_glide_is_noticed(bug, tmp_path):
    check_noticed(notices, sim_module, *MUTANTS[bug], tmp_path/"wrong_sim.py")


def test_a_mix_of_your_own_goes_step_by_step():
    mine = fcfs._replace(mix=lambda r: -len(r.tokens))
    work = poisson(20, 5, (3, 20), (5, 40))
    runs = [simulate(work, BENT, 60, 4, events=True, policy=mine, max_num_seqs=4, plain=plain).events for plain in (True, False)]
    assert runs[0] == runs[1] != simulate(work, BENT, 60, 4, events=True, max_num_seqs=4).events


# ---- the simulator makes the plans that the engine makes

class Timed:
    "A real runner, with the clock of a simulation; notes its plans"
    def __init__(self, run, clock):
        self.run, self.clock, self.plans, self.n_tokens = run, clock, [], 0

    def __call__(self, plan):
        self.plans.append(plan)
        load = load_of(plan.works, self.n_tokens)
        self.clock.advance(BENT(load))
        self.n_tokens = load.n_tokens
        return self.run(plan)


def blind(plan):
    "A plan without what only a model knows: the ids that were said"
    return ([(a.row, len(a.ids), a.ids[:a.n_prompt], a.n_prompt, a.blocks) for a in plan.admitted],
            [w._replace(ids=w.ids and len(w.ids)) for w in plan.works], plan.gone)


@pytest.mark.parametrize("seed", range(2))
def test_plans_are_those_of_the_engine(seed, monkeypatch):
    "A tiny model behind `LLM`, played by the benchmark's loop, against the simulator: plan by plan, event by event"
    from pagedlm.bench import play
    from pagedlm.llm import LLM
    from pagedlm.model import tiny_model
    from pagedlm.tokenizer import ByteTokenizer
    rnd = Random(seed)
    prompts = list(random_prompts(rnd, 14, 60, range(256)))
    jobs = [dict(prompt=ids, n=rnd.randint(1, 50)) for ids in prompts]
    dues = sorted(rnd.choice([0, 2, rnd.uniform(0, 6)]) for _ in jobs)
    shape = dict(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=120)
    llm = LLM(tiny_model(), tokenizer=ByteTokenizer(), num_gpu_blocks_override=17, block_size=8, enforce_eager=True, **shape)
    clock = ManualClock()
    llm.engine.clock, llm.engine.run = clock, (timed := Timed(llm.engine.run, clock))
    events = play(llm, jobs, dues)

    plans = []
    monkeypatch.setattr(SimRunner, "__call__", lambda self, plan, call=SimRunner.__call__: (plans.append(plan), call(self, plan))[1])
    work = Workload([Job(due, len(j["prompt"]), j["n"], tuple(j["prompt"])) for j, due in zip(jobs, dues)])
    setting = dict(n_blocks=llm.engine.scheduler.manager.pool.n_blocks, block_size=8, **shape)
    simulated = simulate(work, BENT, events=True, plain=True, **setting)
    timed.plans[0] = timed.plans[0]._replace(gone=[])  # `play` has reset the engine: forget all rows
    assert [blind(p) for p in plans] == [blind(p) for p in timed.plans]
    assert simulated.events == events == simulate(work, BENT, events=True, **setting).events
    happened = Counter(name for _, name, _ in events)
    assert happened["share"] and happened["preempt"] and len(plans) > 40


# ---- costs

def test_a_step_is_the_sum_of_its_parts_and_grows_with_all_it_does():
    rnd = Random(0)
    for config in EXAMPLES.values():
        for device in DEVICES.values():
            cost = CostModel(config, device, rnd.choice([1, 2, 8]), rnd.choice([.5, 2]), rnd.choice([1, 2]))
            load = Load(rnd.randint(50, 3000), 50, 40, 60_000, 10**6)
            assert cost(load) == pytest.approx(sum(cost.parts(load).values()))
            assert all(cost(load._replace(**{k: 3*v})) >= cost(load) for k, v in load._asdict().items())
            one = Load(1, 1, 1, 1, 1)
            bytes_read = cost.weight_bytes*(sum(n for k, n in sim_module.param_parts(config).items() if k not in ("embed", "head"))
                                            + config.vocab_size*config.width)
            assert cost.parts(one)["matrices"] == pytest.approx(bytes_read/cost.n_devices/.8/device.bandwidth)


def test_fitting_finds_what_is_there():
    true = FittedCost(1e-3, 2e-5, 0.0, 3e-5, 1e-8, 0.0, 5e-4)
    work = poisson(80, 8, (5, 300), (1, 40))
    sim = simulate(work, true, 1000, events=True, max_num_batched_tokens=300)
    samples = load_samples(sim.events)
    assert len(samples) == len(sim.steps) and [s for _, s in samples] == pytest.approx(list(sim.steps.seconds))
    assert [x.n_kv for x, _ in samples] == list(sim.steps.n_kv) and all(true(x) == pytest.approx(s) for x, s in samples)
    found = fit_cost(samples)
    assert min(found) >= 0 and all(found(x) == pytest.approx(s, rel=1e-5) for x, s in samples)
    assert min(fit_cost([(x, s if x.n_seqs < 3 else s/2) for x, s in samples])) >= 0


def test_what_happens_now_and_then_raises_no_price():
    true, work = FittedCost(1e-3, 2e-5, 0.0, 3e-5, 1e-7, 1e-8, 5e-4), poisson(80, 8, (5, 300), (1, 40))
    samples = load_samples(simulate(work, true, 1000, events=True, max_num_batched_tokens=300).events)
    for odd in (lambda s: 1.5*s, lambda s: s + .01): # in every fourth step; squares would ask for an eighth more, or for 2.5 ms
        found = fit_cost([(x, s if i % 4 else odd(s)) for i, (x, s) in enumerate(samples)])
        assert all(found(x) == pytest.approx(true(x), rel=.02) for x, _ in samples)


def test_samples_count_what_the_host_does_between_steps_but_no_idle_time():
    events = []
    def tell(t, name, **f): events.append((t, name, f))
    tell(0, "arrive", request="A", n_prompt=3)
    tell(0, "admit", request="A", n_cached=0)
    tell(1.5, "step", works=((("A"), 3),), start=.5)
    tell(1.5, "token", request="A", n_output=1)
    tell(3, "step", works=(("A", 1),), start=2)
    tell(3, "token", request="A", n_output=2)
    tell(3, "finish", request="A", reason="length")
    tell(9, "arrive", request="B", n_prompt=2)
    tell(9, "admit", request="B", n_cached=0)
    tell(11, "step", works=(("B", 2),), start=9.5)
    assert load_samples(events) == [(Load(3, 1, 1, 3, 6), 1.0), (Load(1, 1, 1, 4, 4, 3), 1.5), (Load(2, 1, 0, 2, 3, 1), 1.5)]


# ---- workloads

@pytest.mark.parametrize("name,n,n_in,n_out", [("azure_conv", 19_366, 22_361_870, 4_088_665), ("azure_code", 8_819, 18_059_974, 245_896),
                                               ("mooncake", 12_031, 144_793_823, 4_122_048)])
def test_the_traces_that_come_along(name, n, n_in, n_out):
    work = load_trace(name)
    assert (len(work), work.n_in, work.n_out) == (n, n_in, n_out) and SOURCES[name] == work.source
    assert 3400 < work.jobs[-1].arrival < 3600 and work.jobs[0].arrival == 0
    if name == "mooncake":
        hashes = [h for j in work for h in j.hashes]
        assert (len(hashes), len(set(hashes)), work.jobs[-1].hashes[:2]) == (288_500, 182_790, (0, 182_750))
        assert all(len(j.hashes) == -(-j.n_prompt//512) for j in work)


@pytest.mark.parametrize("block_size", [512, 128])
def test_given_hashes_share_what_they_say(block_size):
    "One after the other in an endless pool: found is what a set of all hashes so far contains"
    work, known, found = load_trace("mooncake", 150), set(), 0
    for j in work:
        n = (j.n_prompt - 1)//block_size
        keys = block_keys(j.hashes, 512, block_size, j.n_prompt)
        hits = next((i for i, k in enumerate(keys[:n]) if k not in known), min(n, len(keys)))
        found += hits*block_size
        known.update(keys)
    apart = replace(work, jobs=[j._replace(arrival=float(i), n_output=1) for i, j in enumerate(work)])
    sim = simulate(apart, lambda load: 1e-4, 10**5, block_size, max_num_batched_tokens=10**6)
    assert sim.n_found == found > 10_000 and sim.n_computed == work.n_in - found and sim.recomputed == 0


def test_lengths_share_nothing():
    same = Workload([Job(i, 40, 4) for i in range(5)])
    assert simulate(same, BENT, 100, 4).n_found == 0
    ids = replace(same, jobs=[j._replace(ids=(7,)*40) for j in same])
    assert simulate(ids, BENT, 100, 4).n_found == 4*36


def test_no_token_is_computed_twice_without_need():
    work = bursty(60, 20, (1, 50), (1, 50))
    sim = simulate(work, BENT, 4000, 4)
    assert sim.n_computed == work.n_in + work.n_out - len(work) and sim.recomputed == 0 == sim.n_preempted
    tight = simulate(work, BENT, 40, 4, caching=False)
    assert tight.n_preempted and 0 < tight.recomputed < 1 and tight.n_out == work.n_out
    assert tight.n_computed*(1 - tight.recomputed) == pytest.approx(sim.n_computed)
    assert 0 < sim.occupancy < tight.occupancy < 1


def test_closed_loops_and_little():
    "N users who never think: N requests inside, and rate times stay is N"
    sim = simulate(closed_loop(300, 10, 0, (5, 50), (5, 50)), BENT, 1000, 4)
    inside = sum(r.e2e for r in sim.requests)/sim.seconds
    assert inside == pytest.approx(10, rel=.1)
    assert max(n + w for n, w in zip(sim.steps.n_seqs, sim.steps.n_waiting)) == 10


def test_prompts_that_come_with_keys_and_values_cost_nothing():
    def seconds(**kw):
        "Of a prompt of 1,000 tokens and 5 of answer, at a second per token; and was it preempted?"
        first = Workload([Job(0, 20, 60), Job(.5, 1000, 5, **kw)])
        sim = simulate(first, lambda load: load.n_tokens, 80, 16, caching=False, max_num_batched_tokens=300)
        return sim.seconds, sim.n_preempted

    with_them, without = seconds(ready=True), seconds()
    assert without[0] - with_them[0] == 1000 - 1 and with_them[1] == without[1] == 0


def test_what_cannot_be():
    with pytest.raises(ValueError, match="request 0: the prompt has 100 tokens"):
        simulate(Workload([Job(0, 100, 5)]), BENT, 5, 16)
    with pytest.raises(ValueError, match="jobs that others wait for"):
        closed_loop(5, 1, 0, 5, 5).at_most(3)
    with pytest.raises(ValueError, match="3 ids, but n_prompt=4"):
        Workload([Job(0, 4, 5, (1, 2, 3))])
    with pytest.raises(AttributeError, match="a step has no tokens: end, seconds"):
        simulate(Workload([Job(0, 4, 5)]), BENT, 5).steps.tokens
    assert len(load_trace("azure_conv", 50).at_most(600)) < 50


def test_a_sweep_in_processes_is_a_sweep():
    fixed = dict(workload=poisson(30, 9, (5, 50), (5, 50)), cost=BENT, n_blocks=60, block_size=4)
    grid = dict(max_num_seqs=[1, 4, 16], policy=policies)
    rows = sweep(grid, **fixed)
    assert rows == sweep(grid, processes=2, **fixed) and len(rows) == 3*len(policies)
    assert sweep(dict(max_num_seqs=[4]), keep=lambda sim: dict(n=len(sim.steps)), policy=fcfs, **fixed) == [
        dict(max_num_seqs=4, n=len(simulate(policy=fcfs, max_num_seqs=4, **fixed).steps))]
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        sweep(dict(max_num_seqs=[2, 0]), processes=2, **fixed)
