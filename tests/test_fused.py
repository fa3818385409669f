"Norms, gates and the sampler in Triton: against the torch versions on ugly shapes, and against planted bugs"
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
import triton
from torch.nn import functional as F

from pagedlm import fused, layers, sampling
from pagedlm.attention import Dense
from pagedlm.model import Transformer, tiny_config, tiny_model

INTERPRETED = not isinstance(fused.peak_kernel, triton.JITFunction)
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of the largest
ROUNDS = [torch.float64, torch.float32, torch.float16]  # where the interpreter rounds as it should; it truncates bfloat16


def off(x, y):
    return float((x.double() - y.double()).abs().max()/y.double().abs().max())


def randn(*shape, dtype=torch.float32, pad=0):
    "Rows that are slices of wider ones, if `pad`"
    return torch.randn(*shape[:-1], shape[-1] + pad, device=DEVICE).to(dtype)[..., :shape[-1]]


# ---- the ops of a layer

def check_norm(ops, widths, dtypes=ROUNDS):
    for C in widths:
        for dtype in dtypes:
            x, stream, w = randn(3, C, dtype=dtype, pad=3), 2*randn(3, C, dtype=dtype, pad=1), randn(C, dtype=dtype)
            x[1], stream[1] = 0, 0  # a token of zeros stays one
            y, after = ops.add_rmsnorm(x, stream, w, 1e-5)
            y2, after2 = layers.add_rmsnorm(x, stream, w, 1e-5)
            assert (y.dtype, y.shape) == (dtype, x.shape) and off(y, y2) < TOLERANCE[dtype], (C, dtype)
            assert off(after, after2) < TOLERANCE[dtype] and (dtype == torch.bfloat16 or torch.equal(after, after2))
            if dtype == torch.float16 and C > 50:
                assert (y != y2).double().mean() < .02  # the norm reads the rounded stream


def check_gate(ops, widths, dtypes=ROUNDS):
    for n in widths:
        for dtype in dtypes:
            x = 5*randn(2, 2*n, dtype=dtype, pad=3)
            gate, up = x.double().chunk(2, -1)
            assert off(ops.act_mul(x), F.silu(gate)*up) < TOLERANCE[dtype], (n, dtype)
            assert off(ops.act_mul(x, act="gelu_tanh"), F.gelu(gate, approximate="tanh")*up) < TOLERANCE[dtype]


def test_norm():
    torch.manual_seed(0)
    check_norm(fused, (1, 2, 3, 63, 64, 65, 576, 1000, 2049), ROUNDS + [torch.bfloat16])


def test_norm_without_stream_and_in_other_shapes():
    torch.manual_seed(1)
    x, w = randn(2, 3, 70), randn(70)
    y, stream = fused.add_rmsnorm(x, None, w, 1e-6)
    assert stream is x and off(y, layers.rms_norm(x, w, 1e-6)) < 1e-6
    assert off(fused.rms_norm(x.transpose(0, 1), w, 1e-6), layers.rms_norm(x.transpose(0, 1), w, 1e-6)) < 1e-6
    assert off(fused.rms_norm(x[..., ::2], w[::2].contiguous(), 1e-6), layers.rms_norm(x[..., ::2], w[::2], 1e-6)) < 1e-6
    before = x.clone()
    fused.add_rmsnorm(x, x, w, 1e-6)
    assert torch.equal(x, before)  # nothing is changed in place
    mixed = fused.rms_norm(x.half(), w, 1e-6)
    assert mixed.dtype == torch.float16 and off(mixed, layers.rms_norm(x.half(), w, 1e-6)) < 2e-3
    huge = torch.tensor([[300., 1, -1, 6e4]], dtype=torch.float16, device=DEVICE)
    assert off(fused.rms_norm(huge, w[:4], 1e-6), layers.rms_norm(huge.double(), w[:4].double(), 1e-6)) < 2e-3
    for shape in (0, 70), (2, 0, 70):
        assert fused.rms_norm(torch.empty(shape, device=DEVICE), w, 1e-6).shape == shape


@pytest.mark.filterwarnings("ignore:overflow")  # exp(88.8) is inf in float32, as it should
def test_gate():
    torch.manual_seed(2)
    check_gate(fused, (1, 7, 1023, 1024, 1025, 2500), ROUNDS + [torch.bfloat16])
    assert fused.act_mul(randn(2, 3, 8)).shape == (2, 3, 4) and fused.act_mul(randn(0, 8)).shape == (0, 4)


