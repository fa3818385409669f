"Packed weights: codecs are gguf's, products are the one in integers, and a packed model answers like its weights"
import gc
import weakref
from itertools import product

import gguf
import numpy as np
import pytest
import torch
from common import said_by

from pagedlm import quant
from pagedlm.attention import Dense
from pagedlm.blocks import BlockManager, BlockPool
from pagedlm.core import SamplingParams
from pagedlm.engine import Engine
from pagedlm.layers import Linear
from pagedlm.model import tiny_config, tiny_model
from pagedlm.paged import TorchBackend
from pagedlm.quant import (Packed, Plain, QLinear, find_kind, formats, from_blocks, int_product, load_packed,
                           pack, pack_rows, packed_product, plain_product, quality, quantize, round_act, stored_bytes,
                           to_blocks)
from pagedlm.request import Request
from pagedlm.runner import Runner
from pagedlm.scheduler import Scheduler
from pagedlm.weights import default_model, load_into, open_source

KINDS = "Q4_0", "Q4_1", "Q8_0", "int8", "bf16"


def theirs(kind):
    return gguf.GGMLQuantizationType[kind]


# ---- codecs

def numbers(N, C, seed=0):
    "Rows with all that is awkward: zeros, a constant, an outlier, tiny and huge values, ties"
    x = torch.randn(N, C, generator=torch.Generator().manual_seed(seed))
    odd = torch.zeros(C), torch.full((C,), -2.5), x[0]*1e-7, x[0]*1e4, (x[0]*2).round()/2, -x[0].abs()
    for i, row in enumerate(odd):
        if i < N:
            x[i] = row
    x[-1, C//2] = 300
    return x


@pytest.mark.parametrize("kind, shape", [*product(formats, [(1, 32), (7, 96), (50, 288)])])
def test_codec_is_ggufs(kind, shape):
    x = numbers(*shape)
    want, got = gguf.quantize(x.numpy(), theirs(kind)), pack_rows(x, kind)
    assert want.shape[1] == shape[1]//32*formats[kind].n_bytes
    np.testing.assert_array_equal(to_blocks(got).numpy(), want)
    np.testing.assert_array_equal(got.unpack().numpy(), gguf.dequantize(want, theirs(kind)))


@pytest.mark.parametrize("kind", formats)
def test_any_bytes_are_unpacked_like_gguf_does(kind):
    "Whatever wrote them: every integer, negative scales"
    rng, n = np.random.default_rng(1), formats[kind].n_bytes
    blocks = rng.integers(0, 256, (9, 4, n), dtype=np.uint8)
    k = 2*formats[kind].n_scales
    blocks[..., :k] = rng.normal(size=(9, 4, k//2)).astype(np.float16).view(np.uint8)
    blocks = blocks.reshape(9, -1)
    rows = from_blocks(kind, torch.from_numpy(blocks))
    np.testing.assert_array_equal(rows.unpack().numpy(), gguf.dequantize(blocks, theirs(kind)))
    np.testing.assert_array_equal(to_blocks(rows).numpy(), blocks)
    assert torch.equal(rows.unpack([8, 0, 8]), rows.unpack()[[8, 0, 8]])
    assert torch.equal(rows.unpack(slice(2, 5)), rows.unpack()[2:5])


def test_a_block_by_hand():
    "Q4_1: d = 0.5 and m = -3 in float16, then 16 bytes, low halves first"
    bytes_ = [0x00, 0x38, 0x00, 0xc2] + [0x10*(15 - i) + i for i in range(16)]
    want = [0.5*i - 3 for i in range(16)] + [0.5*(15 - i) - 3 for i in range(16)]
    rows = from_blocks("Q4_1", torch.tensor([bytes_], dtype=torch.uint8))
    assert rows.unpack().tolist() == [want]
    x = torch.zeros(1, 32)
    x[0, 1], x[0, 17] = 127, -254  # scale 2: integers 64 (half to even: 63.5) and -127
    assert int_product(x, rows).item() == 2*(64*want[1] - 127*want[17])


def test_blocks_in_a_map_stay_as_they_are():
    "An array will do, and nothing of it is kept"
    blocks = np.frombuffer(bytes(range(40))*3, np.uint8).reshape(3, 40).copy()
    rows = from_blocks("Q4_1", blocks)
    want = to_blocks(rows).clone()
    assert torch.equal(want, torch.from_numpy(blocks))
    blocks[:] = 0
    assert torch.equal(to_blocks(rows), want)


@pytest.mark.usefixtures("default_pair")  # by then the vocabulary is converted
def test_a_packed_start_unpacks_nothing():
    code = ("import sys; from pagedlm.quant import load_packed; from pagedlm.weights import default_model; "
            "load_packed(default_model()); print({'gguf', 'transformers', 'safetensors', 'jinja2'} & {*sys.modules})")
    assert said_by(code) == "set()\n"


@pytest.mark.parametrize("kind", formats)
def test_packing_again_changes_nothing(kind):
    once = pack_rows(numbers(9, 96).clamp(-100, 100)[5:], kind)
    again = pack_rows(once.unpack(), kind)
    if kind != "Q4_1":  # whose m is rounded to float16, which moves the largest value
        assert torch.equal(to_blocks(once), to_blocks(again))
    assert (once.unpack() - again.unpack()).abs().max() <= once.unpack().abs().max()*2**-9


def test_refusals():
    for kind in ("awq", "Q4_K", "", "int4"):
        with pytest.raises(ValueError, match="None .as stored. or one of int8, bf16, Q4_0, Q4_1, Q8_0"):
            find_kind(kind)
        with pytest.raises(ValueError, match="int8, bf16"):
            pack(tiny_model(), kind)
        with pytest.raises(ValueError, match="int8, bf16"):
            load_packed("nowhere.gguf", kind)
    with pytest.raises(ValueError, match="a row of 40 numbers.*multiple of 32"):
        pack(tiny_model(tiny_config(width=40)), "int8")
    pack(tiny_model(tiny_config(width=40)), "bf16")  # knows no groups
    with pytest.raises(ValueError, match="is packed"):
        pack(pack(tiny_model(), "int8"), "bf16")
    with pytest.raises(ValueError, match="pack it as what"):
        pack(tiny_model(), None)


# ---- products

SHAPES = [(1, 1, 32), (1, 33, 64), (2, 31, 96), (17, 5, 288), (64, 40, 32), (3, 300, 1536)]


@pytest.mark.parametrize("kind, shape", [*product(formats, SHAPES)])
def test_fast_product_is_the_one_in_integers(kind, shape, monkeypatch):
    "Up to float32 sums in another order, also where the last slice is short, and where a slice is one row"
    T, N, C = shape
    rng = torch.Generator().manual_seed(T)
    x, rows = torch.randn(T, C, generator=rng)*3, pack_rows(torch.randn(N, C, generator=rng), kind)
    x[-1] = 0
    x[0, C//2] = 90
    want = int_product(x, rows)
    scale = round_act(x)[0].abs() @ rows.unpack().abs().T
    assert (want - round_act(x)[0].double() @ rows.unpack().double().T).abs().le(1e-6*scale + 1e-30).all()
    for size in (2**20, 7*C, 1):
        monkeypatch.setattr(quant, "SLICE", size)
        assert (packed_product(rows, *round_act(x)) - want).abs().le(1e-6*scale + 1e-30).all()


def test_plain_product():
    rng = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 96, generator=rng), torch.randn(70, 96, generator=rng)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        rows = Plain(w.to(dtype))
        torch.testing.assert_close(plain_product(rows, x), x @ w.to(dtype).float().T, rtol=1e-5, atol=1e-5)


def test_rounded_activations():
    x = numbers(9, 96)
    p, s = quantize(x)
    assert p.abs().max() <= 127 and (p == p.round()).all() and s.shape == (9, 3, 1)
    assert ((p*s).flatten(1) - x).abs().le(s.expand_as(p).flatten(1)*.5001).all()
    assert not p[0].any() and not p.isnan().any()


@pytest.mark.parametrize("kind", formats)
def test_a_rows_bits_do_not_depend_on_its_neighbours(kind):
    "The product in integers keeps this. The fast one leaves the order of sums to the BLAS: it promises the tolerance"
    rng = torch.Generator().manual_seed(0)
    x, rows = torch.randn(37, 288, generator=rng), pack_rows(torch.randn(30, 288, generator=rng), kind)
    together = int_product(x, rows)
    for i in (0, 5, 36):
        assert torch.equal(int_product(x[i:i+1], rows), together[i:i+1])
        assert torch.equal(round_act(x[i:i+1])[0], round_act(x)[0][i:i+1])


def test_linear_of_mixed_parts():
    "Rows of several tensors in several formats, one below the other; neighbours of one format are one part"
    rng = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 3, 96, generator=rng), torch.randn(30, 96, generator=rng)
    cuts = dict(zip((4, 6, 5, 8, 7), ("Q4_1", "Q4_1", "Q8_0", "bf16", "Q4_0")))
    parts = [pack_rows(rows, kind) for rows, kind in zip(w.split(list(cuts)), cuts.values())]
    lin = QLinear(96, 30, bias=True)
    lin.put(parts)
    lin.bias.data = torch.randn(30, generator=rng)
    assert [p.shape[0] for p in lin.parts] == [10, 5, 8, 7]
    flat = x.flatten(0, 1)
    ys = [int_product(flat, p) if isinstance(p, Packed) else flat @ p.unpack().T for p in parts]
    want = (torch.cat(ys, -1) + lin.bias).view(2, 3, 30)
    torch.testing.assert_close(lin(x), want, rtol=1e-5, atol=1e-4)
    y = lin(x.bfloat16())
    assert y.dtype == torch.bfloat16 and y.shape == (2, 3, 30)


def test_casting_a_model_leaves_integers_and_scales_alone():
    model = pack(tiny_model(), "Q4_1")
    before = to_blocks(model.blocks[0].mlp.down.parts[0])
    model.to(torch.bfloat16)
    assert torch.equal(to_blocks(model.blocks[0].mlp.down.parts[0]), before)
    assert model(torch.arange(5), Dense()).dtype == torch.bfloat16 == model.embed(torch.arange(5)).dtype


# ---- models

class Rounding(Linear):
    "A `Linear` that rounds its input to 8 bits as a packed one does"
    def forward(self, x):
        return super().forward(round_act(x)[0])


def unpacked(model):
    "The same weights and the same arithmetic, with unpacked matrices; activations are rounded as in `model`"
    plain = tiny_model(model.config)
    for name, p in plain.named_parameters():
        place = model.get_submodule(name.removesuffix(".weight"))
        p.data = torch.cat([part.unpack() for part in place.parts]) if hasattr(place, "parts") else place.weight
    if plain.head is None:
        plain.head = Linear(model.config.width, model.config.vocab_size)
        plain.head.weight = plain.embed.weight
    if isinstance(model.embed.parts[0], Packed):
        for module in plain.modules():
            if type(module) is Linear:
                module.__class__ = Rounding
    return plain


@pytest.mark.parametrize("kind, tied", [*product(KINDS, (True, False))])
@torch.inference_mode()
def test_a_packed_model_is_its_weights(kind, tied):
    packed = pack(tiny_model(tiny_config(tied=tied)), kind)
    plain = unpacked(packed)
    ids = torch.arange(100, 160)
    got, want = (m.logits(m(ids, Dense())) for m in (packed, plain))
    # where a value lies between two steps, float32's last bit decides: a few tokens may be off by a step
    off = (got - want).abs().amax(-1)
    assert off.median() < 1e-4 and off.max() < 1


@pytest.mark.parametrize("tied", (True, False))
def test_bytes(tied):
    "No unpacked copy stays anywhere, and an embedding with a tied head is kept once"
    config = tiny_config(tied=tied)
    norms = 4*config.width*(2*config.n_layers + 1)
    plain = stored_bytes(tiny_model(config)) - norms
    for kind, bits in dict(int8=8.5, Q8_0=8.5, Q4_1=5, Q4_0=4.5, bf16=16).items():
        model = pack(tiny_model(config), kind)
        assert stored_bytes(model) == norms + plain*bits/32
        assert {name for name, _ in model.named_parameters()} == {
            "norm.weight", *(f"blocks.{l}.norm{i}.weight" for l in range(config.n_layers) for i in (1, 2))}
        held = {id(module): module for module in model.modules() if isinstance(module, (Packed, Plain))}
        assert sum(t.untyped_storage().nbytes() for m in held.values() for t in m.buffers()) == plain*bits/32
        assert (model.head.parts is model.embed.parts) == tied


def test_packing_frees_what_it_packed():
    model = tiny_model()
    gone = [weakref.ref(p) for name, p in model.named_parameters() if "norm" not in name]
    pack(model, "int8")
    gc.collect()
    assert len(gone) == 9 and not any(ref() is not None for ref in gone)


def answers(model, prompts, n=20):
    "Greedy answers through the engine: a small pool, chunks, prefixes shared"
    runner = Runner(model, TorchBackend(), 40, 4, 8, 256)
    engine = Engine(Scheduler(BlockManager(BlockPool(40), 4), 8, 16, 256), runner)
    requests = [Request(f"{i}", p, SamplingParams(temperature=0, max_tokens=n), ()) for i, p in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while len(engine.scheduler):
        engine.step()
    return [r.output for r in requests]


PROMPTS = [[i, *range(7*i, 7*i + 3 + i % 5)] for i in range(1, 9)]
TOLERANCE = .3  # of a tiny random model's logits, whose standard deviation is above 2


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_through_the_engine(kind):
    "Each token is the one that the unpacked weights choose, or nearly as good; and nearly all are the very one"
    model = pack(tiny_model(), kind)
    plain, same, total = unpacked(model), 0, 0
    for prompt, out in zip(PROMPTS, answers(model, PROMPTS)):
        logits = plain.logits(plain(torch.tensor(prompt + out), Dense()))[len(prompt) - 1:-1]
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(out)[:, None])[:, 0]
        assert gaps.max() <= TOLERANCE, f"a token is {gaps.max():.2f} below the best"
        same, total = same + (gaps == 0).sum().item(), total + len(out)
    assert total == 160 and same >= (160 if kind == "bf16" else 152), same


# ---- files

@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_checkpoint(kind, tmp_path):
    "Safetensors: packed as they are loaded, or kept in the type they have"
    source = Shelf(tiny_model())
    model = quant.packed_transformer(tiny_config(), kind)
    load_into(model, source)
    want = pack(tiny_model(), kind)
    for part in (*quant.tie(model).modules(), *want.modules()):
        if isinstance(part, quant.QLinear):
            part.settle() # otherwise at the first product
    for got, there in zip(model.buffers(), want.buffers(), strict=True):
        assert torch.equal(got, there)
    as_stored = quant.packed_transformer(tiny_config())
    load_into(as_stored, source)
    assert stored_bytes(quant.tie(as_stored)) == stored_bytes(tiny_model())
    source.tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 96)
    with pytest.raises(ValueError, match=r"layers.1.mlp.down_proj.weight has shape \(64, 96\).*\(64, 128\)"):
        load_into(quant.packed_transformer(tiny_config(), kind), source)
    del source.tensors["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(ValueError, match="missing tensors: model.layers.1.mlp.down_proj.weight"):
        load_into(quant.packed_transformer(tiny_config(), kind), source)


class Shelf:
    "A source made of a model"
    path, meta, dtype = "shelf", dict(architectures=["LlamaForCausalLM"]), torch.float32

    def __init__(self, model):
        from pagedlm.families import LLAMA
        self.tensors = {}
        for ours, recipe in LLAMA.tensors(model.config).items():
            self.tensors |= dict(zip(recipe, model.get_parameter(ours).split(list(recipe.values()))))

    def names(self):
        return set(self.tensors)

    def tensor(self, name):
        return self.tensors[name]

    def packed(self, name):
        return None


def test_default_model_as_stored(default_pair):
    "The file's own integers, in our order of rows; its own bytes, no more; what float32 says, nearly"
    model, tokenizer = load_packed(default_model())
    plain, source = default_pair[0], open_source(default_model())
    assert stored_bytes(model) == sum(t.data.nbytes for t in source.tensors.values())
    assert model.blocks[7].attn.qkv.parts[0].kind == "Q4_1" and model.embed.parts[0].kind == "Q8_0"
    for name in ("embed", "blocks.0.attn.qkv", "blocks.29.attn.out", "blocks.3.mlp.gate_up", "blocks.4.mlp.down"):
        place = model.get_submodule(name)
        as_found = torch.cat([part.unpack() for part in place.parts])
        place.settle()
        (part,) = place.parts
        assert torch.equal(as_found, part.unpack()) and torch.equal(part.unpack(), plain.get_submodule(name).weight)
    from test_default_model import TEXT
    ids = torch.tensor(tokenizer.encode(TEXT)[:200])
    with torch.inference_mode():
        got, want = (m.logits(m(ids, Dense())) for m in (model, plain))
    found = quality(got, want, ids)
    assert found["kl"] < .005 and found["top1"] > .94, found


@torch.inference_mode()
def test_quality():
    a = torch.tensor([[2., 0], [0, 2], [1, 0]])
    ids = torch.tensor([0, 0, 1])
    same = quality(a, a, ids)
    assert same["kl"] == 0 and same["top1"] == 1
    assert same["ppl"] == pytest.approx(1/torch.tensor([2., 0]).softmax(-1)[0].item())
    other = quality(a.flip(-1), a, ids)
    assert other["top1"] == 0 and other["kl"] > .4
