"The Triton kernels in the interpreter (conftest.py asks for it): every shape where kernels go wrong, and bugs planted into them"
import os
import random
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import accumulate, product

import numpy as np
import pytest
import torch
from common import check_noticed

pytest.importorskip("triton")

from pagedlm import kernels, paged
from pagedlm.attention import AttnSpec, Dense
from pagedlm.blocks import BlockManager, BlockPool
from pagedlm.config import ModelConfig
from pagedlm.core import SamplingParams, cdiv
from pagedlm.engine import Engine
from pagedlm.kvcache import KVCache, slots_of
from pagedlm.layers import rope_table
from pagedlm.model import tiny_config, tiny_model
from pagedlm.paged import AttnMeta, Backend, Paged
from pagedlm.request import Request
from pagedlm.runner import Runner
from pagedlm.sampling import generate_naive
from pagedlm.scheduler import Scheduler

pytestmark = [pytest.mark.skipif(not kernels.INTERPRETED, reason="Triton was imported without TRITON_INTERPRET=1"),
              pytest.mark.usefixtures("one_thread")]
SMALL = dict(few=(16, 16), many=(32, 32))  # tiles, so small that short contexts have several
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}
UGLY = 1, 15, 16, 17, 100                  # lengths, for blocks of 16


# ---- a step of one layer

