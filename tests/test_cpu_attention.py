"The CPU's attention kernels: right on every shape, the same bits in any company, and bugs planted into them"
import os
import random
import subprocess
import sys
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch
from common import check_noticed

pytest.importorskip("numba")

from pagedlm import cpu_attention
from pagedlm.attention import AttnSpec, Dense
from pagedlm.config import ModelConfig
from pagedlm.core import cdiv
from pagedlm.cpu import CHECKED, aligned
from pagedlm.kvcache import KVCache, slots_of
from pagedlm.layers import rope_table
from pagedlm.paged import AttnMeta, Backend, load_backend

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}  # of norms; bf16 rounds keys and values, and the wide form weights
SHAPES = [(D, G) for D in (64, 80, 128) for G in (1, 3, 4, 8)]


def make_meta(rows, B):
    "rows: (table, first new position, new tokens) of each request"
    tables, starts, q_lens = zip(*rows)
    ends, M, int32 = [a + n for _, a, n in rows], max(map(len, tables)) + 1, partial(torch.tensor, dtype=torch.int32)
    return AttnMeta(int32([[*t, *[0]*(M - len(t))] for t in tables]), int32(ends), int32([0, *accumulate(q_lens)]),
                    int32([s for t, a, n in rows for s in slots_of(t, a, n, B)]),
                    torch.tensor([p for _, a, n in rows for p in range(a, a + n)]), list(q_lens), ends)


class Layer:
    "One layer, some sequences, and an empty cache that was NaN"
    def __init__(self, lens, Hk=1, G=3, D=64, B=16, dtype=torch.bfloat16, seed=0, n_threads=1, module=cpu_attention, **kw):
        rnd, H, self.B = random.Random(seed), Hk*G, B
        sizes = [cdiv(n, B) for n in lens]
        blocks = rnd.sample(range(1, sum(sizes) + 3), sum(sizes))
        self.tables = [[blocks.pop() for _ in range(m)] for m in sizes]
        self.spec = AttnSpec(H, Hk, D, D**-.5, rope_table(D, 2048, 1e4))
        self.backend = module.CpuBackend(n_threads=n_threads, **kw)
        self.config = ModelConfig(8, 8, 2, H, Hk, D, 8)
        self.cache = self.backend.new_cache(self.config, sum(sizes) + 3, B, dtype)
        self.cache.fill(float("nan"))
        g = torch.Generator().manual_seed(seed)
        self.qkv = [torch.randn(n, (H + 2*Hk)*D, generator=g) for n in lens]
        self.done, self.n_merges = [0]*len(lens), 0

    def step(self, works, attend=True):
        "works: [(sequence, new tokens)]; queries, and what each token gets"
        meta = make_meta([(self.tables[i], self.done[i], n) for i, n in works], self.B)
        meta = meta._replace(tiles=self.backend.tiles(self.cache, meta))
        x = torch.cat([self.qkv[i][self.done[i]:self.done[i] + n] for i, n in works])
        q = self.backend.store(self.spec, 1, self.cache, x, meta)
        self.n_merges += meta.tiles["n_merges"]
        for i, n in works:
            self.done[i] += n
        return q, self.backend.attend(self.spec, 1, q, self.cache, meta) if attend else None

    def serve(self, steps):
        "What each sequence gets in the end"
        outs = [[] for _ in self.qkv]
        for works in steps:
            for (i, _), o in zip(works, self.step(works)[1].split([n for _, n in works])):
                outs[i].append(o)
        return [torch.cat(o) for o in outs]


def wanted(layer, before, works):
    "The same by the readable back-end in float64: queries, keys, values, outputs"
    spec, plain = layer.spec._replace(rope=layer.spec.rope.double()), KVCache(layer.config, layer.cache.n_blocks, layer.B, torch.float64)
    plain.fill(float("nan"))
    for start, step in ([0]*len(before), before), (before, works):
        rows = [(t, a, n) for t, a, n in zip(layer.tables, start, step) if n]
        if not rows:
            continue
        meta = make_meta(rows, layer.B)
        x = torch.cat([x[a:a + n] for x, a, n in zip(layer.qkv, start, step) if n]).double()
        q = Backend().store(spec, 1, plain, x, meta)
    return q, *plain.flat(1), Backend().attend(spec, 1, q, plain, meta)