def test_a_model_on_these_ops():
    plain = tiny_model(tiny_config(width=48, mlp_width=72), dtype=torch.float64).to(DEVICE)
    model = Transformer(plain.config, ops=fused, dtype=torch.float64, device=DEVICE)
    model.load_state_dict(plain.state_dict())
    ids = torch.tensor([3, 1, 4, 1, 5, 9], device=DEVICE)
    a, b = (m.logits(m(ids, Dense())) for m in (plain, model))
    assert off(b, a) < 1e-10


def test_what_is_refused():
    x = randn(2, 6)
    for f, words in ((lambda: fused.rms_norm(x, x[0, :5], 0.), "6 channels"), (lambda: fused.act_mul(x, "relu"), "relu"),
                     (lambda: fused.add_rmsnorm(x, x[:1], x[0], 0.), "to add to it"),
                     (lambda: fused.sample(x, [1.], [0], [1.], [0.], [0], [0]), "2 rows")):
        with pytest.raises(ValueError, match=words):
            f()


# ---- the sampler

def settings(rnd, R):
    "Temperatures and filters of all kinds"
    kinds = ([0., 1e-6, 1e-4, .6, 1., 1.7], [0, -1, 1, 2, 5, 20, 20, 10**6], [1., .95, .9, .5, .3, 1e-9], [0., 0., .05, .5, 1.])
    return [[rnd.choice(kind) for _ in range(R)] for kind in kinds] + [
        [rnd.getrandbits(64) - 2**63 if rnd.random() < .8 else rnd.randrange(3) for _ in range(R)],
        [rnd.randrange(10**6) if rnd.random() < .8 else 0 for _ in range(R)]]


