"GGUF files of every family give the logits of the model they were made from; every kind of block is what gguf says"
import json
import logging

import gguf
import numpy as np
import pytest
import torch
from common import loaded, said_by
from gguf.quants import dequantize
from gguf_files import CASES, IDS, build, logits, rounded, write
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers as pt, trainers
from tokenizers import Tokenizer as Inner

from pagedlm.attention import Dense
from pagedlm.quant import load_packed
from pagedlm.vocab import BYTE, CONTROL, NORMAL, UNKNOWN, USER, tokenizer_json
from pagedlm.weights import GGUFFile, GGUFSource, open_source, unpack


@torch.inference_mode()
def check(model, theirs, atol=1e-4):
    assert theirs.std() > .2
    got = model.logits(model(IDS, Dense()))
    assert (got - theirs).abs().max() < atol


@pytest.mark.parametrize("name", CASES)
def test_family(tmp_path, name):
    model = build(name)
    check(loaded(write(model, name, tmp_path/"m.gguf")), logits(model))


@pytest.mark.parametrize("name", ["gpt2", "qwen3moe", "smollm3", "gemma3"])
def test_rounded(tmp_path, name):
    "Blocks of rows that were reordered, transposed, or cut into experts"
    path = write(build(name), name, tmp_path/"m.gguf", "Q8_0")
    check(loaded(path), logits(rounded(build(name), "Q8_0")))


def test_only_where_the_format_reorders(tmp_path):
    "The same tensors under a name whose rows stay as they are"
    for name, moved in {"llama": True, "qwen3": False, "smollm3": True, "olmo2": False, "mixtral": True}.items():
        model = build(name)
        source = open_source(write(model, name, tmp_path/"m.gguf"))
        q = model.model.layers[0].self_attn.q_proj.weight
        raw = torch.from_numpy(next(t.data for t in source.file.tensors if t.name == "blk.0.attn_q.weight"))
        assert torch.equal(source.tensor("blk.0.attn_q.weight"), q) and torch.equal(raw, q) == (not moved)


def test_pieces_are_the_tensor(tmp_path):
    source = open_source(write(build("llama"), "llama", tmp_path/"m.gguf", "Q4_0"))
    for name in source.names():
        whole = source.tensor(name)
        assert torch.equal(torch.cat([*source.pieces(name, n=700)]), whole)
        assert name == "output_norm.weight" or "norm" in name or len([*source.pieces(name, n=700)]) > 1


# ---- blocks that nothing here multiplies as they are

SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}