def distance(a, b):
    far = float((a.double() - b).norm()/b.norm())
    return far if far == far else float("inf")  # `max` may overlook a NaN


def errors(q_lens, kv_lens, **how):
    "Of a step whose requests have a history: queries, keys, values, outputs"
    layer, before = Layer(kv_lens, **how), [S - n for n, S in zip(q_lens, kv_lens)]
    if any(before):
        layer.step([(i, n) for i, n in enumerate(before) if n], attend=False)
    q, o = layer.step(list(enumerate(q_lens)))
    slots = [s for t, S in zip(layer.tables, kv_lens) for s in slots_of(t, 0, S, layer.B)]
    want_q, want_k, want_v, want = wanted(layer, before, q_lens)
    k, v = layer.cache.read(1, slots)
    return dict(q=distance(q, want_q), k=distance(k, want_k[slots]), v=distance(v, want_v[slots]), o=distance(o, want))


# ---- right

@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("D,G", SHAPES)
def test_equals_the_readable_backend(D, G, dtype):
    "Decodes and chunks in one step, of the lengths where kernels go wrong"
    for B in 1, 5, 16, 32:
        got = errors([1]*5 + [7, 33], [1, max(1, B - 1), B, B + 1, 1000, 40, 33], D=D, G=G, B=B, dtype=dtype)
        assert max(got.values()) < TOLERANCE[dtype] and got["q"] < 1e-6, (B, got)


@pytest.mark.parametrize("seed", range(12))
def test_any_step(seed):
    rnd = random.Random(seed)
    q_lens = [rnd.choice([1, 1, 2, 5, 16, 70]) for _ in range(rnd.randint(1, 4))]
    kv_lens = [n + rnd.choice([0, 0, 1, 15, 200, 600]) for n in q_lens]
    dtype = rnd.choice([torch.float32, torch.bfloat16])
    how = dict(Hk=rnd.randint(1, 3), G=rnd.choice([1, 2, 3, 5, 7]), D=rnd.choice([16, 32, 48, 64]), dtype=dtype,
               B=rnd.choice([1, 3, 16, 17, 48, 300]), seed=seed, n_threads=rnd.choice([1, 2, 3]), part=rnd.choice([16, 100, 256, 1024]))
    got = errors(q_lens, kv_lens, **how)
    assert max(got.values()) < TOLERANCE[dtype], (how, got)


def test_scores_of_thousands():
    "The largest score goes first, in the first part or the last"
    for first in True, False:
        layer = Layer([600], D=16, G=2, B=16, dtype=torch.float32)
        layer.qkv[0][:, 32:48] *= torch.linspace(2000, .1, 600)[:, None] if first else torch.linspace(.1, 2000, 600)[:, None]
        got = layer.serve([[(0, 600)]])[0]
        want = Dense()(0, layer.qkv[0].double(), layer.spec)
        assert torch.isfinite(got).all() and distance(got, want) < 1e-3


def test_nan_is_not_hidden():
    "A sequence whose numbers make no sense gets NaN, and nobody else does"
    layer = Layer([300, 40], dtype=torch.float32)
    layer.qkv[0][8] = float("nan")
    o, other = layer.serve([[(0, 300), (1, 40)]])
    assert torch.isfinite(o[:8]).all() and o[8:].isnan().all() and torch.isfinite(other).all()


def test_slots_of_minus_one_write_nothing():
    layer = Layer([40], dtype=torch.float32)
    meta = make_meta([(layer.tables[0], 0, 40)], layer.B)
    layer.backend.store(layer.spec, 1, layer.cache, layer.qkv[0], meta._replace(slots=torch.full_like(meta.slots, -1)))
    assert np.isnan(layer.cache.k).all() and np.isnan(layer.cache.v).all()
    qkv = layer.qkv[0].clone()
    layer.backend.store(layer.spec, 1, layer.cache, layer.qkv[0], meta)
    assert (np.isfinite(layer.cache.k).sum(), np.isfinite(layer.cache.v).sum()) == (40*64, 40*64)
    assert torch.equal(qkv, layer.qkv[0]), "the caller's qkv was used up"