def check_draws(ops, shapes, seed=0, most_different=0):
    "The ids of the torch sampler; on a GPU logarithms may round otherwise, and `most_different` rows with them"
    rnd = Random(seed)
    torch.manual_seed(seed)
    different = 0
    for R, V in shapes:
        x = rnd.choice([.5, 2, 6])*randn(R, V, pad=rnd.choice([0, 3])) - 9
        x = x.to(rnd.choice([torch.float32, torch.float16, torch.bfloat16])) if rnd.random() < .5 else x.round()
        x[torch.rand(R, V, device=DEVICE) < rnd.choice([0, 0, .3])] = -torch.inf
        x[:, V//2] = 1
        how = settings(rnd, R)
        for kind, plain in zip(how, (1., 0, 1., 0.)):
            kind[:R//3] = [plain]*(R//3)
        ours, theirs = ops.sample(x, *how), sampling.sample(x, *how)
        cold = torch.tensor(how[0], device=DEVICE) < sampling.GREEDY
        assert torch.equal(ours[cold], theirs[cold]), (R, V)
        different += int((ours != theirs).sum())
    assert different <= most_different


def check_ties(ops, R=20, seed=0):
    "Few values, small vocabularies: every cut goes through a tie"
    rnd = Random(seed)
    for V in 2, 6:
        x = torch.tensor([[rnd.choice([0., 0., 1., 2.]) for _ in range(V)] for _ in range(R)], device=DEVICE)
        how = settings(rnd, R)
        how[0] = [1.]*R
        assert torch.equal(ops.sample(x, *how), sampling.sample(x, *how)), V


def check_edges(ops):
    def draw(x, t=1., k=0, p=1., m=0., seed=0):
        x = torch.as_tensor(x, device=DEVICE)
        return ops.sample(x, *([a]*len(x) for a in (t, k, p, m, seed, 5))).tolist()
    nan, inf = torch.nan, torch.inf
    tied = [[0., 2., 2., 1.], [-0., 0., -1., -2.], [-5., -5., -5., -5.]]
    for how in dict(t=0.), dict(t=9e-6), dict(k=1), dict(p=1e-9), dict(p=0.), dict(k=3, p=1e-9):
        assert draw(tied, **how) == [1, 0, 0], how
    assert draw([[0., 3.], [3., 0.]], m=1.) == [1, 0]
    tail, how = torch.tensor([[3.] + [0.]*400]*5, device=DEVICE), [[1.]*5, [0]*5, [.9]*5, [0.]*5, range(5), [0]*5]
    assert ops.sample(tail, *how).equal(sampling.sample(tail, *how))  # little mass in each of many tokens
    flat, how[1] = torch.zeros(5, 50, device=DEVICE), [20]*5
    assert ops.sample(flat, *how).equal(sampling.sample(flat, *how))  # what is before w is too much of what is known
    assert draw(torch.zeros(1, 2500), t=0.) == draw(torch.zeros(1, 2500), k=1) == [0]
    hot = torch.tensor([[60., 59, -inf], [-6e4, 6e4, -inf]], dtype=torch.float16)
    for t in 0., 1e-5, 1e-4:
        assert draw(hot, t=t) == [0, 1] == draw(hot, t=t, k=2, p=.9)
    bad = [[0., nan, 1.], [0., inf, 1.], [-inf]*3, [nan]*3, [0., 1., -inf]]
    for how in dict(t=0.), dict(), dict(k=2, p=.9), dict(m=.1):
        assert [i >= 0 for i in draw(bad, **how)] == [False]*4 + [True], how


def check_alone(ops):
    "A row's id depends neither on its neighbours nor on how it is cut"
    rnd = Random(3)
    torch.manual_seed(3)
    x, how = 3*randn(5, 1300), settings(rnd, 5)
    alone = [int(ops.sample(x[i:i + 1], *([kind[i]] for kind in how))) for i in range(5)]
    assert ops.sample(x, *how).tolist() == alone
    assert ops.sample(torch.cat([1e6*x, x.flip(0)]), *(kind + kind[::-1] for kind in how)).tolist()[5:] == alone[::-1]


@pytest.mark.parametrize("seed", range(3))
def test_draws_are_those_of_the_torch_sampler(seed):
    shapes = [(8, V) for V in (1, 2, 7, 258, 1000, 1025, 2500)]
    check_draws(fused, shapes, seed, 0 if INTERPRETED else 2)


def test_ties():
    check_ties(fused, R=30, seed=1)


def test_edges():
    check_edges(fused)


def test_rows_are_alone():
    check_alone(fused)


def test_how_a_row_is_cut_does_not_matter(monkeypatch):
    torch.manual_seed(5)
    x, how = 3*randn(5, 700), settings(Random(5), 5)
    ids = fused.sample(x, *how).tolist()
    for tiles in (64, 512), (256, 128), (1024, 64):
        monkeypatch.setattr(fused, "_tiles", lambda R, V: tiles)
        assert fused.sample(x, *how).tolist() == ids


def test_a_whole_vocabulary():
    "Many blocks, 16 bits, the settings of a chat model"
    torch.manual_seed(6)
    x = (2.5*randn(1, 50_257)).bfloat16()
    for how in ([.7], [20], [.8], [0.], [1], [3]), ([1.], [0], [.5], [.001], [2], [4]), ([0.], [0], [1.], [0.], [0], [0]):
        assert torch.equal(fused.sample(x, *how), sampling.sample(x, *how))


def test_settings_as_tensors_of_any_kind():
    torch.manual_seed(7)
    x, how = randn(4, 50), [[1., .5, 0., 2.], [0, 3, 0, 20], [1., .9, 1., .5], [0., .1, 0., 0.], [-2**63, 2**63 - 1, 0, 7], [1, 2, 3, 4]]
    ids = fused.sample(x, *how)
    assert ids.dtype == torch.int64 and ids.tolist() == sampling.sample(x, *how).tolist()
    for ints, floats in (torch.int32, torch.float32), (torch.int64, torch.float64):
        kinds = floats, ints, floats, floats, torch.int64, ints
        assert fused.sample(x, *(torch.tensor(a, dtype=kind) for a, kind in zip(how, kinds))).equal(ids)
    wrapped = how[:4] + [[2**63, -1 - 2**63, 2**64, 7 - 2**64], how[5]]
    assert fused.sample(x, *wrapped).equal(ids) and fused.sample(x.T.contiguous().T, *how).equal(ids)
    assert fused.sample(x[:0], *([] for _ in how)).shape == (0,)


@pytest.mark.parametrize("how", [(0, .6, 0.), (3, .75, 0.), (4, 1., 0.), (0, 1., .3), (5, .8, .2)])
def test_what_can_be_drawn(how):
    "Nothing but what the filters keep; and all of it, in fifty draws of few tokens"
    n, x = 50 if how == (3, .75, 0.) else 12, torch.tensor([[1., 2, 3, 3, 2, 4]], device=DEVICE).log()
    k, p, m = ([a]*n for a in how)
    kept = sampling.filter_logits(x, [1.], k[:1], p[:1], m[:1])[0].isfinite().nonzero()[:, 0].tolist()
    drawn = set(fused.sample(x.expand(n, -1), [1.]*n, k, p, m, range(n), [0]*n).tolist())
    assert drawn <= set(kept) and (n < 50 or drawn == set(kept))


# ---- who tests the tests?

BUGS = {  # what is wrong: (a piece of the source, what to put there)
    "the stream's rows are as far apart as x's": ("before_ptr + t*sb", "before_ptr + t*sx"),
    "no eps": ("/C + eps", "/C"),
    "the stream is not kept": ("tl.store(after_ptr + t*C + c, x, mask=c < C)", "pass"),
    "every program gates the first channels": ("tl.program_id(1)*BF + tl.arange(0, BF)", "tl.arange(0, BF)"),
    "gates read what lies beside them": ("x_ptr + t*sx + F + f, mask=f < F", "x_ptr + t*sx + f + f, mask=f < F"),
    "GELU is SiLU": ('gate if ACT == "silu" else', 'gate if True else'),
    "beyond the vocabulary stands a zero": ('mask=ids < V, other=float("-inf")).to', "mask=ids < V, other=0.).to"),
    "min_p drops the best": ("d > far", "d >= far"),
    "no temperature": ("V)), t)", "V)), t*0 + 1)"),
    "mass is coarse": ("(2.0**40)", "(2.0**3)"),
    "of equals the last": ("tl.min(tl.where(score == s, order, _NONE), 0)", "tl.max(tl.where(score == s, order, -1), 0)"),
    "half of a seed": ("tl.load(seed_ptr + r).to(tl.uint64)", "tl.load(seed_ptr + r).to(tl.int32).to(tl.uint64)"),
    "seed and position add up": ("_mix64(_mix64(seed + _STEP) + position)", "_mix64(_mix64(seed + _STEP + position))"),
    "the share of the k without the last of them": ("mass + _mass(_distance_of(w))", "mass"),
    "too little may come before, and it is called too much": ("(n == k - 1) | (pivot == _NONE)", "n < k"),
    "unfiltered rows are never asked, nor are others": ("(k < V) | (p < 1)", "(k < V) & (p < 1)"),
}


def planted(name, folder):
    "A copy of the module with one bug"
    source, (old, new) = Path(fused.__file__).read_text(encoding="utf-8"), BUGS[name]
    assert source.count(old) == 1, f"not once in fused.py: {old}"
    path = folder/"planted.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("planted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sweep(ops):
    torch.manual_seed(0)
    check_norm(ops, (1, 100))
    check_gate(ops, (96, 1030), ROUNDS[1:2])
    check_draws(ops, [(12, 7), (8, 2500)])
    check_edges(ops)
    check_ties(ops)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name, tmp_path):
    with pytest.raises((AssertionError, ValueError)):
        sweep(planted(name, tmp_path))


# ---- without the interpreter

def python(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_and_interpreter_it_says_what_to_do():
    done = python("import torch; from pagedlm import fused as f; x = torch.ones(2, 4)\n"
                  "for g in (lambda: f.rms_norm(x, x[0], 0.), lambda: f.act_mul(x), lambda: f.sample(x, *[[0, 0]]*6)):\n"
                  "    try: g()\n"
                  "    except ValueError as e: print(e)", TRITON_INTERPRET="0")
    assert done.stdout.count("set TRITON_INTERPRET=1") == 3, done.stderr


def test_it_needs_nothing_but_torch_and_triton():
    done = python("import sys; from pagedlm import fused; print(*[m for m in sys.modules if m.startswith('pagedlm.')])\n"
                  "assert not {'transformers', 'numba', 'gguf', 'tokenizers'} & set(sys.modules)")
    assert set(done.stdout.split()) <= {"pagedlm.fused", "pagedlm.core"}, done.stdout + done.stderr
