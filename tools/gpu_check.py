"""Is everything right on this GPU, how fast is it, and how far from what the hardware can do? No network.

python tools/gpu_check.py               # all of it, in five minutes: checks, ceilings, kernels, engine
python tools/gpu_check.py --dry         # the same code, tiny, on a CPU in the interpreter: times mean nothing
python tools/gpu_check.py --only check  # a part of it; with --slice 2/8 every eighth check, from the third on

Each finding goes at once into a file of JSON lines in --out ($OUT, else bench/gpu): a cut loses little. The
table comes last. The exit code is 0 if every check ran and passed; speeds are only compared with targets.
"""
import argparse
import gc
import hashlib
import json
import math
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton

import torch
import triton
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagedlm import fused, kernels, layers
from pagedlm.attention import AttnSpec, attend, split_qkv, turn
from pagedlm.blocks import BlockManager, BlockPool
from pagedlm.config import EXAMPLES, ModelConfig, flops_per_token, kv_bytes_per_token, weight_bytes
from pagedlm.core import SamplingParams, cdiv
from pagedlm.engine import Engine
from pagedlm.families import families
from pagedlm.graphs import GraphRunner
from pagedlm.kvcache import KVCache
from pagedlm.model import Transformer, tiny_config, tiny_model
from pagedlm.paged import AttnMeta, Backend, Paged
from pagedlm.request import Request
from pagedlm.runner import Runner
from pagedlm.sampling import generate_naive, sample
from pagedlm.scheduler import Scheduler

PARTS = "check", "ceilings", "kernels", "engine"
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
LIMITS = {BF16: 1e-2, FP16: 2e-3, FP32: 2e-5}  # error of a row of an output, relative to the row
B = 16                                         # tokens per block, where nothing else is said
FAR = 2**31                                    # offsets that 32 bits cannot hold begin here


# ---- where we are and what was found