def test_one_backend_two_caches():
    "Of other sizes and kinds, in turns; the second needs more places for parts"
    a, b = Layer([70], dtype=torch.float32, n_threads=2, part=16), Layer([300], G=4, D=32, B=5, n_threads=2, part=16)
    steps = [[(0, n)] for n in (60, 1, 5, 1, 3)]
    want = [Layer([70], dtype=torch.float32).serve(steps)[0], Layer([300], G=4, D=32, B=5).serve(steps)[0]]
    b.backend, got = a.backend, ([], [])
    for works in steps:
        for layer, outs in zip((a, b), got):
            outs.append(layer.step(works)[1])
    assert a.n_merges and b.n_merges
    assert all(distance(torch.cat(x), y) < 4e-3 for x, y in zip(got, want))


# ---- the same bits

def random_steps(rnd, lens):
    left, steps = list(lens), []
    while any(left):
        some = rnd.sample(range(len(lens)), rnd.randint(1, len(lens)))
        works = [(i, min(left[i], rnd.choice([1, 1, 2, rnd.randint(1, 200)]))) for i in some if left[i]]
        for i, n in works:
            left[i] -= n
        steps += [works] if works else []
    return steps


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("D,G,B,Hk", [(64, 3, 16, 3), (80, 1, 5, 1), (16, 4, 1, 2), (128, 8, 32, 1)])
def test_bits_depend_on_nobody(D, G, B, Hk, dtype):
    "Alone, in company, in random chunks and decodes, in other blocks, split over any number of threads"
    lens, shape = [700, 300, 40, 1], dict(D=D, G=G, B=B, Hk=Hk, dtype=dtype)
    def serve(steps, seed=0, n_threads=1):
        layer = Layer(lens, **shape, n_threads=n_threads)
        random.Random(seed).shuffle(layer.tables[0])
        return layer.serve(steps), layer.n_merges
    want, _ = serve([[(i, n)] for i, n in enumerate(lens)])
    splits = [[(0, 680)], *[[(0, 1)]]*4, [(0, 7)], *[[(0, 1)]]*9]
    ways = [([[*enumerate(lens)]], 1), (random_steps(random.Random(D), lens), 1), (random_steps(random.Random(G), lens), 3),
            (splits + [[(1, 300), (2, 40), (3, 1)]], 2)]
    for seed, (steps, n_threads) in enumerate(ways):
        got, n_merges = serve(steps, seed, n_threads)
        assert all(torch.equal(a, b) for a, b in zip(got, want)), steps
        assert n_threads == 1 or n_merges, "nothing was split"


# ---- the whole line

@pytest.mark.parametrize("n_kv_heads,head_dim", [(4, 16), (2, 32), (1, 16)])
def test_engine_equals_naive(n_kv_heads, head_dim):
    "Float32: chunks, preemption, prefix hits, aborts, lost rows, seeds"
    from common import play, random_arrivals, random_policy, random_world
    from test_oracle import EOS, Real, model_of, random_params
    model, rnd = model_of(torch.float32, n_kv_heads, head_dim), random.Random(n_kv_heads*head_dim)
    total = {"preempt": 0, "share": 0}
    for i in range(10):
        block_size = rnd.choice([1, 2, 3, 5, 16])
        shape = dict(block_size=block_size, n_blocks=3 + cdiv(rnd.randint(8, 48), block_size))
        world = random_world(rnd, kind=partial(Real, model, "cpu"), **shape, **dict(policy=random_policy(rnd)) if i % 2 else {})
        arrivals = random_arrivals(rnd, world, vocab=range(64), eos_ids=EOS)
        mishaps = dict(p_abort=.02, p_lose=.05, p_fail=.03) if i % 3 else {}
        counts = play(world, rnd, [a | random_params(rnd) for a in arrivals], **mishaps).counts()
        total = {name: n + counts[name] for name, n in total.items()}
    assert total["preempt"] and total["share"], total


# ---- what it refuses

@pytest.mark.parametrize("what", [dict(window=5), dict(softcap=3.), dict(sinks=torch.zeros(3)), dict(q_norm=torch.ones(64)),
                                  dict(k_norm=torch.ones(64)), dict(interleaved=True), dict(rope=rope_table(32, 64, 1e4))])
def test_what_it_does_not_know(what):
    layer, meta = Layer([4]), make_meta([([1], 0, 4)], 16)
    spec = layer.spec._replace(**what)
    with pytest.raises(ValueError, match="layer 1 has .* which the cpu back-end does not know"):
        layer.backend.store(spec, 1, layer.cache, layer.qkv[0], meta)
    with pytest.raises(ValueError, match="layer 1 has .* which the cpu back-end does not know"):
        layer.backend.attend(spec, 1, torch.zeros(4, 3, 64), layer.cache, meta)


