"Every back-end that runs here attends like dense attention, whatever the step looks like."
import random
from functools import partial
from itertools import accumulate

import pytest
import torch

from pagedlm.attention import AttnSpec, Dense
from pagedlm.config import ModelConfig
from pagedlm.core import cdiv
from pagedlm.kvcache import slots_of
from pagedlm.layers import rope_table
from pagedlm.model import tiny_config, tiny_model
from pagedlm.paged import AttnMeta, Backend, Paged, TorchBackend

BACKENDS = dict(readable=Backend, torch=TorchBackend,
                one_by_one=partial(TorchBackend, 1), small_groups=partial(TorchBackend, 5000))


def make_meta(rows, B):
    "rows: (table, first new position, new tokens) of each request"
    tables, starts, q_lens = zip(*rows)
    ends, M = [s + n for s, n in zip(starts, q_lens)], max(map(len, tables))
    int32 = partial(torch.tensor, dtype=torch.int32)
    return AttnMeta(int32([[*t, *[0] * (M - len(t))] for t in tables]), int32(ends), int32([0, *accumulate(q_lens)]),
                    int32([s for t, a, n in rows for s in slots_of(t, a, n, B)]),
                    torch.tensor([p for _, a, n in rows for p in range(a, a + n)]), list(q_lens), ends)


def random_cuts(rng, n):
    "Split n tokens into chunks; half of all requests end with some decodes"
    cuts = [1] * rng.randint(0, min(4, n - 1)) if rng.random() < .5 else []
    left = n - len(cuts)
    while left:
        cuts.insert(0, rng.choice([left, rng.randint(1, left), 1]))
        left -= cuts[0]
    return cuts


def random_layer(rng, dtype):
    "One attention layer, some requests with their qkv and tables, and an empty (NaN) cache"
    Hk, G, D, B = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([4, 16, 20]), rng.randint(1, 16)
    config = ModelConfig(8, 8, 2, Hk * G, Hk, D, 8, max_len=64)
    g = torch.Generator().manual_seed(rng.randrange(2**32))
    spec = AttnSpec(Hk * G, Hk, D, D**-.5, rope_table(D, 64, 1e4, torch.promote_types(dtype, torch.float32)))
    qkv = [torch.randn(rng.randint(1, 50), (Hk * G + 2 * Hk) * D, generator=g, dtype=torch.float64).to(dtype)
           for _ in range(rng.randint(1, 8))]
    sizes = [cdiv(len(x), B) for x in qkv]
    blocks = rng.sample(range(1, sum(sizes) + 4), sum(sizes))
    tables = [[blocks.pop() for _ in range(m)] for m in sizes]
    return spec, qkv, tables, partial(Backend().new_cache, config, sum(sizes) + 4, B, dtype)


def serve(backend, rng, spec, qkv, tables, new_cache, layer):
    "Run all requests in ragged steps of random chunks, in random order; what each token gets"
    cache = new_cache()
    cache.fill(float("nan"))
    todo, done, outs = [random_cuts(rng, len(x)) for x in qkv], [0] * len(qkv), [[] for _ in qkv]
    while any(todo):
        who = [r for r, cuts in enumerate(todo) if cuts]
        who = rng.sample(who, rng.randint(1, len(who)))
        news = [todo[r].pop(0) for r in who]
        B = cache.block_size
        meta = make_meta([(tables[r][:cdiv(done[r] + n, B)], done[r], n) for r, n in zip(who, news)], B)
        x = torch.cat([qkv[r][done[r]:done[r] + n] for r, n in zip(who, news)])
        for r, n, o in zip(who, news, Paged(backend, cache, meta)(layer, x, spec).split(news)):
            outs[r].append(o)
            done[r] += n
    return [torch.cat(o) for o in outs]


@pytest.mark.parametrize("name", BACKENDS)
def test_ragged_steps_equal_dense(name):
    backend = BACKENDS[name]()
    for seed in range(60):
        rng = random.Random(seed)
        spec, qkv, tables, new_cache = random_layer(rng, torch.float64)
        for x, o in zip(qkv, serve(backend, rng, spec, qkv, tables, new_cache, layer=1)):
            torch.testing.assert_close(o, Dense()(1, x, spec), rtol=0, atol=1e-10, msg=lambda m: f"seed {seed}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_close(dtype):
    for seed in range(15):
        rng = random.Random(seed)
        spec, qkv, tables, new_cache = random_layer(rng, dtype)
        for x, o in zip(qkv, serve(TorchBackend(), rng, spec, qkv, tables, new_cache, layer=0)):
            assert o.dtype == dtype
            want = Dense()(0, x.double(), spec)
            atol = 16 * torch.finfo(dtype).eps
            torch.testing.assert_close(o.double(), want, rtol=0, atol=atol, msg=lambda m: f"seed {seed}: {m}")


@pytest.mark.parametrize("config", [{}, dict(head_dim=32), dict(n_kv_heads=4), dict(n_kv_heads=1), dict(tied=False)], ids=str)
def test_chunked_prefill_changes_nothing(config):
    "A whole model, 30 tokens in chunks of any size, next to another request that decodes in the same steps"
    model = tiny_model(tiny_config(**config), dtype=torch.float64)
    a, b = torch.randint(0, 258, (2, 60), generator=torch.Generator().manual_seed(2))
    a, table_a, table_b = a[:30], list(range(30, 0, -1)), list(range(31, 91))
    want_a, want_b = model(a, Dense()), model(b, Dense())
    for size in (1, 3, 4, 5, 30):
        for B in (1, 3, 16):
            cache, backend = Backend().new_cache(model.config, 91, B, model.dtype), TorchBackend()
            cache.fill(float("nan"))
            model(b[:20], Paged(backend, cache, make_meta([(table_b, 0, 20)], B)))
            for i, part in enumerate(a.split(size)):
                start = size * i
                meta = make_meta([(table_a, start, len(part)), (table_b, 20 + i, 1)], B)
                hidden = model(torch.cat([part, b[20 + i:21 + i]]), Paged(backend, cache, meta))
                want = torch.cat([want_a[start:start + len(part)], want_b[20 + i:21 + i]])
                torch.testing.assert_close(hidden, want, rtol=0, atol=1e-10)


def test_slots_of_minus_one_write_nothing():
    rng = random.Random(3)
    spec, qkv, tables, new_cache = random_layer(rng, torch.float64)
    cache = new_cache()
    cache.fill(7)
    meta = make_meta([(t, 0, len(x)) for t, x in zip(tables, qkv)], cache.block_size)
    Backend().store(spec, 0, cache, torch.cat(qkv), meta._replace(slots=torch.full_like(meta.slots, -1)))
    assert (cache.k[:, 1:] == 7).all() and (cache.v[:, 1:] == 7).all()
    Backend().store(spec, 0, cache, torch.cat(qkv), meta)
    assert int((cache.k[0, 1:] != 7).flatten(2).any(-1).sum()) == sum(map(len, qkv)) and (cache.k[1] == 7).all()
