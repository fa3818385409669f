"Sliding windows: what is behind them goes back to the pool, prefixes are found by their last tokens, and answers stay the oracle's"
from collections import Counter
from functools import partial
from random import Random

import pytest
import torch
from common import World, play, random_arrivals, random_policy, random_world
from test_oracle import Real, random_params

from pagedlm.blocks import real
from pagedlm.model import tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def windowed(rnd, kind=World, **fixed):
    return random_world(rnd, kind, **dict(window=rnd.randint(1, 9), max_model_len=rnd.choice([8, 40, 60])) | fixed)


def games(n, rnd):
    total = Counter()
    for i in range(n):
        world = windowed(rnd, **dict(policy=random_policy(rnd)) if i % 2 else {})
        mishaps = dict(p_abort=.02, p_lose=.05, p_fail=.03) if i % 3 else {}
        total += play(world, rnd, random_arrivals(rnd, world), **mishaps).counts()
        total["longer than the pool"] += any(len(r.tokens) > (world.manager.pool.n_blocks - 1)*world.manager.block_size for r in world.requests)
    return total


def test_random_engines():
    total = games(170, Random("windows"))
    print(dict(total))
    assert total["preempt"] > 40 and total["share"] > 80 and total["longer than the pool"] > 20


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("window,block_size,chunk", [(1, 1, 1), (6, 4, 4), (7, 4, 3), (8, 4, 8), (9, 2, 5)])
def test_a_pool_of_a_few_blocks_holds_any_length(window, block_size, chunk, ahead):
    world = World(window=window, block_size=block_size, max_chunk=chunk, n_blocks=999, max_model_len=300, ahead=ahead)
    n_blocks = world.manager.most + 1
    world = World(window=window, block_size=block_size, max_chunk=chunk, n_blocks=n_blocks, max_model_len=300, ahead=ahead)
    r = world.add([*range(1, 30)], max_tokens=250)
    while len(world.scheduler):
        world.step()
        assert world.manager.pool.n_blocks - 1 - world.manager.pool.n_free <= world.manager.most
    world.check_done()
    assert r.n_output == 250 and not r.n_preempted


def test_a_prefix_is_found_by_its_end():
    "Window 6, blocks of 4: of a prompt of 24 tokens, the last two blocks before its end are enough"
    world = World(n_blocks=20, window=6, max_model_len=60)
    prompt = [*range(100, 125)]
    a = world.add(prompt, max_tokens=1)
    world.drain()
    keys = a.keys[:6]
    pool = world.manager.pool
    for key in keys[:4]:  # the first four are evicted
        pool.keys[pool.named.pop(key)] = None
    b = world.add(prompt, max_tokens=3)
    world.step()
    assert b.n_cached == 24 and world.manager.tables[b.id][:4] == [0]*4 and len(real(world.manager.tables[b.id])) == 3
    world.drain().check_done()
    pool.keys[pool.named.pop(keys[4])] = None  # now the run before the end is too short
    c = world.add(prompt, max_tokens=3)
    world.drain().check_done()
    assert c.n_cached == 0 and c.output == b.output


MODELS = {"all": dict(windows=(6,)), "two": dict(windows=(3, 7)), "some": dict(windows=(5, None)),
          "gemma": dict(windows=(4, None), qk_norm="head", norms="both", attn_softcap=3., local_rope_theta=100., act="gelu_tanh")}


@pytest.mark.parametrize("name", MODELS)
def test_engine_equals_naive(name):
    config = tiny_config(vocab_size=64, n_layers=3, **MODELS[name])
    model, rnd, total = tiny_model(config, dtype=torch.float64), Random(name), Counter()
    for i in range(10):
        world = windowed(rnd, partial(Real, model, rnd.choice(["torch", "reference"])), window=config.window, n_blocks=rnd.randint(9, 15),
                         max_model_len=rnd.choice([24, 40]))
        arrivals = random_arrivals(rnd, world, vocab=range(64))
        total += play(world, rnd, [a | random_params(rnd) for a in arrivals], p_lose=.03).counts()
        total["longer"] += sum(len(r.tokens) > 8 for r in world.requests)
    assert total["longer"] > 15 and total["share"] > 2


@pytest.mark.parametrize("ahead", [False, True])
def test_llm(ahead):
    "Through the front door: answers of 60 tokens from a pool of 44, and what `generate_naive` says"
    from pagedlm.llm import LLM
    from pagedlm.core import SamplingParams
    from pagedlm.sampling import generate_naive
    from pagedlm.tokenizer import ByteTokenizer
    model = tiny_model(tiny_config(windows=(9,)))
    llm = LLM(model, tokenizer=ByteTokenizer(), block_size=4, num_gpu_blocks_override=12, max_num_batched_tokens=8, max_num_seqs=3,
              max_model_len=80, async_scheduling=ahead)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[*range(5, 5 + n)] for n in (3, 12, 7)]
    for prompt, out in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
        assert out.outputs[0].token_ids == generate_naive(model, prompt, params)
    pool = llm.engine.scheduler.manager.pool
    assert pool.n_free == pool.n_blocks - 1


MUTANTS = {"forgets a block too early": ("n_tokens - self.window + 1)//", "n_tokens - self.window + 2)//"),
           "a run as long as the window is not asked for": ("if run >= len(found) - self.n_behind(len(found)*B)", "if run"),
           "null blocks lose readers": ("self.tables[request.id] = real(self.tables[request.id])", "pass"),
           "nothing is forgotten": ("if not gone: return", "return"),
           "the table gets shorter": ("table[:n] = [0]*n", "del table[:n]"),
           "too little is asked for": ("min(growth, self.most - len(real(table)))", "min(growth, 1)")}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name, tmp_path, monkeypatch):
    import common
    from pagedlm import blocks
    changed = common.mutant(blocks, *MUTANTS[name], tmp_path/"changed.py")
    monkeypatch.setattr(common, "WindowManager", changed.WindowManager)
    with pytest.raises(Exception):
        games(60, Random(name))
        for window in 1, 6, 8:
            test_a_pool_of_a_few_blocks_holds_any_length(window, 4, 4, 0)