def test_sizes_and_types_that_would_go_wrong():
    config = ModelConfig(8, 8, 1, 2, 1, 16, 8)
    backend = load_backend("cpu", n_threads=1)
    for dtype in torch.float64, torch.float16:
        with pytest.raises(ValueError, match=f"dtype={dtype}, but the cpu back-end takes"):
            backend.new_cache(config, 4, 4, dtype)
    with pytest.raises(ValueError, match="dtype=torch.float16, but the CPU kernels keep"):
        load_backend("cpu", kv_dtype=torch.float16).new_cache(config, 4, 4, torch.float32)
    with pytest.raises(ValueError, match="device=meta, but"):
        backend.new_cache(config, 4, 4, torch.float32, "meta")
    with pytest.raises(ValueError, match="n_blocks=1, but"):
        backend.new_cache(config, 1, 4, torch.float32)
    with pytest.raises(ValueError, match="block_size=0, but"):
        backend.new_cache(config, 2, 0, torch.float32)
    layer = Layer([4])
    with pytest.raises(ValueError, match="position 2048, but the model's max_len is 2048"):
        layer.backend.store(layer.spec, 1, layer.cache, layer.qkv[0], make_meta([([1], 0, 4)], 16)._replace(positions=torch.tensor([0, 1, 2, 2048])))


# ---- the other forms, and every address looked up

def small_sweep():
    for dtype, tolerance in TOLERANCE.items():
        got = [errors([1, 1, 1, 6], [1, 17, 130, 21], D=D, G=G, B=B, Hk=2, dtype=dtype, n_threads=2, part=50)
               for D, G, B in ((64, 3, 16), (80, 1, 5), (16, 7, 32), (16, 4, 1))]
        assert max(max(e.values()) for e in got) < tolerance, (dtype, got)
        a, b = (Layer([70, 30], D=16, B=16, dtype=dtype, n_threads=2, part=16) for _ in "ab")
        want, steps = a.serve([[(0, 70)], [(1, 30)]]), [[(0, 61), (1, 7)], *[[(0, 1)]]*5, [(0, 4), (1, 23)]]
        assert all(torch.equal(x, y) for x, y in zip(b.serve(steps), want)) and b.n_merges
    if CHECKED:
        layer = Layer([4], D=16)
        meta = make_meta([(layer.tables[0], 0, 4)], 16)
        with pytest.raises(IndexError, match="outside of all arrays"):
            layer.backend.store(layer.spec, 1, layer.cache, layer.qkv[0], meta._replace(slots=torch.tensor([0, 1, 2, 999])))
        with pytest.raises(IndexError, match="outside of all arrays"):
            tables = torch.full_like(meta.block_tables, 99)
            layer.backend.attend(layer.spec, 1, torch.zeros(4, 3, 16), layer.cache, meta._replace(block_tables=tables))
    print(cpu_attention.X["bf16"], cpu_attention.W)


