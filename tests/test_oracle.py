"""*The* test: whatever the engine does to make it fast, the answer is the one of the whole model run once per token"""
from collections import Counter
from functools import cache, partial
from itertools import product
from random import Random

import pytest
import torch
from common import World, play, random_arrivals, random_policy, random_world

from pagedlm.core import cdiv
from pagedlm.model import tiny_config, tiny_model
from pagedlm.paged import load_backend
from pagedlm.runner import Runner
from pagedlm.sampling import generate_naive

MODELS = list(product([torch.float32, torch.float64], [4, 2, 1], [16, 32]))  # dtype, KV heads (of 4 heads), head size
N_ENGINES = 35                                                              # with each of them: 420 in all
EOS = 7, 21, 42                                                             # any ids: a random model says them all


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def model_of(dtype, n_kv_heads, head_dim):
    config = tiny_config(n_kv_heads=n_kv_heads, head_dim=head_dim, vocab_size=64, tied=n_kv_heads > 1)
    return tiny_model(config, seed=n_kv_heads*head_dim, dtype=dtype)


NAIVE = {}  # answers of the oracle, which is slow


@torch.inference_mode()
def naive(model, prompt, params, eos_ids, limit):
    key = id(model), prompt, repr(params), repr(params.bad_word_ids), eos_ids, limit
    if key not in NAIVE:
        NAIVE[key] = generate_naive(model, list(prompt), params, eos_ids, max_len=limit)
    return NAIVE[key]


class Real(World):
    "A `World` that runs a `Transformer`, in memory that was NaN"
    def __init__(self, model, backend="torch", **shape):
        self.model, self.backend = model, load_backend(backend)
        super().__init__(run=self.runner_of, **shape)

    def runner_of(self, scheduler):
        pool, block_size = self.manager.pool, self.manager.block_size
        runner = Runner(self.model, self.backend, pool.n_blocks, block_size, scheduler.max_num_seqs, scheduler.limit)
        runner.cache.fill(float("nan"))
        return runner

    def expected(self, r):
        limit, stop = self.scheduler.limit, tuple(r.eos_ids)
        ids = naive(self.model, tuple(r.tokens[:r.n_prompt]), r.params, stop, limit)
        return ids, "stop" if ids[-1] in stop else "length"


def random_params(rnd):
    "Two of three are greedy; the others use every filter"
    if rnd.random() < .67:
        return dict(temperature=0)
    return dict(temperature=rnd.choice([.5, 1, 1.5]), top_k=rnd.choice([0, 0, 3, 20]), top_p=rnd.choice([1, 1, .8]),
                min_p=rnd.choice([0, 0, .05]), seed=rnd.randrange(2**63))


@pytest.mark.parametrize("dtype,n_kv_heads,head_dim", MODELS, ids=lambda x: str(x).removeprefix("torch."))
def test_engine_equals_naive(dtype, n_kv_heads, head_dim):
    model, rnd, total = model_of(dtype, n_kv_heads, head_dim), Random(f"{dtype} {n_kv_heads} {head_dim}"), Counter()
    for i in range(N_ENGINES):
        block_size = rnd.randint(1, 6)
        shape = dict(block_size=block_size, n_blocks=1 + cdiv(rnd.randint(8, 48), block_size))
        backend = rnd.choice(["torch", "torch", "reference"])
        policy = dict(policy=random_policy(rnd)) if i % 2 else {}
        world = random_world(rnd, kind=partial(Real, model, backend), **shape, **policy)
        arrivals = random_arrivals(rnd, world, vocab=range(64), eos_ids=EOS)
        mishaps = dict(p_abort=.02, p_lose=.05, p_fail=.03) if i % 3 else {}
        total += play(world, rnd, [a | random_params(rnd) for a in arrivals], **mishaps).counts()
        total.update("ends" for r in world.requests if r.finish_reason == "stop")
    print(dict(total))
    assert total["preempt"] >= 6 and total["share"] >= 12 and total["evict"] >= 100 and total["ends"] >= 6


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 30])
def test_chunks_change_nothing(chunk):
    "Case 12: a 30-token prompt in float32, memory full of NaN"
    model = model_of(torch.float32, 2, 16)
    prompt = [i*i % 64 for i in range(30)]
    world = Real(model, n_blocks=14, max_num_batched_tokens=32, max_chunk=chunk)
    r = world.add(prompt, max_tokens=16)
    world.drain().check_done()
    assert r.n_output == 16 and len(set(r.output)) > 4 and torch.isfinite(world.runner.cache.k[:, 1:12]).all()


@pytest.mark.parametrize("company", ["alone", "unseeded", "seeded", "late", "preempted"])
def test_a_seed_decides_whoever_else_is_there(company):
    "Case 17"
    model = model_of(torch.float32, 2, 16)
    world = Real(model, n_blocks=9 if company == "preempted" else 40)
    others = dict(alone=[], seeded=[dict(seed=42), dict(seed=1)]).get(company, [dict(), dict()])

    def add(**params):
        return world.add([5, 6, 7, 8, 9], temperature=.8, max_tokens=18, **params)
    if company in ("late", "preempted"):
        strangers = [add(**params) for params in others]
        world.step()
        a = add(seed=42)
    else:
        a = add(seed=42)
        strangers = [add(**params) for params in others]
    world.drain().check_done()
    assert a.output == naive(model, (5, 6, 7, 8, 9), a.params, (), None)
    assert a.n_preempted > 0 if company == "preempted" else not a.n_preempted
    assert all((r.output == a.output) == (r.params.seed == 42) for r in strangers)