class Step:
    "Requests whose keys and values lie in random blocks among NaN, and queries of their last tokens"
    def __init__(self, q_lens, kv_lens, Hk=1, G=4, D=64, B=16, dtype=torch.float16, seed=0, module=kernels,
                 kv_dtype=None, chunk=None, launches=SMALL, rot=None, **how):
        self.module, g = module, torch.Generator().manual_seed(seed)
        H, sizes = Hk*G, [cdiv(n, B) for n in kv_lens]
        order = (1 + torch.randperm(sum(sizes) + 2, generator=g)).tolist()
        tables = [[order.pop() for _ in range(m)] for m in sizes]
        table = rope_table(D if rot is None else max(rot, 2), 4096, 1e4)
        self.spec = AttnSpec(H, Hk, D, D**-.5, table if rot != 0 else table[:, :0], **how)
        launches = {kind: module.Launch(*x) for kind, x in launches.items()}
        self.backend, self.B = module.TritonBackend(kv_dtype, chunk, launches), B
        self.config = ModelConfig(8, 8, 2, H, Hk, D, 8)
        self.cache = self.backend.new_cache(self.config, sum(sizes) + 3, B, dtype)
        self.cache.fill(float("nan"))
        normal = lambda *shape: torch.randn(*shape, generator=g)
        for table, n in zip(tables, kv_lens):
            block, slot = torch.tensor(table)[torch.arange(n)//B], torch.arange(n) % B
            for pool in self.cache.k, self.cache.v:
                pool[1, block, slot] = normal(n, Hk, D).to(pool.dtype)
        int32 = partial(torch.tensor, dtype=torch.int32)
        self.meta = AttnMeta(
            int32([t + [0]*(max(sizes) + 1 - len(t)) for t in tables]), int32(kv_lens), int32([0, *accumulate(q_lens)]),
            int32([s for t, n, S in zip(tables, q_lens, kv_lens) for s in slots_of(t, S - n, n, B)]),
            torch.tensor([p for n, S in zip(q_lens, kv_lens) for p in range(S - n, S)]), list(q_lens), list(kv_lens))
        self.q = normal(sum(q_lens), H, D).to(dtype)
        self.qkv = normal(sum(q_lens), (H + 2*Hk)*D).to(dtype)

    def attend(self):
        return self.backend.attend(self.spec, 1, self.q, self.cache, self.meta)

    def wanted(self, spec=None):
        return Backend().attend(spec or self.spec, 1, self.q.double(), self.cache, self.meta)

    def error(self):
        return distance(self.attend(), self.wanted())

    def store_error(self):
        "Of q, k and v together; infinite if the kernel wrote what it should not, or did not write what it should"
        c, plain = self.cache, KVCache(self.config, self.cache.n_blocks, self.B, torch.float64)
        for x in c, plain:
            x.fill(float("nan"))
        self.meta.slots[::3] = -1
        q = self.backend.store(self.spec, 1, c, self.qkv, self.meta)
        spec = self.spec._replace(**{k: x.double() for k in ("rope", "q_norm", "k_norm")
                                     if (x := getattr(self.spec, k)) is not None})
        want = Backend().store(spec, 1, plain, self.qkv.double(), self.meta)
        plain.k[1, 0], plain.v[1, 0] = float("nan"), float("nan")  # there it puts what has no slot
        scale = c.scales[1].double()
        pairs = [(q, want), (c.k[1].double()*scale[0], plain.k[1]), (c.v[1].double()*scale[1], plain.v[1])]
        if not c.k[0].isnan().all() or any((a.isnan() != b.isnan()).any() for a, b in pairs):
            return float("inf")
        return max(distance(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def distance(a, b):
    b = b.double()
    return float((a.double() - b).norm()/b.norm().clamp(min=1e-30))


# ---- attention

@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("G,D", list(product([1, 3, 4, 8], [64, 80, 128, 256])))
def test_decode(G, D, dtype):
    assert Step([1]*5, UGLY, G=G, D=D, dtype=dtype, seed=G + D).error() < TOLERANCE[dtype]


@pytest.mark.parametrize("G", [1, 3, 4, 8])
def test_prefill(G):
    assert Step([17, 33], [17, 33], G=G, dtype=torch.float32).error() < 1e-5


def random_step(rnd, **fixed):
    q_lens = [rnd.choice([1, 1, 2, 7, 16, 33]) for _ in range(rnd.randint(1, 2))]
    kv_lens = [n + rnd.choice([0, 1, 14, 15, 16, 40, 67]) for n in q_lens]
    Hk, G = rnd.choice([1, 1, 2]), rnd.choice([1, 2, 3, 4, 5, 8])
    how = dict(Hk=Hk, G=G, D=rnd.choice([16, 64, 80]), B=rnd.choice([1, 5, 16, 16, 24, 32, 64]),
               dtype=rnd.choice([torch.float16, torch.float32]), seed=rnd.randrange(2**30),
               launches=dict(few=(16, rnd.choice([16, 32])), many=(rnd.choice([16, 32, 64]), rnd.choice([16, 32]))))
    if rnd.random() < .5:
        how.update(window=rnd.choice([1, 7, 16, 33, 50, 500]))
    if rnd.random() < .4:
        how.update(softcap=rnd.choice([.5, 2., 30.]))
    if rnd.random() < .4:
        how.update(sinks=torch.randn(Hk*G, generator=torch.Generator().manual_seed(1))*3)
    if rnd.random() < .5:
        how.update(chunk=rnd.choice([16, 32, 48]))
    return Step(q_lens, kv_lens, **how | fixed)


@pytest.mark.parametrize("seed", range(30))
def test_any_step(seed):
    "Chunks and decodes mixed, any features, any splits"
    step = random_step(random.Random(seed))
    assert step.error() < TOLERANCE[step.q.dtype]


def test_splits_for_the_grid():
    step = Step([1, 1, 40], [700, 17, 600], G=2)
    plan, = step.backend.plan([step.spec], step.cache, step.meta.q_lens, step.meta.kv_lens).values()
    assert [len(cut.merges) > 0 for cut in plan] == [True, True]
    assert step.error() < 1e-3


def after_a_window(module):
    "Blocks that no query can see any more were given back: the table has the null block there, and NaN is in it"
    step = Step([1, 2], [100, 90], window=20, launches=dict(few=(16, 64), many=(32, 64)), module=module)
    want, table = step.wanted(), step.meta.block_tables
    table[0, :(100 - 20)//16], table[1, :(89 - 20)//16] = 0, 0
    return distance(step.attend(), want)


def test_what_lies_behind_a_window_may_be_gone():
    assert after_a_window(kernels) < 1e-3


def test_huge_scores():
    "Soft-capped scores far beyond the cap, sinks that take everything, rows that see one key only"
    step = Step([3], [40], softcap=5., sinks=torch.tensor([80., -80, 0, 3]))
    step.q *= 300
    with np.errstate(over="ignore"):
        assert step.error() < 1e-3


def test_tokens_first_in_memory():
    "The kernels follow strides"
    step = Step([1, 7], [40, 17], Hk=2)
    want = step.wanted()
    c = step.cache
    c.k, c.v = c.k.contiguous(), c.v.contiguous()
    c.layers = list(zip(c.k, c.v, c.scales))
    assert distance(step.attend(), want) < 1e-3


def test_alone_or_in_a_crowd():
    "With a fixed `chunk`, a request's bits do not depend on who else is in the step"
    crowd = Step([1, 9, 1], [100, 60, 35], chunk=32)
    both, row = crowd.attend(), 0
    for r, n in enumerate(crowd.meta.q_lens):
        meta = crowd.meta._replace(block_tables=crowd.meta.block_tables[r:r + 1], q_lens=[n],
                                   kv_lens=crowd.meta.kv_lens[r:r + 1])
        q = crowd.q[row:row + n]
        assert torch.equal(crowd.backend.attend(crowd.spec, 1, q, crowd.cache, meta), both[row:row + n])
        row += n


def test_eight_bits():
    for kv_dtype in torch.float8_e4m3fn, torch.float8_e5m2:
        step = Step([1, 7], [100, 17], kv_dtype=kv_dtype, chunk=48)
        step.cache.scales[1] = torch.tensor([.5, 3.])
        want = step.wanted(step.spec._replace(scale=step.spec.scale*.5))*3
        assert distance(step.attend(), want) < 1e-3


def test_tiles_are_made_once_per_kind_of_layer():
    step = Step([1, 7], [40, 17])
    attn = Paged(step.backend, step.cache, step.meta)
    other = step.spec._replace(window=5)
    for spec in step.spec, step.spec, other:
        attn(1, step.qkv, spec)
    tiles = attn.meta.tiles
    assert set(tiles) == {step.backend.key(step.spec), step.backend.key(other)}
    before = tiles[step.backend.key(other)]
    attn(1, step.qkv, other)
    assert attn.meta.tiles is tiles and tiles[step.backend.key(other)] is before


# ---- store

@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("Hk,G,D,B,rot,norm", [
    (3, 3, 64, 16, 64, False), (8, 2, 128, 16, 128, True), (1, 4, 80, 32, 32, False), (2, 1, 256, 5, 256, True),
    (1, 2, 96, 1, 96, True), (2, 2, 16, 4, 0, True)])
def test_store(Hk, G, D, B, rot, norm, interleaved, dtype):
    norms = {k: torch.rand(D, generator=torch.Generator().manual_seed(len(k))) + .5 for k in ("q_norm", "k_norm") if norm}
    if norm:
        norms["k_norm"] = norms["k_norm"] + 1
    step = Step([1, 3], [600, 3], Hk=Hk, G=G, D=D, B=B, rot=rot, dtype=dtype, interleaved=interleaved, norm_eps=.1, **norms)
    assert step.store_error() < TOLERANCE[dtype]


def test_store_eight_bits():
    "The interpreter forgets to carry where rounding reaches a power of two: 1.97 becomes 1. Most numbers are right"
    step = Step([4], [9], kv_dtype=torch.float8_e4m3fn)
    step.cache.scales[1] = torch.tensor([.25, 2.])
    assert step.store_error() < .15
    step.qkv[:] = 10_000  # beyond the range
    step.backend.store(step.spec, 1, step.cache, step.qkv, step.meta)
    assert step.cache.v[1].float().nan_to_num().max() == 448


def test_a_norm_for_keys_only_is_refused():
    step = Step([1], [4], k_norm=torch.ones(64))
    with pytest.raises(ValueError, match="layer 1 has a norm for queries or for keys only"):
        step.backend.store(step.spec, 1, step.cache, step.qkv, step.meta)


# ---- the planner

def covered(tiles, window, bq, tile):
    "(request, position, key) that some tile computes, with how often"
    seen = Counter()
    for row, n, pos, req, lo, hi, slot, first in tiles.tolist():
        assert 0 <= n <= bq and lo % tile == 0 and (n == 0 or lo < hi)
        seen.update((req, p, key) for p in range(pos, pos + n) for key in range(lo, min(hi, p + 1))
                    if window is None or key > p - window)
    return seen


def random_plan(rnd):
    R = rnd.randint(1, 6)
    q = [rnd.choice([0, 1, 1, 2, 5, 20]) for _ in range(R)]
    kv = [n + rnd.choice([0, 0, 1, 7, 30, 300 if rnd.random() < .2 else 9]) for n in q]
    return q, kv, dict(bq=rnd.choice([1, 3, 4, 16]), tile=rnd.choice([4, 16]), window=rnd.choice([None, None, 1, 5, 40]),
                       spare=rnd.choice([0, 1, 4, 20]), chunk=rnd.choice([None, None, 1, 16, 40]))


def test_every_query_meets_every_key_once():
    rnd, split = random.Random(0), 0
    for _ in range(300):
        q, kv, how = random_plan(rnd)
        starts = [*accumulate([0, *q])]
        tiles, merges, n_parts = kernels.plan_tiles(q, kv, **how)
        seen = covered(tiles, how["window"], how["bq"], how["tile"])
        assert seen == {(r, p, key): 1 for r, (n, S) in enumerate(zip(q, kv)) for p in range(S - n, S)
                        for key in range(S) if key <= p and (how["window"] is None or key > p - how["window"])}
        for row, n, pos, req, *_ in tiles.tolist():
            assert row - starts[req] == pos - (kv[req] - q[req])
        check_merges(tiles, merges, n_parts)
        split += len(merges)
        if how["chunk"] is None:
            assert len(tiles) <= sum(cdiv(n, how["bq"]) for n in q) + how["spare"]
        lengths = (tiles[:, 5] - tiles[:, 4]).tolist()
        assert lengths == sorted(lengths, reverse=True)
    assert split > 300


def check_merges(tiles, merges, n_parts):
    "Each part has a slot of its own, each split tile's slots are consecutive, and one of them is the first"
    slots = sorted(s for s in tiles[:, 6].tolist() if s >= 0)
    assert slots == list(range(len(slots))) and len(slots) <= n_parts
    by_slot = {t[6]: t for t in tiles.tolist()}
    merged = []
    for row, n, slot, parts in merges.tolist():
        mine = [by_slot[s] for s in range(slot, slot + parts)]
        assert all(t[:2] == [row, n] for t in mine) and (parts >= 2 or n == 0)
        assert [t[7] for t in mine] == [1, *[0]*(parts - 1)][:parts]
        assert [t[4] for t in mine[1:]] == [t[5] for t in mine[:-1]]
        merged += range(slot, slot + parts)
    assert sorted(merged) == slots
    assert all(t[7] for t in tiles.tolist() if t[6] < 0 and t[1])


@pytest.mark.parametrize("chunk", [None, 64])
def test_plans_for_graphs_have_one_shape(chunk):
    "Whatever the lengths, and nothing but padding is added"
    rnd, shapes = random.Random(1), set()
    for _ in range(100):
        step = Step([1], [1], Hk=2, chunk=chunk)
        R = rnd.randint(1, 12)
        q = [rnd.choice([0, 1, 1, 1, 4]) for _ in range(R)]
        kv = [n + rnd.choice([0, 10, 300, 2000]) for n in q]
        cut, = step.backend.plan([step.spec], step.cache, q, kv, n_rows=12, max_len=2048)[step.backend.key(step.spec)]
        shapes.add((cut.launch, cut.tiles.shape, cut.merges.shape, cut.n_parts))
        assert cut.tiles.dtype == cut.merges.dtype == np.int32
        assert cut.tiles.flags.c_contiguous and cut.merges.flags.c_contiguous
        n = (cut.tiles[:, 1] > 0).sum()
        assert (cut.tiles[n:, [1, 4, 5]] == 0).all() and (cut.tiles[n:, 6] == -1).all()
        check_merges(cut.tiles[:n], cut.merges[cut.merges[:, 1] > 0], cut.n_parts)
        exact = step.backend.plan([step.spec], step.cache, q, kv)[step.backend.key(step.spec)]
        assert np.array_equal(cut.tiles[:n], exact[0].tiles if exact else np.empty((0, 8)))
    assert len(shapes) == 1


def test_padding_does_no_harm():
    "Three requests in a graph of eight rows: tokens without a request are stored nowhere, and change nobody"
    step = Step([1, 1, 1], [40, 17, 600])
    want = step.wanted()
    plan = step.backend.plan([step.spec], step.cache, [1, 1, 1], [40, 17, 600], n_rows=8)
    tiles = {key: [cut.to("cpu") for cut in cuts] for key, cuts in plan.items()}
    q = torch.cat([step.q, torch.full((5, 4, 64), float("nan"), dtype=step.q.dtype)])
    o = step.backend.attend(step.spec, 1, q, step.cache, step.meta._replace(tiles=tiles))
    assert len(o) == 8 and distance(o[:3], want) < 1e-3


def test_a_plan_too_small_is_refused():
    step = Step([1], [1])
    for q in [1]*9, [5]:
        with pytest.raises(ValueError, match="this plan is for 8 with at most 4"):
            step.backend.plan([step.spec], step.cache, q, [90]*len(q), n_rows=8)


def test_launches_have_room_for_all_heads():
    for arch, D, G, kind, dtype in product(["sm_80", "sm_90", "sm_120", "gfx942", "?"], [64, 80, 128, 256], [1, 3, 8, 71, 128],
                                           ["few", "many"], [torch.bfloat16, torch.float32]):
        launch = kernels.launch_for(arch, D, G, kind, dtype)
        assert launch.BM >= G and launch.BM & (launch.BM - 1) == 0 == launch.TILE & (launch.TILE - 1)


# ---- the whole line

def answers(model, prompts, n_blocks, backend="triton", **shape):
    "Greedy ids by the engine, and the requests"
    params = SamplingParams(temperature=0, max_tokens=4)
    scheduler = Scheduler(BlockManager(BlockPool(n_blocks), 4), 3, 6, max_model_len=16, **shape)
    runner = Runner(model, paged.load_backend(backend), n_blocks, 4, 3, scheduler.limit)
    runner.cache.fill(float("nan"))
    engine = Engine(scheduler, runner)
    requests = [engine.add(Request(str(i), p, params)) for i, p in enumerate(prompts)]
    for _ in engine.drain():
        pass
    naive = [generate_naive(model, p, params, max_len=scheduler.limit) for p in prompts]
    return [r.output for r in requests], naive, sum(r.n_preempted for r in requests)


@torch.inference_mode()
def test_engine_equals_naive(monkeypatch):
    monkeypatch.setitem(paged.backends, "triton", "pagedlm.kernels:TritonBackend")
    rnd, n_preempted = random.Random(2), 0
    twist = dict(window=5, softcap=3., sinks=torch.tensor([1., -1, 0, 2]), interleaved=True,
                 q_norm=torch.rand(16) + .5, k_norm=torch.rand(16) + .5)
    for twisted in False, True:
        model = tiny_model(tiny_config(vocab_size=64), seed=3)
        if twisted:
            model.specs[0] = model.specs[0]._replace(**twist)
        prompts = [[rnd.randrange(64) for _ in range(n)] for n in (7, 7, 7)]
        prompts[2][:4] = prompts[0][:4]  # for the prefix cache
        ours, naive, n = answers(model, prompts, n_blocks=6)
        assert ours == naive
        n_preempted += n
    assert n_preempted


@torch.inference_mode()
def test_hidden_vectors_equal_dense():
    model, ids = tiny_model(tiny_config(n_heads=6, n_kv_heads=2, head_dim=20), seed=1), torch.arange(23)
    backend, want = kernels.TritonBackend(), model(ids, Dense())
    cache = backend.new_cache(model.config, 9, 4, torch.float32)
    cache.fill(float("nan"))
    table, got = [5, 3, 8, 1, 2, 7], []
    for start, n in ((0, 9), (9, 1), (10, 13)):
        meta = AttnMeta(torch.tensor([table], dtype=torch.int32), None, None,
                        torch.tensor(slots_of(table, start, n, 4)), torch.arange(start, start + n), [n], [start + n])
        got.append(model(ids[start:start + n], Paged(backend, cache, meta)))
    assert torch.allclose(torch.cat(got), want, atol=2e-4, rtol=0)


# ---- what it says when it cannot

def python(code, **env):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | env
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}: raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Block())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    "And the module needs nothing but torch, triton and NumPy"
    others = {"numba", "gguf", "nbdev", "fastcore", "transformers", "tokenizers", "safetensors", "jinja2", "matplotlib"}
    done = python(BLOCK.format(names=others) + "from pagedlm.kernels import TritonBackend; TritonBackend()")
    assert "ValueError: attention_backend='triton' needs a CUDA or ROCm GPU" in done.stderr
    assert "'torch'" in done.stderr and "TRITON_INTERPRET=1" in done.stderr


def test_no_triton():
    done = python(BLOCK.format(names={"triton"}) + "import pagedlm.kernels")
    assert "ImportError: attention_backend='triton' needs Triton: pip install triton" in done.stderr


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8])
def test_types_that_would_go_wrong(dtype):
    with pytest.raises(ValueError, match=f"dtype={dtype}, but in the interpreter the Triton kernels take"):
        kernels.TritonBackend().new_cache(tiny_config(), 4, 4, dtype)