class Lab:
    "The device, the time that is left, and all findings"
    def __init__(self, how):
        self.how, self.dry, self.rows = how, how.dry, []
        self.device = torch.device("cpu" if how.dry else "cuda")
        self.rng = torch.Generator(self.device).manual_seed(0)
        self.end = time.monotonic() + how.seconds
        self.path = Path(how.into) if how.into else None

    def left(self):
        "Seconds until we must be done"
        return self.end - time.monotonic()

    def log(
        self,
        kind,     # check, ceiling, time, engine, target, note, skip, error, …
        name,
        **found,  # numbers and words
    ):
        "Write a finding down, and say it"
        row = dict(kind=kind, name=name, **{k: plain(v) for k, v in found.items()})
        self.rows.append(row)
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")  # one short write: slices share the file
        if kind != "target" and not (self.how.into and row.get("ok")):
            print(f"{kind:8} {name}  " + "  ".join(f"{k}={row[k]}" for k in found), flush=True)

    def find(self, name, key="ms"):
        "A number found earlier, or None"
        found = (r[key] for r in reversed(self.rows) if r["name"] == name and r.get(key) is not None)
        return next(found, None)

    def section(
        self,
        f,          # called with this
        need,       # seconds without which it need not start
        ours=True,  # whose failure would it be?
    ):
        "Run a part that may fail, or come too late, without harm to the others"
        name = getattr(f, "__name__", None) or f.func.__name__
        if self.left() < need and not self.dry:
            return self.log("skip", name, why=f"{self.left():.0f} s are left, it needs {need}")
        start = time.monotonic()
        try:
            f(self)
        except TimeoutError as e:
            self.log("skip", name, **told(e))
        except Exception as e:
            self.log("error" if ours else "missing", name, **told(e))
        finally:
            free()
        self.log("section", name, seconds=time.monotonic() - start)

    def rand(self, *shape, dtype=FP32):
        return torch.randn(*shape, device=self.device, generator=self.rng).to(dtype)

    def ints(self, values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def record(self, f):
        "A replay of f: a CUDA graph; on a CPU, f itself"
        f()
        if self.dry:
            return f
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            f()
        return graph.replay

    def ms(
        self,
        f,
        rep=30,       # milliseconds to go on
        replay=True,  # record it first, so that its launches cost the host nothing?
    ):
        "Median time of f on the device, each time with empty caches"
        if self.dry:
            start = time.perf_counter()
            f()
            return (time.perf_counter() - start)*1e3
        from triton.testing import do_bench
        return do_bench(self.record(f) if replay else f, warmup=10, rep=rep, return_mode="median")


def plain(x):
    "As it may stand in JSON: five digits are enough, and NaN and infinity become words"
    if isinstance(x, float):
        return float(f"{x:.5g}") if math.isfinite(x) else str(x)
    return x if x is None or isinstance(x, (bool, int, str)) else str(x)


def told(e):
    "An exception in short"
    last = traceback.extract_tb(e.__traceback__)[-1]
    return dict(what=f"{type(e).__name__}: {e}"[:400], where=f"{Path(last.filename).name}:{last.lineno}")


def free():
    "Give back what nobody holds any more"
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def stamp(lab):
    "What is measured, where, when, and by which code"
    def digest(paths): return hashlib.sha256(b"".join(p.read_bytes() for p in paths)).hexdigest()[:12]
    try:
        theirs = version("transformers")
    except PackageNotFoundError:
        theirs = None
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found = dict(date=date, dry=lab.dry, device=device_name(lab), python=platform.python_version(),
                 torch=torch.__version__, triton=triton.__version__, transformers=theirs,
                 cuda=torch.version.cuda, script=digest([Path(__file__)]),
                 package=digest(sorted((ROOT/"pagedlm").glob("*.py"))), asked=lab.how.asked)
    if not lab.dry:
        gpu = torch.cuda.get_device_properties(0)
        arch, n = kernels.gpu_of(lab.device)
        found.update(driver=driver(), arch=arch, processors=n, memory=gpu.total_memory)
    lab.log("stamp", "run", **found)


def driver():
    "Its version, if it says so"
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return None


def device_name(lab): return "CPU, interpreter" if lab.dry else torch.cuda.get_device_name()


# ---- comparing

def bits(x): return x.view(torch.uint8) if x.element_size() == 1 else x  # few operations know 8-bit floats


def poison(x):
    "NaN everywhere"
    bits(x).fill_(0x7f if x.element_size() == 1 else math.nan)


@contextmanager
def nan_if_unwritten():
    "What `torch.empty` gives is full of NaN, so that a number that no kernel writes cannot look right"
    torch.use_deterministic_algorithms(True, warn_only=True)  # with torch.utils.deterministic's default
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def worst(got, want):
    "Largest error of a row relative to the row; infinite if anything is not a number"
    got, want = got.double(), want.double()
    if got.shape != want.shape or not got.isfinite().all():
        return math.inf
    return float(((got - want).norm(dim=-1)/want.norm(dim=-1).clamp(min=1e-30)).max())


def outcome(errors, limit, **more):
    "Of several errors, the largest, and which one it is"
    name = max(errors, key=lambda k: (math.isnan(errors[k]), errors[k]))
    return dict(ok=errors[name] <= limit, error=errors[name], limit=limit, worst=name, **more)


# ---- checks of attention and store

class Step:
    "Attention of one kind of layer for some requests, whose keys and values lie in random blocks among NaN"
    def __init__(self, lab, q_lens, kv_lens, Hk=2, G=4, D=128, B=B, dtype=FP16, kv_dtype=None, chunk=None,
                 n_layers=1, launches={}, n_blocks=None, **how):
        self.lab, self.q_lens, self.kv_lens, self.dtype, H = lab, q_lens, kv_lens, dtype, Hk*G
        sizes = [cdiv(n, B) for n in kv_lens]
        n_blocks = n_blocks or sum(sizes) + 3
        first = n_blocks - sum(sizes)  # the last blocks, in any order: far ones if there are many
        order = (first + torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(0))).tolist()
        self.tables = [[order.pop() for _ in range(n)] for n in sizes]
        self.table = lab.ints([t + [0]*(max(sizes) - len(t)) for t in self.tables])
        self.spec = AttnSpec(H, Hk, D, D**-.5, layers.rope_table(D, 32, 1e4, device=lab.device), **how)
        self.backend, self.B = kernels.TritonBackend(kv_dtype, chunk, launches), B
        self.config = ModelConfig(8, 8, n_layers, H, Hk, D, 8)
        self.cache = self.backend.new_cache(self.config, n_blocks, B, dtype, lab.device)
        self.q = lab.rand(sum(q_lens), H, D, dtype=dtype)

    def fill(self):
        "Known keys and values for layer 0; returns them, request by request, float64"
        lab, cache, kept = self.lab, self.cache, []
        for pool in cache.k, cache.v:
            poison(pool)
        if cache.k.element_size() == 1:
            cache.scales.copy_(lab.ints([[.5, 2.]], FP32))
        for table, n in zip(self.tables, self.kv_lens):
            at = torch.arange(n, device=lab.device)
            block, slot = lab.ints(table, torch.int64)[at//self.B], at % self.B
            for pool, scale in zip((cache.k, cache.v), cache.scales[0].tolist()):
                x = (lab.rand(n, *pool.shape[3:])/scale).to(pool.dtype)
                bits(pool)[0, block, slot] = bits(x)
                kept.append(x.float().double()*scale)
        return list(zip(kept[::2], kept[1::2]))

    def noise(self):
        "Random keys and values everywhere: for timing"
        for pool in self.cache.k, self.cache.v:
            for x in pool:
                x.copy_(self.lab.rand(*x.shape, dtype=self.dtype))
        return self

    def cuts(self, q_lens=None, kv_lens=None, n_rows=None):
        lens, put = (q_lens or self.q_lens, kv_lens or self.kv_lens), self.lab.ints
        plan = self.backend.plan([self.spec], self.cache, *lens, n_rows)
        cuts = plan[self.backend.key(self.spec)]
        return [cut._replace(tiles=put(cut.tiles), merges=put(cut.merges)) for cut in cuts]

    def launch(self, cuts, o, layer=0):
        for cut in cuts:
            kernels.launch_cut(self.spec, layer, self.cache, self.q, o, self.table, cut)
        return o

    def attend(self):
        with nan_if_unwritten():
            return self.launch(self.cuts(), torch.empty_like(self.q))

    def wanted(self, kept, kv_lens=None):
        "Attention in float64, without blocks"
        s, rows, out = self.spec, self.q.double().split(self.q_lens), []
        sinks = None if s.sinks is None else s.sinks.double()
        for q, (k, v), n in zip(rows, kept, kv_lens or self.kv_lens):
            at = torch.arange(n - len(q), n, device=q.device)
            out.append(attend(q, k[:n], v[:n], at, s.scale, s.window, s.softcap, sinks))
        return torch.cat(out)


def attention_cases(lab, B, H):
    "Lengths at every edge; chunks and decodes in one step; what a layer may ask for; one split and two"
    sinks = lab.rand(H)*2
    if lab.dry:
        return dict(decode=dict(q_lens=[1]*4, kv_lens=[1, 15, 16, 33]),
                    mixed=dict(q_lens=[1, 7], kv_lens=[16, 20]),
                    window=dict(q_lens=[2], kv_lens=[60], window=20, sinks=sinks, chunk=32),
                    softcap=dict(q_lens=[1], kv_lens=[70], softcap=20., chunk=32))
    ugly = [1, max(1, B - 1), B, B + 1, 100]
    return dict(decode=dict(q_lens=[1]*7, kv_lens=[*ugly, 3000, 7001]),
                mixed=dict(q_lens=[1, 7, 16, 1, 33, 300], kv_lens=[1, 15, 16, 17, 100, 1500]),
                window=dict(q_lens=[1, 1, 33, 200], kv_lens=[3000, 17, 1000, 200], window=40, sinks=sinks),
                sinks=dict(q_lens=[1, 33], kv_lens=[4000, 1000], sinks=sinks, chunk=256),
                softcap=dict(q_lens=[1, 2, 40], kv_lens=[5000, 17, 2000], softcap=20., chunk=128))


def check_attend(lab, dtype, G, D, B, kv_dtype=None):
    "Every case against float64"
    errors = {}
    for name, how in attention_cases(lab, B, 2*G).items():
        step = Step(lab, G=G, D=D, B=B, dtype=dtype, kv_dtype=kv_dtype, **how)
        kept = step.fill()
        errors[name] = worst(step.attend(), step.wanted(kept))
    return outcome(errors, LIMITS[dtype])


def check_store(lab, dtype, Hk, G, D, B, rot, norm=False, pairs=False, kv_dtype=None):
    "Norm, rotation, and K and V where they belong: nowhere else, and nowhere for slot -1"
    H, slots, norms = Hk*G, [37, -1, 0, 63, 5], {}
    if norm:
        norms = {k: (lab.rand(D)*.2 + 1).to(dtype) for k in ("q_norm", "k_norm")}
    table = layers.rope_table(rot, 1024, 1e4, device=lab.device)
    spec = AttnSpec(H, Hk, D, D**-.5, table, interleaved=pairs, norm_eps=1e-5, **norms)
    config = ModelConfig(8, 8, 1, H, Hk, D, 8)
    cache = kernels.TritonBackend(kv_dtype).new_cache(config, cdiv(64, B), B, dtype, lab.device)
    for pool in cache.k, cache.v:
        poison(pool)
    if kv_dtype:
        cache.scales.copy_(lab.ints([[.25, 2.]], FP32))
    at, qkv = lab.ints([0, 3, 15, 16, 999], torch.int64), lab.rand(5, (H + 2*Hk)*D, dtype=dtype)
    with nan_if_unwritten():
        q = kernels.launch_store(spec, 0, cache, qkv, at, lab.ints(slots))
    wide = spec._replace(rope=table.double(), **{k: w.double() for k, w in norms.items()})
    want_q, k, v = split_qkv(qkv.double(), wide)
    want_q, k = turn(want_q, wide, at, wide.q_norm), turn(k, wide, at, wide.k_norm)
    keep = [i for i, s in enumerate(slots) if s >= 0]
    errors, scales = dict(q=worst(q, want_q)), cache.scales[0].tolist()
    for name, pool, want, scale in zip("kv", (cache.k, cache.v), (k, v), scales):
        pool = pool[0].float()
        got = torch.stack([pool[slots[i]//B, slots[i] % B] for i in keep])*scale
        untouched = int(pool.isnan().sum()) == pool.numel() - len(keep)*Hk*D
        errors[name] = worst(got, want[keep]) if untouched else math.inf
    return outcome(errors, LIMITS[dtype] if not kv_dtype else .3 if lab.dry else .04)  # 8 bits: 3 of mantissa


def check_alone(lab):
    "With a fixed chunk, a request's bits do not depend on who else is in the step"
    lens = [40, 20, 33] if lab.dry else [4000, 100, 1500, 17]
    crowd = Step(lab, [1]*len(lens), lens, chunk=32 if lab.dry else 256)
    crowd.fill()
    both, differ = crowd.attend(), 0
    for r, n in enumerate(lens):
        o = torch.empty_like(both[:1])
        for cut in crowd.cuts([1], [n]):
            kernels.launch_cut(crowd.spec, 0, crowd.cache, crowd.q[r:r + 1], o, crowd.table[r:r + 1], cut)
        differ += not torch.equal(o, both[r:r + 1])
    return dict(ok=not differ, error=differ, limit=0)


def check_graph(lab):
    "One recorded launch, other lengths each time: only the numbers in its buffers change"
    R, long = (3, 40) if lab.dry else (8, 3000)
    step = Step(lab, [1]*R, [long]*R, Hk=8, G=2, dtype=FP16 if lab.dry else BF16)
    kept, o, buffers = step.fill(), torch.empty_like(step.q), step.cuts(n_rows=R)
    replay = lab.record(lambda: step.launch(buffers, o))
    rng, errors = random.Random(0), {}
    mixed = [rng.randint(1, long) for _ in range(R)]
    edges = [rng.choice([1, 15, 16, 17, 33]) for _ in range(R)]
    for lens in (mixed, edges) if lab.dry else ([1]*R, [long]*R, mixed, edges):
        for old, new in zip(buffers, step.cuts(kv_lens=lens, n_rows=R)):
            old.tiles.copy_(new.tiles)
            old.merges.copy_(new.merges)
        poison(o)
        replay()
        errors[str(lens[:4])] = worst(o, step.wanted(kept, lens))
    return outcome(errors, LIMITS[step.dtype])


# ---- checks of the fused operations

def check_fused(lab, dtype, T, C):
    "Norms and gates against float64"
    x, r, w = lab.rand(T, C, dtype=dtype), lab.rand(T, C, dtype=dtype), (lab.rand(C)*.2 + 1).to(dtype)
    stream = (x.double() + r.double()).to(dtype)
    with nan_if_unwritten():
        y, kept = fused.add_rmsnorm(x, r, w, 1e-5)
        first = fused.add_rmsnorm(x, None, w, 1e-5)[0]
        gate_up = lab.rand(T, 2*C, dtype=dtype)
        silu, gelu = fused.act_mul(gate_up), fused.act_mul(gate_up, "gelu_tanh")
    g, up = gate_up.double().chunk(2, -1)
    def norm(x): return layers.rms_norm(x.double(), w.double(), 1e-5)
    errors = dict(stream=worst(kept, stream), norm=worst(y, norm(stream)), first=worst(first, norm(x)),
                  silu=worst(silu, F.silu(g)*up), gelu=worst(gelu, F.gelu(g, approximate="tanh")*up))
    return outcome(errors, LIMITS[dtype])


def check_sample(lab, dtype, R, V):
    "The ids that `sampling.sample` draws; a row without sense gives -1"
    rng = random.Random(V)
    kinds = [(0., 0, 1., 0.), (.6, 0, 1., 0.), (1., 50, 1., 0.), (1., 0, .9, 0.), (.8, 40, .95, .02)]
    rows = [rng.choice(kinds) for _ in range(R)]
    how = [list(x) for x in zip(*rows)] + [list(range(R)), [rng.randrange(5000) for _ in range(R)]]
    logits = lab.rand(R, V, dtype=dtype)*4
    want = sample(logits.cpu(), *how)
    got = fused.sample(logits, *how).cpu()
    logits[0, V//2], logits[1] = math.nan, -math.inf
    bad = fused.sample(logits, *how)[:2].tolist()
    differ = int((got != want).sum()) + (bad != [-1, -1])*R
    return dict(ok=differ <= R//50, error=differ, limit=R//50, rows=R)  # exp and log may round otherwise


# ---- checks beyond 2**31

def check_far_blocks(lab):
    "A cache of more than 2**31 numbers: blocks at its end are read, and stored to"
    Hk, G, D = 2, 4, 128
    step = Step(lab, [1, 1], [100, 17], Hk, G, D, n_blocks=FAR//(Hk*B*D) + 20)
    kept = step.fill()
    errors = dict(attend=worst(step.attend(), step.wanted(kept)))
    last = step.tables[1][-1]
    qkv = lab.rand(1, (G + 2)*Hk*D, dtype=FP16)
    kernels.launch_store(step.spec, 0, step.cache, qkv, lab.ints([0]), lab.ints([last*B + 5]))
    _, k, v = split_qkv(qkv, step.spec)  # position 0: nothing turns
    errors.update(k=worst(step.cache.k[0, last, 5], k[0]), v=worst(step.cache.v[0, last, 5], v[0]))
    return outcome(errors, LIMITS[FP16])


def check_far_rows(lab):
    "More than 2**31 numbers in queries, keys and outputs of one step"
    Hk, G, D = 1, 8, 256
    T = FAR//(G*D) + 8
    step = Step(lab, [1], [1], Hk, G, D)
    (_, v), = step.fill()
    step.q, step.table = torch.ones(T, G, D, dtype=FP16, device=lab.device), step.table.repeat(T, 1)
    o = torch.empty_like(step.q)
    step.launch(step.cuts([1]*T, [1]*T), o)
    errors = dict(attend=worst(o[-9:], v.expand(9, G, D)))
    del o
    qkv = torch.ones(T, (G + 2)*D, dtype=FP16, device=lab.device)
    qkv[-3:] = lab.rand(3, (G + 2)*D, dtype=FP16)
    at = torch.arange(T, device=lab.device) % 30
    nowhere = torch.full((T,), -1, dtype=torch.int32, device=lab.device)
    q = kernels.launch_store(step.spec, 0, step.cache, qkv, at, nowhere)
    wide = step.spec._replace(rope=step.spec.rope.double())
    errors["store"] = worst(q[-3:], turn(split_qkv(qkv[-3:].double(), wide)[0], wide, at[-3:]))
    return outcome(errors, LIMITS[FP16])


def check_far_fused(lab):
    "Norm, gate and sampler on more than 2**31 numbers"
    C, V = 4096, 151936
    T, R = FAR//C + 8, FAR//V + 8
    x, w = torch.ones(T, C, dtype=FP16, device=lab.device), torch.ones(C, dtype=FP16, device=lab.device)
    x[-3:] = lab.rand(3, C, dtype=FP16)
    y, stream = fused.add_rmsnorm(x, x, w, 1e-5)
    errors = dict(norm=worst(y[-3:], layers.rms_norm(2*x[-3:].double(), w.double(), 1e-5)),
                  stream=worst(stream[-3:], 2*x[-3:]))
    del y, stream
    g, up = x[-3:].double().chunk(2, -1)
    errors["gate"] = worst(fused.act_mul(x)[-3:], F.silu(g)*up)
    del x
    logits, best = torch.zeros(R, V, dtype=FP16, device=lab.device), torch.arange(R, device=lab.device)*7 % V
    logits[torch.arange(R, device=lab.device), best] = 9
    ids = fused.sample(logits, *([z]*R for z in (0., 0, 1., 0., 0, 0)))
    errors["greedy"] = float((ids != best).sum())
    return outcome(errors, LIMITS[FP16])


# ---- a model, and engines around it

def random_model(lab, config, dtype, head_norms=False):
    "Weights from a seed; Qwen3's norms of queries and keys are part of its specs"
    model = Transformer(config, ops=fused, dtype=dtype, device=lab.device)
    for name, p in model.named_parameters():
        p.normal_(generator=lab.rng)
        if p.dim() == 1:
            p.mul_(.1).add_(1)
        else:
            p.mul_(.3 if name.startswith(("embed", "head")) else 2*p.shape[1]**-.5)
    if head_norms and model.specs[0].q_norm is None:
        def weight(): return (lab.rand(config.head_dim)*.1 + 1).to(dtype)
        model.specs = [spec._replace(q_norm=weight(), k_norm=weight(), norm_eps=config.norm_eps)
                       for spec in model.specs]
    return model


def in_transformers(lab, model):
    "The same weights in transformers' own Llama or Qwen3"
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
    c, norms = model.config, model.specs[0].q_norm is not None
    config = (Qwen3Config if norms else LlamaConfig)(
        vocab_size=c.vocab_size, hidden_size=c.width, num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim,
        intermediate_size=c.mlp_width, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.max_len, rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta),
        tie_word_embeddings=c.tied, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.device(lab.device):
        theirs = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="sdpa")
    weights, ours = {}, dict(model.named_parameters())
    for name, parts in families["llama"].tensors(c).items():
        weights.update(zip(parts, ours[name].split(list(parts.values()))))
    for layer, spec in enumerate(model.specs if norms else ()):
        for name in "q_norm", "k_norm":
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = getattr(spec, name)
    lacks, unknown = theirs.load_state_dict(weights, strict=False)
    if unknown or [name for name in lacks if not (c.tied and name == "lm_head.weight")]:
        raise ValueError(f"transformers' model lacks {lacks}, and does not know {unknown}")
    return theirs.eval()


def our_logits(lab, model, ids, n):
    "Of the last n tokens: a prompt in two chunks, then token by token, through a cache full of NaN"
    backend, T, rows = kernels.TritonBackend(), len(ids), []
    cache = backend.new_cache(model.config, cdiv(T, B) + 2, B, model.dtype, lab.device)
    cache.fill(math.nan)
    table = list(range(cdiv(T, B) + 1, 1, -1))
    steps = [(0, T//2), (T//2, T - n - T//2), *((i, 1) for i in range(T - n, T))]
    for start, m in steps:
        at = torch.arange(start, start + m, device=lab.device)
        slots = (lab.ints(table)[at//B]*B + at % B).int()
        meta = AttnMeta(lab.ints([table]), None, None, slots, at, [m], [start + m])
        rows.append(model(ids[at], Paged(backend, cache, meta))[-1:])
    return model.logits(torch.cat(rows[2:]))


def check_model(lab, config, dtype, head_norms, n_ids, limit):
    "Logits of the whole model against transformers' with the same weights"
    model = random_model(lab, config, dtype, head_norms)
    theirs = in_transformers(lab, model)
    ids = torch.randint(config.vocab_size, (n_ids,), device=lab.device, generator=lab.rng)
    n = 3 if lab.dry else 8
    with torch.inference_mode():
        error = worst(our_logits(lab, model, ids, n), theirs(ids[None]).logits[0, -n:])
    return dict(ok=error <= limit, error=error, limit=limit)


def make_runner(lab, model, n_blocks, rows, max_len, graphs=True, kv_dtype=None, block_size=B):
    how = dict(record=lambda f: f) if lab.dry and graphs else {}  # a CPU has no CUDA graphs: call it again
    kind, backend = GraphRunner if graphs else Runner, kernels.TritonBackend(kv_dtype)
    return kind(model, backend, n_blocks, block_size, rows, max_len, sample=fused.sample, **how)


def make_engine(runner, n_blocks, rows, max_len, budget, ahead):
    manager = BlockManager(BlockPool(n_blocks), runner.block_size)
    return Engine(Scheduler(manager, rows, budget, max_model_len=max_len), runner, ahead=ahead)


def add(engine, prompts, wants, temperature):
    "Queue prompts, each with the number of ids it wants"
    params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n) for n in wants]
    return [engine.add(Request(str(i), ids, p, seed=i)) for i, (ids, p) in enumerate(zip(prompts, params))]


def check_engine(lab, graphs, ahead):
    "Through the whole engine, in a pool that barely fits: the ids of one plain forward pass per token"
    config = tiny_config(vocab_size=100, n_heads=6, n_kv_heads=2)
    model, rng = tiny_model(config, device=lab.device), random.Random(1)
    block_size, rows, blocks, budget, want = (4, 3, 7, 16, 3) if lab.dry else (16, 8, 40, 64, 20)
    sizes = (9, 5, 2) if lab.dry else [rng.randint(1, 90) for _ in range(12)]
    prompts = [[rng.randrange(100) for _ in range(n)] for n in sizes]
    runner = make_runner(lab, model, blocks, rows, 120, graphs, block_size=block_size)
    runner.cache.fill(math.nan)
    engine = make_engine(runner, blocks, rows, 120, budget, ahead)
    requests = add(engine, prompts, [want]*len(prompts), 0.)
    for _ in engine.drain():
        pass
    params = SamplingParams(temperature=0., max_tokens=want)
    differ = sum(r.output != generate_naive(model, ids, params) for r, ids in zip(requests, prompts))
    return dict(ok=not differ, error=differ, limit=0, requests=len(prompts))


# ---- all checks

def attention_checks(lab):
    "Every grouping and head size in bfloat16; other types and block sizes where they can differ"
    e5m2 = torch.float8_e5m2
    if lab.dry:
        shapes = [(FP16, 4, 64, 16, None), (FP32, 3, 80, 16, None), (FP16, 1, 128, 5, None),
                  (FP16, 8, 64, 32, FP8)]
    else:
        shapes = [(FP32, 3, D, 16, None) for D in (256, 128, 80, 64)]  # these compile longest
        shapes += [(BF16, G, D, 16, None) for D, G in product((256, 128, 80, 64), (1, 3, 4, 8))]
        shapes += [(FP16, G, D, 16, None) for D, G in product((256, 128, 80, 64), (1, 4))]
        shapes += [(BF16, G, D, 16, FP8) for D, G in ((256, 4), (128, 8), (80, 3), (64, 1))]
        shapes += [(BF16, 4, 128, size, None) for size in (1, 24, 32, 64, 256)] + [(FP16, 4, 128, 16, e5m2)]
    for dtype, G, D, size, kv in shapes:
        name = f"attend {short(dtype)} G={G} D={D} B={size}" + f" kv={short(kv)}"*(kv is not None)
        yield name, partial(check_attend, dtype=dtype, G=G, D=D, B=size, kv_dtype=kv)


def store_checks(lab):
    shapes = [(3, 3, 64, 16, 64), (8, 2, 128, 16, 128, True), (1, 4, 80, 32, 32), (2, 1, 96, 1, 96, True),
              (4, 1, 256, 16, 256, False, True), (8, 4, 128, 16, 128, False, False, FP8),
              (2, 8, 64, 16, 64, True, True, FP8)]
    names = "Hk G D B rot norm pairs kv_dtype".split()
    for dtype in (FP16,) if lab.dry else (BF16, FP16, FP32):
        for shape in shapes[1:6:2] if lab.dry else shapes:
            how = dict(zip(names, shape))
            words = " ".join(f"{k}={short(v)}" for k, v in how.items())
            yield f"store {short(dtype)} {words}", partial(check_store, dtype=dtype, **how)


def other_checks(lab):
    tiny, dry = tiny_config(n_heads=8, n_kv_heads=2, norm_eps=1e-6), lab.dry
    sizes = [(1, 576), (300, 1024), (7, 4096), (5, 14336)]
    for dtype, (T, C) in [(FP16, (3, 80))] if dry else product(LIMITS, sizes):
        yield f"norm, gate {short(dtype)} ({T}, {C})", partial(check_fused, dtype=dtype, T=T, C=C)
    sizes = [(BF16, 64, 151936), (FP16, 100, 32000), (FP32, 200, 5000), (FP32, 200, 258)]
    for dtype, R, V in [(FP16, 5, 300)] if dry else sizes:
        yield f"sample {short(dtype)} ({R}, {V})", partial(check_sample, dtype=dtype, R=R, V=V)
    yield "alone or in a crowd", check_alone
    yield "graph, other lengths", check_graph
    for graphs, ahead in ((True, 1), (False, 0)):
        yield f"engine, graphs={graphs} ahead={ahead}", partial(check_engine, graphs=graphs, ahead=ahead)
    for norms in (True,) if dry else (True, False):
        how = dict(config=tiny, dtype=FP32, head_norms=norms, n_ids=20 if dry else 200, limit=1e-3)
        yield f"model, head norms={norms}, and transformers'", partial(check_model, **how)
    for name, f in (("blocks", check_far_blocks), ("rows", check_far_rows), ("fused", check_far_fused)):
        yield f"beyond 2**31: {name}", None if dry else f


def short(dtype): return str(dtype).removeprefix("torch.")


def run_checks(lab):
    "All checks, or the slice that was asked for"
    i, n = map(int, (lab.how.slice or "0/1").split("/"))
    every = [*attention_checks(lab), *store_checks(lab), *other_checks(lab)]
    for name, f in every[i::n]:
        start = time.monotonic()
        if f is None:
            lab.log("skip", name, why="needs a GPU")
            continue
        if lab.left() < 5 and not lab.dry:
            lab.log("check", name, ok=False, error="not run: no time left")
            continue
        try:
            found = f(lab)
        except Exception as e:
            found = dict(ok=False, **told(e))
        lab.log("check", name, **found, seconds=time.monotonic() - start)
        free()
    lab.log("slice", f"{i}/{n}", n=len(every[i::n]))


def run_slices(lab, seconds):
    "The same in several processes, because most of the time goes into compiling"
    n, end = lab.how.jobs, time.monotonic() + seconds
    cmd = [sys.executable, str(Path(__file__).resolve()), "--only", "check", "--into", str(lab.path),
           "--seconds", str(int(seconds)), *["--dry"]*lab.dry]
    jobs = [subprocess.Popen([*cmd, "--slice", f"{i}/{n}"], cwd=ROOT) for i in range(n)]
    for i, job in enumerate(jobs):
        try:
            job.wait(max(1, end + 20 - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
    lab.rows = [json.loads(line) for line in lab.path.read_text(encoding="utf-8").splitlines()]
    done = {r["name"] for r in lab.rows if r["kind"] == "slice"}
    for i, job in enumerate(jobs):
        if f"{i}/{n}" not in done:
            lab.log("error", f"slice {i}/{n}", what=f"ended early, exit code {job.returncode}")


# ---- ceilings

def ceilings(lab):
    "What this machine can do at best, measured the plainest way"
    n, side = (2**16, 64) if lab.dry else (2**30, 8192)
    dtype = FP16 if lab.dry else BF16
    x = lab.rand(n, dtype=dtype)
    y = torch.empty_like(x)
    ms = lab.ms(lambda: y.copy_(x), rep=100)
    lab.log("ceiling", "copy", ms=ms, rate=2*x.nbytes/ms*1e3, unit="bytes/s, read and written")
    a, b = lab.rand(side, side, dtype=dtype), lab.rand(side, side, dtype=dtype)
    ms = lab.ms(lambda: a @ b, rep=150)
    lab.log("ceiling", "matmul", ms=ms, rate=2*side**3/ms*1e3, unit=f"FLOP/s, {short(dtype)}, {side} cubed")


def floor_ms(lab, nbytes=0, flops=0):
    "No faster than this: the slower of moving and computing; NaN where the ceilings are not known"
    copy, matmul = (lab.find(name, "rate") or math.nan for name in ("copy", "matmul"))
    return max(nbytes/copy, flops/matmul)*1e3


def pace(lab, ms, nbytes=0, flops=0):
    "A time, and what part of it the floor is"
    return dict(ms=ms, share=floor_ms(lab, nbytes, flops)/ms)


# ---- times of attention

def half(lab): return FP16 if lab.dry else BF16  # the interpreter has no bfloat16


def heads(lab): return (2, 4, 64) if lab.dry else (8, 4, 128)  # Hk, G, D of Llama-3-8B


def decode_name(R, L): return f"decode R={R} L={L}"


def prefill_name(n, L): return f"prefill n={n} L={L}"


def time_decode(lab, R, L, kv_dtype=None, launches={}, B=B, G=None, kind="time", suffix=""):
    "A token for each of R requests of L keys, as a graph replays it; of so many layers that no L2 holds them"
    Hk, default, D = heads(lab)
    nbytes = 2*R*L*Hk*D*(1 if kv_dtype else 2)
    n = 1 if lab.dry else min(8, cdiv(10**9, nbytes))
    how = dict(dtype=half(lab), kv_dtype=kv_dtype, n_layers=n, launches=launches)
    step = Step(lab, [1]*R, [L]*R, Hk, G or default, D, B, **how).noise()
    cuts, o = step.cuts(n_rows=R), torch.empty_like(step.q)
    ms = lab.ms(lambda: [step.launch(cuts, o, layer) for layer in range(n)])/n
    lab.log(kind, decode_name(R, L) + suffix, **pace(lab, ms, nbytes), gigabytes=nbytes/1e9, layers=n,
            tiles=int((cuts[0].tiles[:, 1] > 0).sum()), launch=tuple(cuts[0].launch), block=B)


def decodes(lab):
    "Decode attention in Llama-3-8B's shape: the two targets, then more"
    if lab.dry:
        return time_decode(lab, 2, 20)
    for R, L in ((64, 4096), (1, 32768), (1, 512), (8, 4096), (256, 1024)):
        time_decode(lab, R, L)
    time_decode(lab, 64, 4096, kv_dtype=FP8, suffix=" fp8")
    time_decode(lab, 256, 900, G=2, suffix=" Qwen3-0.6B")


def time_prefill(lab, n, L, launches={}, kind="time", suffix=""):
    "The last n tokens of a prompt of L"
    Hk, G, D = heads(lab)
    step = Step(lab, [n], [L], Hk, G, D, dtype=half(lab), launches=launches).noise()
    cuts, o = step.cuts(), torch.empty_like(step.q)
    flops = 4*Hk*G*D*(n*L - n*n/2)
    ms = lab.ms(lambda: step.launch(cuts, o))
    lab.log(kind, prefill_name(n, L) + suffix, **pace(lab, ms, flops=flops), tflops=flops/ms*1e-9,
            launch=tuple(cuts[0].launch))


def prefills(lab):
    "Prefill attention in Llama-3-8B's shape"
    for n, L in ((20, 20),) if lab.dry else ((8192, 8192), (2048, 2048), (512, 512), (2048, 16384)):
        time_prefill(lab, n, L)


def time_rivals(lab, name, n_q, R, L, n_layers):
    "The same attention by PyTorch, over contiguous keys and values: nothing has to be gathered"
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    Hk, G, D = heads(lab)
    q, causal = lab.rand(R, Hk*G, n_q, D, dtype=half(lab)), n_q > 1
    kv = [[lab.rand(R, Hk, L, D, dtype=half(lab)) for _ in range(2)] for _ in range(n_layers)]
    ms = lab.ms(lambda: [sdpa(q, k, v, is_causal=causal, enable_gqa=True) for k, v in kv])/n_layers
    lab.log("rival", name, sdpa_ms=ms)
    def seen(b, h, i, j): return i >= j
    mask = create_block_mask(seen, None, None, n_q, L, device=lab.device.type) if causal else None
    flex = flex_attention if lab.dry else torch.compile(flex_attention, dynamic=False)
    ms = lab.ms(lambda: [flex(q, k, v, block_mask=mask, enable_gqa=True) for k, v in kv])/n_layers
    lab.log("rival", name, flex_ms=ms)


def rivals(lab):
    "PyTorch's SDPA and FlexAttention in the shapes of the targets"
    few = [(decode_name(2, 20), 1, 2, 20, 1), (prefill_name(20, 20), 20, 1, 20, 1)]
    shapes = [(decode_name(64, 4096), 1, 64, 4096, 1), (prefill_name(8192, 8192), 8192, 1, 8192, 1),
              (decode_name(1, 32768), 1, 1, 32768, 8)]
    for shape in few if lab.dry else shapes:
        how = dict(zip("name n_q R L n_layers".split(), shape))
        lab.section(partial(time_rivals, **how), 12, ours=False)


def tune(lab):
    "Would another row of the launch table be faster? Last, because nothing else needs to know"
    if lab.dry:
        return lab.log("skip", "tune", why="needs a GPU")
    few = [(16, 64, 4, 3), (16, 32, 4, 4), (16, 64, 4, 2), (16, 32, 2, 4), (16, 64, 8, 3), (16, 128, 4, 2)]
    many = [(128, 64, 8, 2), (64, 64, 4, 3), (128, 32, 8, 3), (64, 32, 4, 3), (128, 128, 8, 2)]
    every = [partial(time_prefill, n=8192, L=8192, launches=dict(many=kernels.Launch(*how))) for how in many]
    every += [partial(time_decode, R=R, L=L, B=size, launches=dict(few=kernels.Launch(*how)))
              for how, (R, L), size in product(few, ((64, 4096), (1, 32768)), (16, 64))]
    for f in every:
        if lab.left() > 6:
            lab.section(partial(f, kind="tune", suffix=" tune"), 6)


# ---- times of the small kernels and of the planner

def small(lab):
    "Store, norm, gate: bytes against bandwidth, and the same by PyTorch's own operations"
    dtype, (Hk, G, D), T = half(lab), heads(lab), 3 if lab.dry else 8192
    C, width = (64, 128) if lab.dry else (4096, 14336)
    step, qkv = Step(lab, [T], [T], Hk, G, D, dtype=dtype), lab.rand(T, (G + 2)*Hk*D, dtype=dtype)
    spec = step.spec._replace(rope=layers.rope_table(D, T, 1e4, device=lab.device))
    at = torch.arange(T, device=lab.device)
    slots = (lab.ints(step.tables[0])[at//B]*B + at % B).int()
    meta = AttnMeta(None, None, None, slots, at, [T], [T])
    cache = KVCache(step.config, cdiv(T, B) + 3, B, dtype, lab.device)
    x, r, g = lab.rand(T, C, dtype=dtype), lab.rand(T, C, dtype=dtype), lab.rand(T, 2*width, dtype=dtype)
    w = lab.rand(C, dtype=dtype)
    for name, nbytes, f, by_torch in (
            ("store", 2*qkv.nbytes, lambda: kernels.launch_store(spec, 0, step.cache, qkv, at, slots),
             lambda: Backend().store(spec, 0, cache, qkv, meta)),
            ("norm", 4*x.nbytes, lambda: fused.add_rmsnorm(x, r, w, 1e-5),
             lambda: layers.add_rmsnorm(x, r, w, 1e-5)),
            ("gate", 1.5*g.nbytes, lambda: fused.act_mul(g), lambda: layers.act_mul(g))):
        lab.log("time", name, **pace(lab, lab.ms(f), nbytes), torch_ms=lab.ms(by_torch), T=T)


def samplers(lab):
    "Sampling for a full batch; beside it nano-vllm's way, which knows no filters, and a sort"
    R, V = (2, 300) if lab.dry else (256, 151936)
    logits = lab.rand(R, V, dtype=half(lab))*3
    def column(x, dtype=FP32): return torch.full((R,), x, dtype=dtype, device=lab.device)
    seeds = column(1, torch.int64), column(7, torch.int64)
    for name, (t, k, p, m) in dict(greedy=(0., 0, 1., 0.), plain=(.6, 0, 1., 0.), top_p=(.6, 0, .95, 0.),
                                   top_k_top_p=(.6, 50, .95, 0.)).items():
        how = column(t), column(k, torch.int32), column(p), column(m), *seeds
        ms = lab.ms(lambda: fused.sample(logits, *how))
        lab.log("time", f"sample {name}", **pace(lab, ms, logits.nbytes), R=R, V=V)

    def race():
        p = (logits.float()/.6).softmax(-1)
        return p.div_(torch.empty_like(p).exponential_().clamp_min_(1e-10)).argmax(-1)
    lab.log("time", "softmax and exponential race", ms=lab.ms(race, replay=False))
    lab.log("time", "sort alone", ms=lab.ms(lambda: logits.sort(-1), replay=False))


def planner(lab):
    "What the host pays for the tiles of a step"
    R, rng, times = 4 if lab.dry else 256, random.Random(0), []
    step = Step(lab, [1]*R, [rng.randint(100, 2000) for _ in range(R)], Hk=8, G=2)
    for _ in range(3 if lab.dry else 200):
        start = time.perf_counter()
        step.backend.plan([step.spec], step.cache, step.q_lens, step.kv_lens, R)
        times.append((time.perf_counter() - start)*1e3)
    lab.log("time", f"planner, {R} decodes", ms=median(times))


# ---- the engine

QWEN = ModelConfig(151936, 1024, 28, 16, 8, 128, 3072, norm_eps=1e-6, rope_theta=1e6, max_len=4096)
LLAMA = EXAMPLES["Llama-3-8B"]


TINY = 2, 2, 4, 250  # a workload for a dry run


def workload(n=256, low=100, high=1024, vocab=10000):
    "nano-vllm's benchmark: prompts, and how many ids each wants"
    rng = random.Random(0)
    prompts = [[rng.randint(0, vocab) for _ in range(rng.randint(low, high))] for _ in range(n)]
    return prompts, [rng.randint(low, high) for _ in range(n)]


def step_bytes(config):
    "Of weights that a step must read: of an embedding that is not the head too, it reads a few rows"
    return weight_bytes(config) - (0 if config.tied else 2*config.vocab_size*config.width)


def floor_seconds(lab, config, prompts, wants, kv_bytes=2):
    "Weights once a step and every K and V once a token over the bandwidth; prompts' arithmetic over the rate"
    read = sum(n*len(ids) + n*n/2 for ids, n in zip(prompts, wants))*kv_bytes_per_token(config, kv_bytes)
    flops = sum(len(ids)*flops_per_token(config, len(ids)//2, logits=False) for ids in prompts)
    return (floor_ms(lab, max(wants)*step_bytes(config) + read) + floor_ms(lab, flops=flops))/1e3


def serve(lab, engine, prompts, wants, seconds=60):
    "Answer everything, or as much as the time allows"
    requests = add(engine, prompts, wants, .6)
    start, end, n_steps = time.perf_counter(), time.monotonic() + min(seconds, lab.left() - 3), 0
    while len(engine.scheduler) and (lab.dry or time.monotonic() < end):
        engine.step()
        n_steps += 1
    took, n, left = time.perf_counter() - start, sum(r.n_output for r in requests), len(engine.scheduler)
    engine.reset()
    return dict(tokens_per_s=n/took, tokens=n, seconds=took, steps=n_steps, finished=not left,
                preempted=sum(r.n_preempted for r in requests))


class House:
    "A random model, and memory for a whole workload"
    def __init__(self, lab, name, config, head_norms=False):
        self.lab, self.name, self.config, self.load = lab, name, config, workload()
        self.rows, self.budget, self.max_len = 256, 16384, 4096
        if lab.dry:
            changes = dict(n_layers=1, n_heads=2, n_kv_heads=1, norm_eps=config.norm_eps, tied=config.tied)
            self.config = tiny_config(**changes)
            self.load, self.rows, self.budget, self.max_len = workload(*TINY), 2, 16, 40
        self.n_blocks = sum(cdiv(len(p) + n, B) for p, n in zip(*self.load)) + 2
        self.model = random_model(lab, self.config, FP32 if lab.dry else BF16, head_norms)

    def runner(self, graphs=True, kv_dtype=None):
        "Ready to run: whatever a workload needs is compiled and recorded"
        start = time.monotonic()
        runner = make_runner(self.lab, self.model, self.n_blocks, self.rows, self.max_len, graphs, kv_dtype)
        if not self.lab.dry:
            prompts = [ids[:n] for ids, n in zip(self.load[0], (100, 333, 99, 1, 17))]
            serve(self.lab, self.engine(runner), prompts, [3]*5)
        self.lab.log("note", f"{self.name}: runner made", graphs=graphs, seconds=time.monotonic() - start,
                     kv_gigabytes=runner.cache.nbytes/1e9)
        return runner

    def engine(self, runner, ahead=1):
        return make_engine(runner, self.n_blocks, self.rows, self.max_len, self.budget, ahead)


def full_run(lab, house, runner, suffix="", seconds=60, kv_bytes=2):
    "The workload, against its floor"
    found = serve(lab, house.engine(runner), *house.load, seconds)
    floor = floor_seconds(lab, house.config, *house.load, kv_bytes)
    share = dict(share=floor/found["seconds"]) if found["finished"] else {}
    lab.log("engine", f"{house.name}: workload{suffix}", **found, floor_s=floor, **share)


def steady(lab, house, runner, R, n_prompt):
    "Nothing but decodes: what a step takes, what the device needs for it, and the host"
    engine, n, rng = house.engine(runner), 1 if lab.dry else 30, random.Random(0)
    prompts = [[rng.randrange(house.config.vocab_size) for _ in range(n_prompt)] for _ in range(R)]
    requests = add(engine, prompts, [n + 6 if lab.dry else n + 60]*R, .6)
    while any(r.n_output < 2 for r in requests):
        engine.step()
    before = device_ms(lab, engine)
    start = time.perf_counter()
    for _ in range(n):
        engine.step()
    wall = (time.perf_counter() - start)/n*1e3
    context = sum(len(r.tokens) for r in requests) - R*n/2
    device, host = (sum(x)/2 for x in zip(before, device_ms(lab, engine)))  # contexts grow: before and after
    engine.reset()
    nbytes = step_bytes(house.config) + context*kv_bytes_per_token(house.config)
    lab.log("engine", f"{house.name}: step of {R} decodes", **pace(lab, wall, nbytes), device_ms=device,
            host_ms=host, longer=wall/device - 1, context=context/R, gigabytes=nbytes/1e9)


def device_ms(lab, engine, n=3):
    "Two steps queued behind long products, so that the device never waits: its time for one, and the host's"
    if lab.dry:
        start = time.perf_counter()
        engine.step()
        return [(time.perf_counter() - start)*1e3]*2
    plug, times = lab.rand(8192, 8192, dtype=BF16), []
    for _ in range(n):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(20):
            plug @ plug
        first.record()
        start = time.perf_counter()
        engine.step()  # launches one, and takes in the ids of one that is done
        host = time.perf_counter() - start
        engine.step()  # launches the next, and waits for the first
        last.record()
        torch.cuda.synchronize()
        times.append((first.elapsed_time(last)/2, host*1e3))
    engine.step()      # under way again, for whoever comes next
    return [median(x) for x in zip(*times)]


def modes(lab, house, runner, graphs):
    "Short answers, to all requests and to a few: a step ahead, or always waiting for the ids"
    prompts, wants = house.load
    for n, ahead in product((2,) if lab.dry else (256, 8), (1, 0)):
        found = serve(lab, house.engine(runner, ahead), prompts[:n], [min(x, 100) for x in wants[:n]], 20)
        lab.log("engine", f"{house.name}: {n} short answers, graphs={graphs} ahead={ahead}", **found)


def without_graphs(lab, house): modes(lab, house, house.runner(graphs=False), graphs=False)


def in_their_engine(lab, house, seconds=30):
    "The same weights and requests in transformers' continuous batching, which chooses its own settings"
    from transformers import ContinuousBatchingConfig, GenerationConfig
    model, (prompts, wants), done = in_transformers(lab, house.model), house.load, {}
    how = GenerationConfig(do_sample=True, temperature=.6, top_k=0, top_p=1., max_new_tokens=max(wants),
                           eos_token_id=-1, pad_token_id=0)
    sizes = dict(num_blocks=8, max_batch_tokens=64) if lab.dry else dict(max_memory_percent=.5)
    sizes = ContinuousBatchingConfig(**sizes)
    engine = model.continuous_batching_context_manager(
        generation_config=how, continuous_batching_config=sizes, block=True, timeout=10)
    with engine as theirs:  # graphs are recorded here
        start, end = time.perf_counter(), time.monotonic() + min(seconds, lab.left() - 12)
        ids = [theirs.add_request(list(p), max_new_tokens=n, eos_token_id=-1) for p, n in zip(prompts, wants)]
        while len(done) < len(ids) and time.monotonic() < end and theirs.is_running():
            answer = theirs.get_result(timeout=.5)
            if answer is not None and answer.is_finished():
                if answer.error:
                    raise RuntimeError(answer.error)
                done[answer.request_id] = len(answer.generated_tokens)
        if not theirs.is_running():
            raise RuntimeError("transformers' generation thread ended early")
        took, attention = time.perf_counter() - start, model.config._attn_implementation
        n = sum(done.values())
        if len(done) < len(ids):  # what is under way counts for them
            active = theirs.batch_processor.scheduler.active_requests
            n += sum(len(request.generated_tokens) for request in [*active.values()])
        for id in set(ids) - set(done):
            theirs.cancel_request(id)
    lab.log("engine", f"{house.name}: transformers", tokens_per_s=n/took, tokens=n, seconds=took,
            finished=len(done) == len(ids), attention=attention)


def whole_model(lab):
    "Logits of the large shape: rounding of 28 layers, and nothing else"
    config, dtype, n_ids = (tiny_config(n_layers=1), FP32, 9) if lab.dry else (QWEN, BF16, 300)
    found = check_model(lab, config, dtype, True, n_ids, .1)
    lab.log("check", "model, Qwen3-0.6B's shape, and transformers'", **found)


def qwen(lab):
    "Qwen3-0.6B's shape: the workload, a step of a full batch, ahead or not; transformers; without graphs"
    lab.log("note", "Qwen3-0.6B", what="a tiny model in its place" if lab.dry else
            "its sizes, random weights; norms of queries and keys are set in the specs, not by the config")
    house = House(lab, "Qwen3-0.6B", QWEN, head_norms=True)
    runner = house.runner()
    full_run(lab, house, runner)
    lab.section(partial(steady, house=house, runner=runner, R=house.rows, n_prompt=4 if lab.dry else 400), 5)
    lab.section(partial(modes, house=house, runner=runner, graphs=True), 8)
    del runner
    free()
    lab.section(partial(in_their_engine, house=house), 35, ours=False)
    lab.section(partial(without_graphs, house=house), 15)


def llama(lab):
    "Llama-3-8B's shape: a step of 64 decodes against the bytes it must read; the workload, if there is time"
    house = House(lab, "Llama-3-8B", LLAMA)
    runner = house.runner()
    steady(lab, house, runner, *((2, 4) if lab.dry else (64, 2048)))
    lab.section(partial(full_run, house=house, runner=runner, seconds=25), 60)


def eight_bits(lab):
    "The workload once more, with keys and values of 8 bits"
    if lab.dry:
        return lab.log("skip", "workload, fp8", why="the interpreter rounds 8 bits otherwise")
    house = House(lab, "Qwen3-0.6B", QWEN, head_norms=True)
    full_run(lab, house, house.runner(kv_dtype=FP8), ", fp8 K and V", kv_bytes=1)


# ---- the targets

def ratio(a, b): return a/b if a and b else None


def targets(lab):
    "(what, target, met when larger?, measured or None)"
    large, long, prompt = decode_name(64, 4096), decode_name(1, 32768), prefill_name(8192, 8192)
    ours, theirs = (lab.find(f"Qwen3-0.6B: {name}", "tokens_per_s") for name in ("workload", "transformers"))
    flex = [(name, ratio(lab.find(name, "flex_ms"), lab.find(name))) for name in (large, long, prompt)]
    return [("decode attention, 64 x 4096: share of copy bandwidth", .85, True, lab.find(large, "share")),
            ("decode attention, 1 x 32768: share of copy bandwidth", .70, True, lab.find(long, "share")),
            ("prefill attention, 8192: share of matmul rate", .50, True, lab.find(prompt, "share")),
            *((f"{name}: FlexAttention's time over ours", 1., True, x) for name, x in flex),
            ("Llama-3-8B, step of 64 decodes: share of bytes/bandwidth", .75, True,
             lab.find("Llama-3-8B: step of 64 decodes", "share")),
            ("Qwen3-0.6B, workload: share of its floor", .60, True,
             lab.find("Qwen3-0.6B: workload", "share")),
            ("Qwen3-0.6B, workload: output tokens/s", 21000, True, ours),
            ("Qwen3-0.6B, workload: rate over transformers'", 3., True, ratio(ours, theirs)),
            ("Qwen3-0.6B, step of 256 decodes: longer than its device time", .05, False,
             lab.find("Qwen3-0.6B: step of 256 decodes", "longer")),
            ("planner, 256 decodes: ms", .3, False, lab.find("planner, 256 decodes"))]


def verdict(target, larger, x):
    if not isinstance(x, (int, float)):  # NaN is a word by now
        return "not measured"
    return "met" if (x >= target if larger else x <= target) else "gap"


def finish(lab):
    "The table, and the exit code"
    checks = [r for r in lab.rows if r["kind"] == "check"]
    bad = [r for r in lab.rows if r["kind"] == "error" or r["kind"] == "check" and not r["ok"]]
    print("-"*110)
    for name, target, larger, x in targets(lab) if lab.how.only != ["check"] else ():
        x = None if lab.dry else x
        word = verdict(target, larger, x)
        lab.log("target", name, target=target, measured=x, verdict=word)
        shown = f"{x:.4g}" if isinstance(x, float) else "-"
        print(f"{name:<66}{'>=' if larger else '<='} {target:<7g}{shown:>9}  {word}")
    for r in lab.rows:
        if r["kind"] in ("ceiling", "missing", "skip"):
            print(f"{r['kind']:8} {r['name']}: {r.get('rate') or r.get('what') or r.get('why')}")
    for r in bad:
        print(f"FAILED   {r['name']}: {r.get('what') or r.get('error')} {r.get('where', '')}")
    print(f"{len(checks)} checks, {len(bad)} failures; {device_name(lab)}; {lab.path}"
          + "; a dry run: its times mean nothing"*lab.dry)
    return int(bool(bad) or "check" in lab.how.only and not checks)


# ---- the command line

def parse(argv):
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--dry", action="store_true", help="tiny, on a CPU, in the interpreter")
    args.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    args.add_argument("--seconds", type=float, default=290, help="when to be done")
    args.add_argument("--slice", help="i/n: every n-th check, from the i-th on")
    args.add_argument("--jobs", type=int, help="processes for the checks; default: 1 dry, else up to 12")
    args.add_argument("--out", help="folder for the findings")
    args.add_argument("--into", help="file to add them to: what --jobs tells its processes")
    how = args.parse_args(argv)
    how.only, how.asked = how.only.split(","), " ".join(sys.argv[1:] if argv is None else argv)
    if wrong := set(how.only) - set(PARTS):
        args.error(f"--only {','.join(wrong)}: there are {', '.join(PARTS)}")
    if how.slice and not re.fullmatch(r"\d+/[1-9]\d*", how.slice):
        args.error(f"--slice {how.slice}: i/n, like 0/8")
    how.jobs = how.jobs or (1 if how.dry or how.slice else max(1, min(12, (os.cpu_count() or 2)*3//4)))
    how.out = Path(how.out or os.environ.get("OUT") or ROOT/("build/gpu_check" if how.dry else "bench/gpu"))
    return how


def begin(how):
    "Where the findings go; the stamp comes first"
    lab = Lab(how)
    if not lab.path:
        day = datetime.now(timezone.utc).strftime("%Y-%m-%d_%H%M")
        how.out.mkdir(parents=True, exist_ok=True)
        lab.path = how.out/(re.sub(r"[^\w.-]+", "_", f"{day}_{device_name(lab)}") + ".jsonl")
        lab.path.write_text("", encoding="utf-8")
        stamp(lab)
    return lab


SECTIONS = (  # what they are part of, and seconds that they need at least: what a cut may take comes last
    ("ceilings", ceilings, 5), ("kernels", decodes, 10), ("kernels", prefills, 8), ("kernels", planner, 1),
    ("kernels", small, 4), ("kernels", samplers, 4), ("engine", whole_model, 10), ("engine", qwen, 20),
    ("engine", llama, 30), ("kernels", rivals, 15), ("engine", eight_bits, 20), ("kernels", tune, 10))


def late(*_): raise TimeoutError("it took longer than there was time")


def main(argv=None):
    "Returns the exit code"
    how = parse(argv)
    if not how.dry and not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU. With --dry, the same code runs on a CPU: tiny, in the interpreter.")
    if how.dry != kernels.INTERPRETED:
        sys.exit(f"TRITON_INTERPRET must be {'1' if how.dry else 'unset'} before Triton is imported.")
    if how.dry:
        warnings.filterwarnings("ignore", module="triton.runtime.interpreter|torch.nn.attention")
    else:
        signal.signal(signal.SIGALRM, late)
        signal.alarm(int(how.seconds) + 5)  # whatever is stuck then is left, and the table still comes
    lab = begin(how)
    if "check" in how.only:
        run_checks(lab) if how.jobs == 1 else run_slices(lab, min(120, how.seconds*.45))
    if how.into:
        return int(any(not r["ok"] for r in lab.rows if r["kind"] == "check"))
    for part, f, need in SECTIONS:
        if part in how.only or part == "ceilings" and how.only != ["check"]:
            lab.section(f, need)
    signal.alarm(0)
    return finish(lab)


if __name__ == "__main__":
    sys.exit(main())
