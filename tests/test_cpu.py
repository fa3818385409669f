"""CPU kernels: every kind of weights in every form that runs here, and what the other forms are compiled to"""
import ctypes
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

import pagedlm
from pagedlm.quant import Packed, Plain, formats, int_product, pack_rows, plain_product, quantize, round_act

pytest.importorskip("numba")
import llvmlite.binding as llvm  # noqa: E402

from pagedlm import cpu  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SOURCE = Path(pagedlm.__file__).with_name("cpu.py")
X86_64, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
HERE = [name for name in ("avx512", "avxvnni", "avx2", "plain") if name in cpu.FORMS and
        all(cpu.features().get(x) for x in cpu.FORMS[name])] + ["emulated"]
KINDS = [*formats, torch.bfloat16, torch.float32, torch.float16]


@cache
def form(name, checked=False, features=None, triple=None):
    "The module again, in another form; what it compiles is kept like the real one's"
    spec = spec_from_file_location(f"pagedlm.cpu_as_{name}{'_checked'*checked}{'_there'*bool(features)}", SOURCE)
    module = module_from_spec(spec)
    has = dict.fromkeys(features, True) if features is not None else cpu.features()
    sys.modules[spec.name] = module
    with patch.dict(os.environ, PAGEDLM_CPU=name, PAGEDLM_CPU_CHECK="1" if checked else ""), \
            patch.object(llvm, "get_host_cpu_features", lambda: has), \
            patch.object(llvm, "get_process_triple", lambda: triple or cpu.llvm.get_default_triple()):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(params=HERE)
def k(request):
    return form(request.param)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(x, part):
    return int_product(x, part) if isinstance(part, Packed) else plain_product(part, x)


def bound(x, part):
    "How large a row's products are before they are added up: the unit of rounding"
    x = round_act(x)[0] if isinstance(part, Packed) else x
    return x.abs() @ part.unpack().abs().T


# ---- products

SHAPES = [(1, 1, 32), (2, 15, 32), (3, 16, 64), (4, 17, 96), (5, 31, 160), (6, 33, 32), (7, 48, 64), (8, 40, 96), (9, 50, 288)]


@pytest.mark.parametrize("kind", KINDS)
def test_products(k, kind):
    for T, N, K in SHAPES:
        x, part = numbers(T, K, seed=T), pack_rows(numbers(N, K, seed=N), kind)
        y, want = k.matmul(x, [part]), reference(x, part)
        rounded = k.WIDE and kind == torch.bfloat16  # activations, too
        assert y.shape == (T, N) and (y - want).abs().le((2**-8 if rounded else 2e-6)*bound(x, part)).all(), (T, N, K)
        if rounded:
            want = plain_product(part, x.bfloat16().float())
            assert (y - want).abs().le(1e-5*bound(x, part)).all(), (T, N, K)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_its_neighbours(k, kind):
    x, part = numbers(17, 96), pack_rows(numbers(35, 96), kind)
    together = k.matmul(x, [part])
    for i in range(17):
        assert torch.equal(k.matmul(x[i:i + 1], [part])[0], together[i])
    for T in range(1, 17):
        assert torch.equal(k.matmul(x[:T], [part]), together[:T])
        assert torch.equal(k.matmul(x[17 - T:], [part]), together[17 - T:])


@pytest.mark.parametrize("kind", formats)
@pytest.mark.skipif(cpu.X86 and not cpu.features().get("fma"), reason="rounds twice")
def test_packed_products_have_the_same_bits_in_every_form(kind):
    x, part = numbers(9, 288)*3, pack_rows(numbers(33, 288), kind)
    x[3], x[4, 7] = 0, 500
    ys = {name: form(name).matmul(x, [part]) for name in HERE}
    for y in ys.values():
        assert torch.equal(y, ys[HERE[0]])


def extreme(kind, N, K):
    "Rows with the largest integers there are, of one sign"
    part = pack_rows(torch.ones(N, K), kind)
    q = {4: 0xff, 8: -128}[part.format.bits]
    part.q.fill_(q)
    part.scales.view(torch.float16)[:] = torch.tensor(.5)
    return part