def test_head_sizes_that_no_launch_is_made_for():
    with pytest.raises(ValueError, match="head_dim=512, but the Triton kernels know head sizes up to 256"):
        kernels.TritonBackend().new_cache(tiny_config(head_dim=512), 4, 4, torch.float32)


# ---- who tests the tests?

def slot_error(module):
    "How many slots a plan's tiles name beyond those that its merges read: a write past the last one may land anywhere"
    tiles, merges, n_slots = module.plan_tiles([1, 1, 5], [33, 9, 40], 4, 8, chunk=16)
    read = [slot + i for _, _, slot, parts in merges.tolist() for i in range(parts)]
    return len({*tiles[:, 6].tolist(), n_slots - 1} ^ {-1, *read})


CHECKS = {  # cheap ones first
    "slots": slot_error,
    "store": lambda m: Step([3], [9], Hk=2, G=2, D=20, B=4, rot=12, dtype=torch.float32, module=m).store_error(),
    "store pairs": lambda m: Step([3], [9], D=16, B=4, rot=8, dtype=torch.float32, interleaved=True, norm_eps=.1,
                                  q_norm=torch.linspace(.5, 2, 16), k_norm=torch.linspace(3, 1, 16), module=m).store_error(),
    "store 8 bits": lambda m: eight(m, [2], [9]).store_error() - .15,
    "8 bits": lambda m: eight(m, [1], [20]).error(),
    "decode": lambda m: Step([1]*3, [1, 17, 40], Hk=2, module=m).error(),
    "chunk": lambda m: Step([1, 17], [64, 20], G=3, D=80, B=64, dtype=torch.float32, module=m).error(),
    "window": lambda m: Step([1, 10], [90, 85], window=50, chunk=32, B=5, module=m).error(),
    "split": lambda m: Step([1, 1, 5], [33, 9, 40], Hk=2, G=2, sinks=torch.tensor([1., -1, 2, 0]), softcap=2., chunk=16,
                            module=m).error(),
    "behind the window": after_a_window,
    "many parts": lambda m: Step([1], [400], chunk=16, module=m).error()}