def blocks(kind, shape, seed=0, most=.002):
    "Random blocks, rows first; their scales are numbers up to `most`"
    rng, q = np.random.default_rng(seed), gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[q]
    x = rng.integers(0, 256, (*shape[:-1], shape[-1]//values, size), np.uint8)
    for at in SCALES[kind]:
        d = (rng.random(x.shape[:-1]) * most).astype(np.float16)[..., None]
        x[..., at:at + 2] = np.ascontiguousarray(d).view(np.uint8)
    return x.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("kind", SCALES)
def test_k_blocks(tmp_path, kind):
    q, packed = gguf.GGMLQuantizationType[kind], blocks(kind, (20, 512))
    w = gguf.GGUFWriter(tmp_path/"m.gguf", "llama")
    w.add_tensor("x", packed, raw_dtype=q)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    (t,) = GGUFFile(tmp_path/"m.gguf").tensors
    assert (t.kind, t.shape, t.is_packed) == (kind, (20, 512), True)
    want = dequantize(packed, q)
    assert 0 < np.abs(want).max() < 100
    np.testing.assert_array_equal(unpack(t), want)


def test_a_model_of_k_blocks(tmp_path, caplog):
    "Q4_K with some Q6_K, as most files have it: unpacked, which a line says, and right"
    name, sizes = "qwen2", dict(hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=2)
    model, path = build(name, **sizes), tmp_path/"m.gguf"
    w, rng = gguf.GGUFWriter(path, "qwen2"), 0
    from gguf_files import fields, tensors
    fields(w, "qwen2", model.config)
    new = {}
    for key, x in tensors(model, "qwen2"):
        kind = "Q6_K" if key.endswith(("ffn_down.weight", "attn_v.weight", "token_embd.weight")) else "Q4_K"
        if x.ndim == 1:
            w.add_tensor(key, x)
            continue
        rng += 1
        q = gguf.GGMLQuantizationType[kind]
        packed = blocks(kind, x.shape, rng, 1e-4 if kind == "Q6_K" else 4e-4)
        new[key] = torch.from_numpy(np.array(dequantize(packed, q)))
        w.add_tensor(key, packed, raw_dtype=q)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.dim() > 1:
                p.copy_(new[names.get_name(key, try_suffixes=(".weight", ".bias"))])
    want = logits(model)
    assert (loaded(path).logits(loaded(path)(IDS, Dense())) - want).abs().max() < 1e-4*want.abs().max()
    source = open_source(path)
    assert source.kinds == {"Q4_K", "Q6_K"} and source.dtype == torch.bfloat16
    source.tokenizer = lambda: None
    with caplog.at_level(logging.WARNING):
        packed, _ = load_packed(source)
    (record,) = caplog.records
    assert record.getMessage() == f"{path}: Q4_K, Q6_K have no product of their own here: unpacked to torch.bfloat16"
    with torch.inference_mode():
        got = packed.logits(packed(IDS, Dense()))
    assert (got - want).norm() < .03*want.norm()


def test_experts_stay_packed(tmp_path):
    "One tensor for all experts of a layer becomes rows of one packed matrix"
    path = write(build("qwen3moe"), "qwen3moe", tmp_path/"m.gguf", "Q8_0")
    source = open_source(path)
    source.tokenizer = lambda: None
    packed, _ = load_packed(source)
    theirs = rounded(build("qwen3moe"), "Q8_0")
    with torch.inference_mode():
        got, want = packed.logits(packed(IDS, Dense())), logits(theirs)
    (part,) = packed.blocks[1].mlp.gate_up.parts
    assert part.kind == "Q8_0" and part.shape == (5*2*32, 64)
    assert torch.equal(part.unpack(), theirs.model.layers[1].mlp.experts.gate_up_proj.flatten(0, 1))
    assert (got - want).norm() < .15*want.norm()  # activations in 8 bits, and so now and then another expert


def test_unknown_architecture_is_refused_with_the_list(tmp_path):
    w = gguf.GGUFWriter(tmp_path/"m.gguf", "mamba")
    w.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    with pytest.raises(ValueError, match="'mamba' is not supported, only .*gemma3.*qwen3"):
        GGUFSource(tmp_path/"m.gguf")


# ---- vocabularies: made here, written, read back

TEXT = """It's a naïve café: 3 tests, 25 of 1000! We'll see IF it's 12345678 o'clock... "Don't" THEY'RE
def f(x):\n    return x**2  # Ünïcode, 数学と物理, кошка\r\n\r\n\t\tend\n\n1. userName HTTPServer  \n2. ½ ² Ⅳ
""" * 3
HARD = [TEXT, "", " ", "  ", "   a", "\n", "\n\n\n", "\t\n \r\n", " \n x", "a  b   c", "I'm WE'LL can'T 'Tis", "x'll'll",
        "1 12 123 1234 12345", "3.14e-10", "²½Ⅳ٣", "naïve na\u0308ive é e\u0301", "ﬁ ﷺ", "😀👩‍👩‍👧 🏳️‍🌈", "\u200b\u00a0\ufeff",
        "日本語テキスト", "한국어 텍스트", "नमस्ते दुनिया", "שלום עולם", "<|end|>a<|end|> b<tool>c", "<unk></s>", "a<0x41>b",
        "▁ ▁▁", "camelCase HTTPServer XMLHttp", "!?!?...---===", "http://a.b/c?d=e&f#g", "a\u0000b", "\x7f\x80", "𝔘𝔫𝔦", "'", "''s"]
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
          r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
          r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def by(pattern):
    return pt.Sequence([pt.Split(Regex(pattern), "isolated"), pt.ByteLevel(add_prefix_space=False, use_regex=False)])


CUTTERS = {"gpt-2": pt.ByteLevel(add_prefix_space=False), "llama-bpe": by(LLAMA3), "dbrx": by(LLAMA3),
           "qwen2": by(LLAMA3.replace("{1,3}", "")), "tekken": by(TEKKEN),
           "smollm": pt.Sequence([pt.Digits(individual_digits=True), pt.ByteLevel(add_prefix_space=False)])}


def byte_level(pre):
    "A vocabulary that the library trained, as a model's makers would have"
    whole = pre in ("llama-bpe", "tekken")
    t = Inner(models.BPE(ignore_merges=whole))
    t.pre_tokenizer, t.decoder = CUTTERS[pre], decoders.ByteLevel()
    if pre == "qwen2":
        t.normalizer = normalizers.NFC()
    t.train_from_iterator([TEXT]*5, trainers.BpeTrainer(vocab_size=600, initial_alphabet=pt.ByteLevel.alphabet(), show_progress=False))
    t.add_special_tokens(["<|end|>"]), t.add_tokens(["<tool>"])
    return t


def said_of(t, **more):
    "What llama.cpp's converter would write of it"
    n, added = t.get_vocab_size(), t.get_added_tokens_decoder()
    kinds = [NORMAL if i not in added else CONTROL if added[i].special else USER for i in range(n)]
    merges = [" ".join(m) for m in json.loads(t.to_str())["model"]["merges"]]
    return dict(tokens=[t.id_to_token(i) for i in range(n)], token_type=kinds, merges=merges) | more


@pytest.mark.parametrize("pre", CUTTERS)
def test_byte_level_vocabulary(pre):
    t = byte_level(pre)
    back = Inner.from_str(json.dumps(tokenizer_json(said_of(t, model="gpt2", pre=pre, add_bos_token=False))))
    for text in HARD:
        ids = back.encode(text).ids
        assert ids == t.encode(text).ids, text
        assert back.decode(ids) == t.decode(ids)
    assert back.get_vocab_size() == t.get_vocab_size()


@pytest.mark.parametrize("spaced", [True, False])
def test_sentencepiece_vocabulary(spaced):
    "Llama 2's form and Gemma's: merges from scores; bytes; words added by hand"
    t = Inner(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁")]*spaced + [normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    alphabet = sorted(set(TEXT.replace(" ", "▁")) - set("数学кош²Ⅳ"))
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet,
                                  limit_alphabet=len(alphabet), show_progress=False, max_token_length=8)
    words = [w for w in TEXT.replace(" ", " ▁").split(" ")]
    t.train_from_iterator(words*5, trainer)
    state = json.loads(t.to_str())
    state["added_tokens"] = [a for a in state["added_tokens"] if a["id"] < 3]
    t = Inner.from_str(json.dumps(state))
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
                                  + [decoders.Strip(" ", 1, 0)]*spaced)
    n, rank = t.get_vocab_size(), {"".join(m): i for i, m in enumerate(state["model"]["merges"])}
    tokens = [t.id_to_token(i) for i in range(n)]
    said = dict(model="llama", pre="default", tokens=tokens, add_bos_token=False, add_space_prefix=spaced,
                token_type=[UNKNOWN, CONTROL, CONTROL] + [BYTE]*256 + [NORMAL]*(n - 259),
                scores=[-float(rank.get(token, 10**6)) for token in tokens])
    back = Inner.from_str(json.dumps(tokenizer_json(said)))
    for text in HARD:
        assert back.encode(text).ids == t.encode(text).ids, text
        assert back.decode(back.encode(text).ids) == t.decode(t.encode(text).ids), text


def test_vocabulary_through_a_file(tmp_path, monkeypatch):
    "Written by gguf, read from the header, converted without transformers"
    monkeypatch.setenv("PAGEDLM_CACHE", str(tmp_path/"cache"))
    t = byte_level("qwen2")
    said = said_of(t)

    def vocabulary(w):
        w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("qwen2")
        w.add_token_list(said["tokens"]), w.add_token_types(said["token_type"]), w.add_token_merges(said["merges"])
        w.add_eos_token_id(t.token_to_id("<|end|>"))

    path = write(build("qwen3", vocab_size=t.get_vocab_size()), "qwen3", tmp_path/"m.gguf", vocabulary=vocabulary)
    tokenizer = open_source(path).tokenizer()
    for text in HARD:
        assert tokenizer.encode(text) == t.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == t.decode(t.encode(text).ids, skip_special_tokens=False)
    assert tokenizer.eos_ids == (t.token_to_id("<|end|>"),) and tokenizer.bos_id is None
    code = (f"import sys; from pagedlm.weights import open_source; print(open_source({str(path)!r}).tokenizer().encode('Hi'), "
            "'transformers' in sys.modules)")
    monkeypatch.setenv("PAGEDLM_CACHE", str(tmp_path/"cache 2"))
    assert said_by(code) == f"{t.encode('Hi').ids} False\n"


def test_packed_weights_are_unpacked_where_no_step_is_compiled(tmp_path, monkeypatch, caplog):
    "A family that only PyTorch runs here: float32 unless somebody asked for something else; a family that is compiled: packed"
    from pagedlm import LLM, SamplingParams
    from pagedlm.llm import is_packed
    monkeypatch.setenv("PAGEDLM_CACHE", str(tmp_path/"cache"))
    t = byte_level("qwen2")
    said, greedy = said_of(t), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def vocabulary(w):
        w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("qwen2")
        w.add_token_list(said["tokens"]), w.add_token_types(said["token_type"]), w.add_token_merges(said["merges"])
        w.add_eos_token_id(t.token_to_id("<|end|>"))

    def asked(name, **kw):
        path, size = tmp_path/f"{name}.gguf", dict(vocab_size=t.get_vocab_size())
        if not path.exists():
            write(build(name, **size), name, path, "Q4_1", vocabulary=vocabulary)
        caplog.clear()
        llm = LLM(path, max_model_len=64, **kw)
        lines = [r.getMessage() for r in caplog.records if "unpacked" in r.getMessage()]
        return llm.model, lines, llm.generate("Hi there", greedy, use_tqdm=False)[0].outputs[0].token_ids

    odd, lines, ids = asked("gemma2")
    assert not is_packed(odd) and odd.dtype == torch.float32 and len(lines) == 1
    plain, lines, same = asked("gemma2", dtype="float32")
    assert not is_packed(plain) and not lines and same == ids
    kept, lines, _ = asked("gemma2", quantization="Q4_1")
    assert is_packed(kept) and not lines
    usual, lines, _ = asked("llama")
    assert is_packed(usual) and not lines