@pytest.mark.parametrize("kind, sign", [*product(formats, (1, -1))])
def test_the_largest_integers_overflow_nothing(k, kind, sign):
    part, x = extreme(kind, 17, 96), torch.full((5, 96), sign*3.)
    y, want = k.matmul(x, [part]), int_product(x, part)
    assert (y - want).abs().le(1e-6*bound(x, part)).all() and y.abs().min() > 100
    part.q[:, :, ::2] = {4: 0, 8: 127}[part.format.bits]  # and of both
    y, want = k.matmul(x, [part]), int_product(x, part)
    assert (y - want).abs().le(1e-6*bound(x, part)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_rows_harm_no_others(k, kind):
    "Zeros, huge and tiny numbers, NaN and infinity in some rows of activations"
    x, part = numbers(9, 96), pack_rows(numbers(20, 96), kind)
    calm = k.matmul(x, [part])
    x[1], x[2, 5], x[4, 3], x[5] = 0, float("nan"), float("inf"), x[5]*1e30
    x[7] *= 1e-38
    y = k.matmul(x, [part])
    rest = [0, 3, 6, 8]
    assert torch.equal(y[rest], calm[rest]) and not y[1].any()
    assert y[2].isnan().all() and not y[4].isfinite().any()
    want = reference(x[[5, 7]], part)
    big, small = y[5] - want[0], y[7] - want[1]
    assert y[5].isfinite().all() and big.abs().le((2**-8 if k.WIDE else 1e-5)*bound(x, part)[5]).all()
    assert small.abs().max() < 1e-35


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_weights_harm_no_others(k, kind):
    "A row of weights with NaN, one with zeros"
    w, x = numbers(20, 64), numbers(3, 64)
    w[4] = 0
    part = pack_rows(w, kind)
    calm = k.matmul(x, [part])
    if isinstance(part, Packed):
        part.scales.view(torch.float16)[:, 7] = float("nan")
    else:
        part.weight[7, 3] = float("nan")
    y, rest = k.matmul(x, [part]), [i for i in range(20) if i != 7]
    assert torch.equal(y[:, rest], calm[:, rest]) and not y[:, 4].any() and y[:, 7].isnan().all()


def at(a):
    return a.ctypes.data, a.strides[0]


@pytest.mark.parametrize("kind", ("Q4_1", "Q8_0", torch.bfloat16))
def test_what_becomes_of_results(k, kind):
    "Put, added, gated; and the padding is written, but nothing beside the 16 columns"
    part = pack_rows(numbers(16, 64), kind)
    kind, w = k.panels(part)
    x, sc = k.activations(numbers(7, 64, seed=1).numpy(), k.X[kind])
    before = numbers(7, 48, seed=2).numpy()
    found = []
    for how in (k.PUT, k.ADD, k.GATE):
        o = k.aligned((7, 48)) + before
        k.products[kind].ctypes(w.ctypes.data, *at(x), *at(sc), 64, 7, o.ctypes.data + 64, o.strides[0], how)
        assert (o[:, :16] == before[:, :16]).all() and (o[:, 32:] == before[:, 32:]).all()
        found.append(torch.from_numpy(o[:, 16:32]))
    put, add, gate = found
    there = torch.from_numpy(before[:, 16:32])
    assert torch.equal(add, put + there)
    torch.testing.assert_close(gate, torch.nn.functional.silu(there)*put, rtol=1e-6, atol=1e-7)


def test_gates_of_any_size(k):
    "SiLU of huge and tiny numbers, infinity and NaN; times 1, which the product makes"
    g = np.array([-1e30, -200, -88, -20, -1e-3, 0, 1e-30, 1e-3, 1, 20, 87, 89, 200, 1e30, np.inf, np.nan], np.float32)
    part = Plain(torch.ones(16, 16))
    _, w = k.panels(part)
    x, o = k.aligned((1, 16)), k.aligned((1, 16)) + g
    x[0, 0] = 1
    k.products["f32"].ctypes(w.ctypes.data, *at(x), 0, 0, 16, 1, *at(o), k.GATE)
    want = torch.nn.functional.silu(torch.from_numpy(g).double()).numpy()
    np.testing.assert_allclose(o[0], want, rtol=1e-6, atol=1e-36)


def test_mixed_parts_and_threads(k):
    parts = [pack_rows(numbers(n, 96, seed=n), kind) for n, kind in ((40, "Q4_1"), (7, "Q8_0"), (33, torch.bfloat16), (5, "Q4_0"))]
    x, team = numbers(5, 96), k.Team(3)
    y = k.matmul(x, parts)
    assert y.shape == (5, 85)
    for _ in range(5):
        assert torch.equal(k.matmul(x, parts, team), y)
    assert torch.equal(y, torch.cat([k.matmul(x, [part]) for part in parts], 1))
    team.close()


# ---- activations and numbers

def test_integers_are_those_of_quantize(k):
    x = torch.cat([numbers(200, 64)*10**torch.linspace(-6, 6, 200)[:, None], torch.zeros(1, 64)])
    x[5] = (x[5]*4).round()/8  # halves
    q, sc = k.activations(x.numpy(), "ints")
    q = q.view(np.int8 if k.X_BYTES["ints"] == 1 else np.float32).reshape(-1, 2, 32)
    want, scale = quantize(x)
    np.testing.assert_array_equal(q, want.numpy())
    np.testing.assert_array_equal(sc[..., 0], scale[..., 0].numpy())
    np.testing.assert_array_equal(sc[..., 1], q.astype(int).sum(-1))


@pytest.mark.parametrize("rep", ("ints", "f32", "bf16"))
def test_norm(k, rep):
    x, w = numbers(4, 96).numpy(), (numbers(96, seed=3) + 1).numpy()
    normed = (x.astype(np.float64)/np.sqrt((x.astype(np.float64)**2).mean(-1, keepdims=True) + 1e-5)*w).astype(np.float32)
    got, want = (k.activations(np.ascontiguousarray(a), rep, n)[0] for a, n in ((x, w), (normed, None)))
    kind = dict(ints=np.int8 if k.X_BYTES["ints"] == 1 else np.float32, f32=np.float32, bf16=np.int16)[rep]
    got, want = got.view(kind), want.view(kind)
    if rep == "f32":
        np.testing.assert_allclose(got, want, rtol=1e-6)
    else:  # where a value lies between two steps, float32's last bit decides
        assert abs(got.astype(int) - want.astype(int)).max() <= 1 and (got == want).mean() > .98


def test_bf16_is_torchs(k):
    x = torch.cat([numbers(4000)*10**torch.linspace(-38, 38, 4000), torch.tensor([float("inf"), -float("inf"), 0, -0., 1.00390625, 1.01171875]),
                   numbers(10)])
    got = k.activations(x.numpy()[None], "bf16")[0].view(np.int16)[0]
    np.testing.assert_array_equal(got, x.bfloat16().view(torch.int16).numpy())
    x[7] = float("nan")
    x.view(torch.int32)[8] = 0x7fffffff  # a NaN that rounding up would turn into -0
    got = k.activations(x.numpy()[None], "bf16")[0].view(np.int16)[0]
    assert torch.from_numpy(got).view(torch.bfloat16).isnan().nonzero().flatten().tolist() == [7, 8]


def test_one_number_at_a_time(k):
    from numba import njit
    f16, put, f32 = k.f16_at, k.put_f32, k.f32_at
    squares, top, blend, scale = k.sum_squares, k.largest, k.blend, k.scale_to

    @njit
    def widen(room, out, n):
        for i in range(n):
            put(out + 4*i, f16(room + 2*i))

    @njit
    def fold(x, y, n):
        found = squares(x, n), top(x, n)
        blend(x, np.float32(2), y, np.float32(.5), n)
        scale(y, x, np.float32(3), n)
        return found

    every, out = np.arange(65536, dtype=np.uint16), k.aligned(65536)
    widen(every.ctypes.data, out.ctypes.data, 65536)
    np.testing.assert_array_equal(out, every.view(np.float16))
    x, y = numbers(2, 160).numpy().copy()
    was, wy = x.copy(), y.copy()
    s, t = fold(x.ctypes.data, y.ctypes.data, 160)
    assert s == pytest.approx(float((was.astype(np.float64)**2).sum()), rel=1e-6) and t == was.max()
    np.testing.assert_allclose(x, was*2 + wy*.5, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(y, x*np.float32(3))
    x[77] = np.nan
    assert all(np.isnan(v) for v in fold(x.ctypes.data, y.ctypes.data, 160))


@pytest.mark.parametrize("kind", KINDS)
def test_look_up(kind):
    part = pack_rows(numbers(19, 64), kind)
    kind, w = cpu.panels(part)
    want, number = part.unpack(), cpu.KINDS.index(kind)
    got = [[cpu.weight_at(number, w[n//16].ctypes.data, k, n % 16) for k in range(64)] for n in (0, 5, 15, 16, 18)]
    np.testing.assert_array_equal(np.float32(got), want[[0, 5, 15, 16, 18]].numpy())
    assert w.shape[0] == 2 and w.ctypes.data % 64 == 0 and w.dtype == np.uint8
    assert cpu.weight_at(number, w[1].ctypes.data, 3, 9) == 0  # a row that is not there


def test_refusals(k):
    with pytest.raises(ValueError, match="float64"):
        k.panels(Plain(torch.ones(2, 32, dtype=torch.float64)))
    with pytest.raises(ValueError, match="24 weights.*multiple of 16"):
        k.panels(Plain(torch.ones(2, 24)))
    with pytest.raises(ValueError, match="48 numbers.*multiple of 32"):
        k.activations(np.ones((1, 48), np.float32), "ints")
    with pytest.raises(ValueError, match="x has 32 columns, and the weights have 64"):
        k.matmul(torch.ones(1, 32), [pack_rows(torch.ones(3, 64), "Q4_1")])
    with pytest.raises(ValueError, match="PAGEDLM_CPU='avx1024', but this processor runs only plain and emulated"):
        cpu.pick_form({}, "avx1024")


def test_without_numba():
    spec = spec_from_file_location("pagedlm.cpu_without_numba", SOURCE)
    with patch.dict(sys.modules, numba=None), pytest.raises(ImportError, match=r"pip install 'pagedlm\[cpu\]'"):
        spec.loader.exec_module(module_from_spec(spec))


# ---- checked addresses

@cache
def checked():
    return form(HERE[0], checked=True)


def test_checked_kernels_find_nothing_in_right_calls():
    k, team = checked(), checked().Team(2)
    for T, N in ((1, 5), (7, 33)):
        x, parts = numbers(T, 64), [pack_rows(numbers(N, 64), kind) for kind in ("Q4_1", torch.bfloat16)]
        assert torch.equal(k.matmul(x, parts, team), form(HERE[0]).matmul(x, parts))
    team.close()


@pytest.mark.parametrize("kind, short", [*product(("Q4_1", torch.bfloat16), "w x sc o low".split())])
def test_checked_kernels_find_strays(kind, short):
    "An array that is 4 bytes too short, or starts too late; and what lies behind stays as it was"
    k = checked()
    part, T = pack_rows(numbers(16, 64), kind), 7
    kind, w = k.panels(part)
    if kind == "bf16" and short == "sc":
        return  # it has none
    x, sc = k.activations(numbers(T, 64).numpy(), k.X[kind])
    room = k.aligned(T*16 + 16)
    o = room[:T*16].reshape(T, 16)
    arrays = dict(w=w, x=x, sc=sc, o=o)
    flat = {name: a.reshape(-1).view(np.uint8) for name, a in arrays.items()}

    def run(given):
        k.watch(given)
        k.products[kind].ctypes(w.ctypes.data, *at(x), *at(sc), 64, T, *at(o), k.PUT)
        k.check_fault()

    run(list(flat.values()))
    room[:] = 7
    if short == "low":
        flat["x"] = flat["x"][4:]
    else:
        flat[short] = flat[short][:-4]
    with pytest.raises(IndexError, match="outside of all arrays"):
        run(list(flat.values()))
    assert (room[T*16:] == 7).all() and (short != "o" or room[T*16 - 1] == 7)


def test_a_wait_for_a_stray_counter_ends():
    k = checked()
    counter = k.aligned(32, np.int32)
    k.watch([np.zeros(4)])
    k.settle(counter.ctypes.data, 0, 1)
    with pytest.raises(IndexError):
        k.check_fault()
    with pytest.raises(ValueError, match="2000 arrays"):
        k.watch([counter]*2000)


# ---- forms for other processors

LISTINGS = [("avx512", "znver4", X86_64), ("avx512", "sapphirerapids", X86_64), ("avxvnni", "alderlake", X86_64),
            ("avx2", "haswell", X86_64), ("plain", "x86-64", X86_64), ("plain", "apple-m1", "arm64-apple-macosx"), ("plain", "generic", ARM)]
MUST = dict(avx512=({"vpdpbusd", "zmm"}, {"vdpbf16ps", "zmm"}), avxvnni=({"vpdpbusd", "ymm"}, {"vfmadd", "ymm"}),
            avx2=({"vpmaddubsw", "ymm"}, {"vfmadd", "ymm"}))


@pytest.mark.parametrize("name, processor, triple", LISTINGS)
def test_every_form_can_be_compiled_for_its_processors(name, processor, triple):
    "All kernels; and the instructions that the form is there for are the ones that come out"
    k = form(name, features=tuple(cpu.FORMS[name]), triple=triple)
    assert k.FORM == name and k.X86 == (triple == X86_64)
    made = {kind: k.assembly((k.ints if kind in k.BLOCK else k.floats)(kind, k.TILE), processor, triple) for kind in k.KINDS}
    for code in (k.to_ints(True), k.to_floats("bf16", False), k.sum_squares, k.largest, k.fetch_add):
        k.assembly(code, processor, triple)
    must = MUST.get(name, ({"mulps"}, {"mulps"}) if triple == X86_64 else ({"fmla"}, {"fmla"}))
    for kind, words in zip(("q4", "bf16"), must):
        assert all(word in made[kind] for word in words), kind
    assert name == "plain" or not any("call" in line.split() for line in made["q4"].splitlines())
    if name == "avx2":
        assert made["q4"].count("vpmaddubsw") == 64  # 4 tokens, 2 vectors, 8 steps


# ---- kept on disk

def shelf(monkeypatch, folder):
    monkeypatch.setenv("PAGEDLM_CACHE", str(folder))


def twelve(x):
    return x + 12


twelve.__module__ = "pagedlm.cpu"  # others are never kept


def loaded(f=twelve):
    "Does a fresh dispatcher find it on disk?"
    made = cpu.compiled(f)
    assert made(30) == 42
    return bool(made.stats.cache_hits)


def test_kept(monkeypatch, tmp_path, capfd):
    shelf(monkeypatch, tmp_path)
    cpu.announce.cache_clear()
    assert [loaded(), loaded()] == [False, True]
    (file,) = (tmp_path/"compiled"/f"{pagedlm.__version__}-{cpu.FORM}").iterdir()
    assert file.name.startswith("cpu.twelve-")
    assert capfd.readouterr().err.count("compiling the CPU kernels for this machine, once") == 1
    file.write_bytes(file.read_bytes()[:50])  # half a file
    assert [loaded(), loaded()] == [False, True]
    file.write_bytes(pickle.dumps("nonsense"))
    assert [loaded(), loaded()] == [False, True]
    for change in (dict(source_stamp=lambda: "another source"), dict(FORM="another form"), dict(__version__="0.0.0")):
        with monkeypatch.context() as m:
            for name, value in change.items():
                m.setattr(cpu, name, value)
            assert [loaded(), loaded()] == [False, True]
    assert loaded() and len(list(tmp_path.rglob("cpu.twelve-*"))) == 4
    made = cpu.compiled(twelve)
    assert made(.5) == 12.5 and loaded() and len(list(tmp_path.rglob("cpu.twelve-*"))) == 5  # another signature
    with monkeypatch.context() as m:
        m.setattr(cpu, "source_stamp", lambda: "")  # no source to be read: nothing can be trusted
        assert not loaded() and not loaded()
        m.setattr(cpu, "source_stamp", lambda: "x")
        m.setattr(cpu, "CHECKED", True)
        assert not cpu.kept(twelve)


def test_the_stamp_is_that_of_all_sources(monkeypatch, tmp_path):
    real = cpu.source_stamp()
    for path in SOURCE.parent.glob("cpu*.py"):
        (tmp_path/path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(cpu.inspect, "getfile", lambda f: tmp_path/"weights.py")
    cpu.source_stamp.cache_clear()
    try:
        assert cpu.source_stamp() == real
        with open(tmp_path/"cpu_new.py", "w") as f:
            f.write("# a comment")
        cpu.source_stamp.cache_clear()
        assert cpu.source_stamp() not in (real, "")
        monkeypatch.setattr(cpu.inspect, "getfile", lambda f: tmp_path/"nothing"/"weights.py")
        cpu.source_stamp.cache_clear()
        assert cpu.source_stamp() == ""
    finally:
        monkeypatch.undo()
        cpu.source_stamp.cache_clear()


def test_where_nothing_can_be_written(monkeypatch, tmp_path, caplog):
    (tmp_path/"file").write_text("not a folder")
    shelf(monkeypatch, tmp_path/"file")
    cpu.complain.cache_clear()
    assert not loaded() and not loaded()
    assert sum("cannot be kept" in r.message for r in caplog.records) == 1
    shelf(monkeypatch, tmp_path/"full")
    with monkeypatch.context() as m:
        def full(*args):
            raise OSError(28, "No space left on device")
        m.setattr(cpu.os, "replace", full)
        assert not loaded()
    assert not [p for p in (tmp_path/"full").rglob("*") if p.is_file()]  # no half file stays


KEPT = """
import numpy as np
from pagedlm import cpu
def try_out():
    (row,), _ = cpu.activations(np.arange(32, dtype=np.float32)[None], "f32")
    counters = cpu.aligned(32, np.int32)
    assert (row.view(np.float32) == np.arange(32)).all()
    assert cpu.claim(counters.ctypes.data, 0, 1, 9, 3) == (0, 3) and counters[16] == 3
    return bool(cpu.claim.stats.cache_hits)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_at_once_and_a_third(monkeypatch, tmp_path):
    "Two copies of this process compile, at the same time; a new one finds what they left, and says nothing"
    shelf(monkeypatch, tmp_path)
    children = []
    for _ in range(2):
        if not (child := os.fork()):
            try:
                del sys.modules["pagedlm.cpu"], pagedlm.cpu  # the module anew: nothing is compiled
                names = {}
                exec(KEPT, names)
                os._exit(names["try_out"]())
            finally:
                os._exit(9)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert {*codes} <= {0, 1}  # 1: the other was so quick that it was found
    files = [p.name for p in tmp_path.rglob("cpu.*")]
    assert files and not [name for name in files if re.search(r"\.[0-9a-f]{32}$", name)]  # no file under way is left
    done = subprocess.run([sys.executable, "-c", KEPT + "print(try_out())"], capture_output=True, text=True,
                          env=dict(os.environ, PAGEDLM_CPU=cpu.FORM))
    assert (done.stdout, done.stderr) == ("True\n", "")


# ---- threads

def test_team_runs_all_and_raises():
    team, seen = cpu.Team(4), []
    assert team.n_threads == 4
    for _ in range(50):
        team.run(lambda tid, x: seen.append((tid, x, threading.current_thread())), 5)
    assert len(seen) == 200 and len({t for *_, t in seen}) == 4
    assert {t for tid, _, t in seen if tid == 0} == {threading.current_thread()}

    def fail(tid, who):
        if tid == who:
            raise KeyError(who)

    for who in range(4):
        with pytest.raises(KeyError):
            team.run(fail, who)
        seen.clear()
        team.run(lambda tid: seen.append(tid))
        assert sorted(seen) == [0, 1, 2, 3]
    team.close()
    for n in (0, -1):
        with pytest.raises(ValueError, match=f"n_threads={n}, but it must be at least 1"):
            cpu.Team(n)


def test_ctrl_c_waits_for_the_others():
    team, ended = cpu.Team(3), []

    def work(tid):
        if tid == 0:
            raise KeyboardInterrupt
        time.sleep(.2)
        ended.append(tid)

    with pytest.raises(KeyboardInterrupt):
        team.run(work)
    assert sorted(ended) == [1, 2]  # before run returned

    def slow(tid):
        time.sleep(.3 if tid else 0)
        ended.append(tid)

    ended.clear()
    me = ctypes.c_ulong(threading.get_ident())
    interrupt = threading.Timer(.1, lambda: ctypes.pythonapi.PyThreadState_SetAsyncExc(me, ctypes.py_object(KeyboardInterrupt)))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):  # while it waits
        team.run(slow)
    assert sorted(ended) == [0, 1, 2]
    ended.clear()
    team.run(slow)
    assert sorted(ended) == [0, 1, 2]
    team.close()


def test_teams_end_and_leave_no_thread():
    before = {*threading.enumerate()}
    team = cpu.Team(5)
    mine = {*threading.enumerate()} - before
    assert len(mine) == 4
    team.close()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()


def test_counters_share_everything_once():
    "Every panel is done once, whoever is slow"
    from numba import njit
    claim, settle, fetch_add = cpu.claim, cpu.settle, cpu.fetch_add

    @njit(nogil=True)
    def work(tid, counters, done, n, size):
        (i, end), mine = claim(counters, tid, 4, n, size), 0
        while i < end:
            for j in range(i, end):
                fetch_add(done + 4*j, np.int32(1))
            (i, end), mine = claim(counters, tid, 4, n, size), mine + end - i
        settle(counters, mine, n)

    team, done = cpu.Team(4), np.zeros(1000, np.int32)
    for n, size in ((1000, 1), (1000, 7), (1000, 64), (1000, 2000), (3, 1), (1, 1)):
        counters = cpu.aligned(80, np.int32)
        done[:] = 0
        team.run(work, counters.ctypes.data, done.ctypes.data, n, size)
        assert (done[:n] == 1).all() and not done[n:].any() and counters[0] == n
    team.close()