def eight(module, q_lens, kv_lens):
    step = Step(q_lens, kv_lens, kv_dtype=torch.float8_e4m3fn, module=module)
    want = step.wanted(step.spec._replace(scale=step.spec.scale*.25))*2
    step.cache.scales[1] = torch.tensor([.25, 2.])
    step.wanted = lambda: want
    return step


MUTANTS = {  # what is wrong: (a piece of the source, what to put there)
    "every tile reads its block's first keys": ("at % B + j\n", "j\n"),
    "keys at a slot by request, not by block": ("slot = key % B", "slot = key % TILE"),
    "scores without their scale": ("input_precision=PREC) * scale", "input_precision=PREC)"),
    "the output does not fade": ("acc * fade[:, None], input", "acc, input"),
    "values before the window unmasked": ("(key >= lo) & (key < hi)", "key < hi"),
    "values beyond the end unmasked": ("(key >= lo) & (key < hi)", "key >= lo"),
    "squeezed twice as hard": ("2 * LOG2E / cap", "4 * LOG2E / cap"),
    "a squeezed score in the wrong base": ("squeeze(s, CAP) * LOG2E", "squeeze(s, CAP)"),
    "the log2(e) twice": ("if CAP == 0: scale", "if True: scale"),
    "heads by row, not by head": ("t, head = i // G, h * G + i % G", "t, head = i // G, h * G + i // G % G"),
    "one more token per tile": ("ok, qpos = t < n,", "ok, qpos = t < n + 1,"),
    "another head's keys": ("k_ptr + h.to(tl.int64) * sh", "k_ptr + 0 * h.to(tl.int64) * sh"),
    "the unmasked span ends late": ("tl.minimum(hi, pos + 1) // TILE * TILE", "(tl.minimum(hi, pos + 1) + TILE - 1) // TILE * TILE"),
    "the unmasked span begins early": ("tl.maximum(lo, (pos + n - WINDOW", "tl.maximum(lo, (pos - WINDOW"),
    "a sink in the wrong base": (".to(tl.float32) * LOG2E, m)", ".to(tl.float32), m)"),
    "no scale of keys": ("scale = scale * tl.load(scales_ptr)", "scale = scale"),
    "values by the keys' scale": ("acc * (tl.load(scales_ptr + 1) / l)", "acc * (tl.load(scales_ptr) / l)"),
    "parts of one head in another's slot": ("r = (slot.to(tl.int64) * HK + h) * BM + i", "r = slot.to(tl.int64) * HK * BM + i"),
    "the first part is not merged": ("mine = at + j < n_parts", "mine = (at + j < n_parts) & (at + j > 0)"),
    "what was merged does not fade": ("acc, l, m = acc * fade + tl.sum(o", "acc, l, m = acc + tl.sum(o"),
    "only the first 16 parts are merged": ("range(0, n_parts * real", "range(0, real"),
    "only one head's parts are merged": ("r = ((slot + at + j).to(tl.int64) * HK + h)", "r = ((slot + at + j).to(tl.int64) * HK)"),
    "keys by the queries' norm": ("tl.where(isq, w_q[None, :], w_k[None, :])", "tl.where(isq, w_q[None, :], w_q[None, :])"),
    "a mate's norm weight is its neighbour's": ("wk_ptr, mate, ok", "wk_ptr, d, ok"),
    "mean over padding too": ("tl.sum(x * x, 1) / D", "tl.sum(x * x, 1) / (D + 1)"),
    "no epsilon": ("/ D + eps)", "/ D)"),
    "halves turned the other way": ("tl.where(left[None, :], -b, b)", "tl.where(left[None, :], b, -b)"),
    "values are turned": ("out = tl.where(isv, x, a * cos", "out = tl.where(isv & (t < 0), x, a * cos"),
    "pairs turned the other way": ("d % 2 == 0", "d % 2 == 1"),
    "channels beyond the turned ones turn": ("mask=turned, other=1.)", "mask=d < D, other=1.)"),
    "the wrong speed": ("d ^ 1, d // 2", "d ^ 1, d // 4"),
    "padding is written": ("if slot >= 0:", "if slot >= -1:"),
    "slot without its block": ("slot // B * sb + slot % B * st + ((h", "slot * st + ((h"),
    "keys by the values' scale": ("tl.where(isv, tl.load(scales_ptr + 1), tl.load(scales_ptr))", "tl.load(scales_ptr + 1)"),
    "values over keys": ("((h - H) % HK)", "(h - H - HK)"),
    "the planner counts from its own tokens": ("(kv - q)[req] + i * bq", "i * bq"),
    "windows end a tile late": ("np.maximum(pos + 1 - (window or 2**31), 0)", "np.maximum(pos + n - (window or 2**31), 0)"),
    "parts of all tiles in slots": ("np.where(parts[of] > 1, np", "np.where(parts[of] > 0, np"),
    "no part is the first": ("slot, part == 0", "slot, part < 0")}


def caught_by(module):
    for name, check in CHECKS.items():
        try:
            if not check(module) < 1e-3:
                return name
        except (IndexError, ValueError) as e:
            return f"{name}: {e}"


def test_the_checks_pass():
    assert caught_by(kernels) is None


@pytest.mark.parametrize("what", MUTANTS)
def test_mutants_are_caught(what, tmp_path):
    check_noticed(caught_by, kernels, *MUTANTS[what], tmp_path/"mutant.py", seconds=30)