@pytest.mark.parametrize("form,says", [("plain", "f32 8"), ("emulated", "bf16 16"), ("checked", "")])
def test_other_forms(form, says):
    env = dict(PAGEDLM_CPU_CHECK="1") if form == "checked" else dict(PAGEDLM_CPU=form)
    done = subprocess.run([sys.executable, __file__], env=os.environ | env | dict(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


# ---- who tests the tests?

def kernel_error(m):
    "Scores, softmax and values of the module, called by themselves: 3 rows, 20 keys in blocks of 6, then in full panels"
    rng, worst = np.random.default_rng(0), 0.
    for B, P, n_blocks, n in ((6, 1, 4, 20), (20, 2, 2, 37), (16, 1, 3, 47)):
        D, R, pool = 16, 3, [aligned((n_blocks + 2, P, 256)) for _ in "kv"]
        table = np.array(rng.permutation(n_blocks + 1)[:n_blocks] + 1, np.int32)
        for x in pool:
            x[:] = np.nan
        k, v, q = rng.standard_normal((n, D)), rng.standard_normal((n, D)), aligned((R, D))
        q[:] = rng.standard_normal((R, D))
        for j in range(n):
            block, (panel, lane) = table[j//B], divmod(j % B, 16)
            pool[0][block, panel].reshape(D, 16)[:, lane], pool[1][block, panel].reshape(16, D)[lane] = k[j], v[j]
        N = n_blocks*P*16
        s, p, ends, o = aligned((R, N)), aligned((R, N)), aligned((R, 2)), aligned((R, D))
        at = lambda x: x.ctypes.data
        m.scores["f32"].ctypes(at(pool[0]), at(pool[1]) - at(pool[0]), at(table), P*1024, P, 1024, n_blocks*P, n_blocks*P, at(q), 64, D, at(s), 4*N, R)
        m.softmaxes["f32"].ctypes(at(s), 4*N, n_blocks*P, P, B, n - 2, at(p), 4*N, at(ends), R, 1)
        m.values["f32"].ctypes(at(pool[1]), at(table), P*1024, P, 1024, n_blocks*P, B, n, at(p), 4*N, at(o), 64, D, R)
        want = np.where(np.arange(n) <= n - 3 + np.arange(R)[:, None], q @ k.T, -np.inf)
        weights = np.exp(want - want.max(1, keepdims=True))
        error = abs(o - weights @ v).max() + abs(ends[:, 1] - weights.sum(1)).max() + abs(ends[:, 0] - want.max(1)).max()
        worst = max(worst, error) if error == error else np.inf
    return worst


def tiles_error(m):
    "0 if every token meets every block of its request exactly once, in parts that begin where they must"
    for seed in range(30):
        rnd = random.Random(seed)
        q = [rnd.choice([0, 1, 1, 5, 40]) for _ in range(rnd.randint(1, 5))]
        kv, B, starts = [n + rnd.choice([0, 3, 900]) for n in q], rnd.choice([1, 7, 16, 300]), [0, *accumulate(q)]
        made = m.tiles_for(q, kv, B, 2, rnd.choice([1, 2, 8]))
        step, merges, met, places = max(1, 256//B), {tuple(x) for x in made["merges"].tolist()}, set(), []
        for t0, n, keys, row, b, n_blocks, place in made["tiles"].tolist():
            ok = starts[row] <= t0 and t0 + n <= starts[row + 1] and keys == kv[row] - (starts[row + 1] - t0 - n)
            parts = cdiv(cdiv(keys, B), step)
            if place < 0:
                ok &= b == 0 and n_blocks == cdiv(keys, B)
            else:
                ok &= b % step == 0 and n_blocks == min(step, cdiv(keys, B) - b) and (t0, n, place - b//step, parts) in merges
                places.append(place)
            new = {(t, j) for t in range(t0, t0 + n) for j in range(b, b + n_blocks)}
            if not ok or met & new:
                return 1
            met |= new
        if sorted(places) != list(range(made["n_places"])):
            return 1
        if {t for t, _ in met} != set(range(sum(q))) or len(merges) != made["n_merges"] or made["n_places"] != sum(x[3] for x in merges):
            return 1
    alone = m.tiles_for([1], [4000], 16, 1, 4)
    return alone["n_tiles"] < 8 or m.tiles_for([1]*64, [4000]*64, 16, 1, 4)["n_merges"]


def attend_error(m):
    "A split decode, a long chunk and a short one, by the module's compiled functions over the real kernels"
    m.scores, m.softmaxes, m.values = cpu_attention.scores, cpu_attention.softmaxes, cpu_attention.values
    layer = Layer([90, 45, 3], Hk=2, G=3, D=16, B=5, dtype=torch.float32, part=20)
    layer.step([(0, 89), (1, 3)], attend=False)
    meta = make_meta([(layer.tables[i], layer.done[i], n) for i, n in ((0, 1), (1, 42), (2, 3))], 5)
    q = layer.step([(0, 1), (1, 42), (2, 3)], attend=False)[0]
    want = wanted(layer, [89, 3, 0], [1, 42, 3])[3]
    backend = m.CpuBackend(n_threads=1)
    tiles = cpu_attention.tiles_for(meta.q_lens, meta.kv_lens, 5, 2, 8, 20)
    assert tiles["n_merges"]
    return distance(backend.attend(layer.spec, 1, q, layer.cache, meta._replace(tiles=tiles)), want)


def store_error(m):
    layer = Layer([21], Hk=2, G=3, D=32, B=18, dtype=torch.float32)
    q = m.CpuBackend(n_threads=1).store(layer.spec, 1, layer.cache, layer.qkv[0], make_meta([(layer.tables[0], 0, 21)], 18))
    slots = slots_of(layer.tables[0], 0, 21, 18)
    (k, v), want = layer.cache.read(1, slots), wanted(layer, [0], [21])
    return max(distance(q, want[0]), distance(k, want[1][slots]), distance(v, want[2][slots]))


MUTANTS = {  # what is wrong: (who should notice, a piece of the source, what to put there)
    "values behind the last key": (kernel_error, "with b.if_then(b.trunc(left, ir.IntType(1))): pair(half, True)", "pair(half)"),
    "the odd key is left out": (kernel_error, "with b.if_then(b.trunc(left, ir.IntType(1))): pair(half, True)", "pass"),
    "every panel is thought full": (kernel_error, 'b.icmp_signed(">=", left, a.num(16))', 'b.icmp_signed(">=", left, a.num(0))'),
    "spare lanes of a block are keys": (kernel_error, ", lane), b.sub(B, lane)), I32)", ", lane), a.num(16)), I32)"),
    "one key too many is seen": (kernel_error, 'b.icmp_signed("<", b.add(lanes', 'b.icmp_signed("<=", b.add(lanes'),
    "full panels by the block's end": (kernel_error, 'b.icmp_signed("==", a.mul(P, 16), B)', 'b.icmp_signed("!=", P, a.num(0))'),
    "all tokens see as much": (kernel_error, "n + r//G, p + r*pst", "n, p + r*pst"),
    "the largest score is forgotten": (kernel_error, "a.store(highest, end)", "a.store(a.const(F32, 0.), end)"),
    "every panel is its block's first": (kernel_error, "a.b.mul(a.b.urem(i, P), panel)", "a.b.mul(a.num(0), panel)"),
    "three rows are two": (kernel_error, "code(n, a.plus(first, ", "code(n - (n == 3), a.plus(first, "),
    "a tile of other tokens": (tiles_error, "keys = (kv - q)[row] + first + n", "keys = (kv - q)[row] + first"),
    "places overlap": (tiles_error, "places = np.cumsum(parts*split) - parts", "places = np.cumsum(split) - split"),
    "parts begin anywhere": (tiles_error, "row[tile], j*step,", "row[tile], j*(step - 1),"),
    "the last part is too long": (tiles_error, "np.minimum(size, blocks[tile] - j*step)", "size"),
    "nobody splits": (tiles_error, "(n_threads > 1) & (4*", "(n_threads > 99) & (4*"),
    "parts weigh the same": (attend_error, "w2 = np.float32(math.exp(top - highest)), np.float32(math.exp(top2 - highest))",
                             "w2 = np.float32(1), np.float32(1)"),
    "sums do not fade": (attend_error, "put_f32(end + 4, f32_at(end + 4)*w +", "put_f32(end + 4, f32_at(end + 4) +"),
    "the first part's table": (attend_error, "table + b*4, take", "table, take"),
    "the last parts are not merged": (attend_error, "for part in range(1, n_parts)", "for part in range(1, n_parts - 1)"),
    "a key is turned by the scale, too": (store_error, "turn_head(key, angles, half, np.float32(1), key)", "turn_head(key, angles, half, np.float32(2), key)"),
    "turned the other way": (store_error, "b.fsub(b.fmul(u, c), b.fmul(v, s))", "b.fadd(b.fmul(u, c), b.fmul(v, s))"),
    "a value in another's lane": (store_error, "lane*16 + d % 16)*4, y)", "(lane ^ 1)*16 + d % 16)*4, y)"),
    "every head of queries is the first": (store_error, "turn_head(x + h*D*4, angles", "turn_head(x, angles")}


def test_the_checks_pass():
    assert max(check(cpu_attention) for check in (kernel_error, tiles_error, attend_error, store_error)) < 1e-5


@pytest.mark.parametrize("what", MUTANTS)
def test_mutants_are_caught(what, tmp_path):
    check, *change = MUTANTS[what]
    check_noticed(lambda module: not check(module) < 1e-5, cpu_attention, *change, tmp_path/"mutant.py")


if __name__ == "__main__":
    small_sweep()
