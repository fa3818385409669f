"Every family and every kind of rotary positions: tiny random checkpoints, written by transformers, give transformers' logits"
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from common import loaded
import transformers as hf

from pagedlm.attention import Dense
from pagedlm.config import ModelConfig, n_params
from pagedlm.core import cdiv
from pagedlm.families import Family, config_from, families
from pagedlm.model import Transformer
from pagedlm.paged import AttnMeta, Paged, backends, load_backend

pytestmark = pytest.mark.usefixtures("one_thread")

T = 60                                                   # tokens: more than any window here, and than any original length
SMALL = dict(vocab_size=80, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
             intermediate_size=44, max_position_embeddings=64, rms_norm_eps=1e-2, pad_token_id=None, bos_token_id=None, eos_token_id=None)
SQUARE = {k: x for k, x in SMALL.items() if k != "head_dim"} | dict(hidden_size=40)  # where transformers' config knows no head_dim
GEMMA = SMALL | dict(query_pre_attn_scalar=14, num_key_value_heads=1)
CASES = {  # family and what is tried of it: (transformers' name, its config)
    "llama": ("Llama", SMALL | dict(tie_word_embeddings=False)),
    "llama tied": ("Llama", SMALL | dict(tie_word_embeddings=True)),
    "llama biases": ("Llama", SMALL | dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("Mistral", SMALL | dict(sliding_window=7)),
    "mistral no window": ("Mistral", SMALL | dict(sliding_window=None)),
    "mixtral": ("Mixtral", SMALL | dict(num_local_experts=5, num_experts_per_tok=2)),
    "qwen2": ("Qwen2", SMALL | dict(sliding_window=7, head_dim=6)),
    "qwen2 window": ("Qwen2", SMALL | dict(head_dim=6, use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3": ("Qwen3", SMALL | dict(tie_word_embeddings=True)),
    "qwen3_moe": ("Qwen3Moe", SMALL | dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True)),
    "qwen3_moe sum": ("Qwen3Moe", SMALL | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=False)),
    "gemma2": ("Gemma2", GEMMA | dict(sliding_window=7, attn_logit_softcapping=3., final_logit_softcapping=4.)),
    "gemma3": ("Gemma3", GEMMA | dict(sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "gemma3 stretched": ("Gemma3", GEMMA | dict(sliding_window=7, num_hidden_layers=4, sliding_window_pattern=2, rope_parameters=dict(
        full_attention=dict(rope_type="linear", factor=8., rope_theta=5e4), sliding_attention=dict(rope_type="default", rope_theta=100.)))),
    "olmo2": ("Olmo2", SQUARE),
    "smollm3": ("SmolLM3", SQUARE | dict(no_rope_layer_interval=2, num_hidden_layers=4)),
    "gpt2": ("GPT2", dict(vocab_size=80, n_embd=36, n_layer=3, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None)),
}
CLASSES = dict(GPT2="GPT2LMHeadModel", Gemma3="Gemma3ForCausalLM")
CONFIGS = dict(Gemma3="Gemma3TextConfig")


def theirs(name, kw, seed=0):
    "A random model of transformers: no two numbers alike, norms and biases too"
    config = getattr(hf, CONFIGS.get(name, f"{name}Config"))(**kw, attn_implementation="eager")
    model = getattr(hf, CLASSES.get(name, f"{name}ForCausalLM"))(config).eval()
    rng = torch.Generator().manual_seed(seed)
    for key, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=rng)
        if p.dim() == 1: noise *= .3
        else: noise *= .5 if "emb" in key or "lm_head" in key or "wte" in key else 1.4*p.shape[-1]**-.5
        if "norm" in key and not key.endswith("bias") and not name.startswith("Gemma") or ".ln_" in key and key.endswith("weight"):
            noise += 1
        p.data.copy_(noise)
    return model


def saved(model, path, **fields):
    "Its folder, with fields of the config changed; those that are ... are taken out"
    model.save_pretrained(path)
    file = Path(path)/"config.json"
    meta = {key: x for key, x in (json.loads(file.read_text()) | fields).items() if x is not ...}
    file.write_text(json.dumps(meta))
    return path


@cache
def ours_config(case):
    "What we read in the config of a case"
    name, kw = CASES[case]
    meta = getattr(hf, CONFIGS.get(name, f"{name}Config"))(**kw).to_dict()
    return config_from(meta | dict(architectures=[CLASSES.get(name, f"{name}ForCausalLM")]))


def ids_of(n=T): return torch.randint(0, 80, (n,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def paged(model, ids, name="torch", sizes=(1, 2, 5, 11), B=4):
    "Logits of one sequence that comes in chunks, its blocks scattered over memory that was NaN; another one decodes beside it"
    backend, M = load_backend(name), cdiv(len(ids), B)
    tables = torch.randperm(2*M, generator=torch.Generator().manual_seed(2)).view(2, M).int() + 1
    cache, at, out = backend.new_cache(model.config, 2*M + 1, B, model.dtype), [0, 0], []
    cache.fill(float("nan"))
    while at[0] < len(ids):
        n = [min(sizes[len(out) % len(sizes)], len(ids) - at[0]), 1]
        p = [torch.arange(a, a + k) for a, k in zip(at, n)]
        slots = torch.cat([t[x//B]*B + x % B for t, x in zip(tables.long(), p)]).int()
        ends = [a + k for a, k in zip(at, n)]
        meta = AttnMeta(tables, torch.tensor(ends, dtype=torch.int32), torch.tensor([0, n[0], n[0] + 1], dtype=torch.int32),
                        slots, torch.cat(p), n, ends)
        hidden = model(torch.cat([ids[x] for x in p]), Paged(backend, cache, meta))
        out.append(hidden[:-1])
        at = ends
    return model.logits(torch.cat(out))


@torch.inference_mode()
def check(model, reference, n=T, atol=1e-4, backends=("torch", "reference")):
    ids = ids_of(n)
    want = reference(ids[None]).logits[0]
    assert .3 < want.std() < 30
    worst = {"dense": model.logits(model(ids, Dense()))} | {name: paged(model, ids, name) for name in backends}
    worst = {name: (x - want).abs().max().item() for name, x in worst.items()}
    assert max(worst.values()) < atol, worst
    return max(worst.values())


@pytest.mark.parametrize("case", CASES)
def test_family(tmp_path, case):
    reference = theirs(*CASES[case])
    model = loaded(saved(reference, tmp_path))
    assert model.config.family == case.split()[0]
    check(model, reference)


FLAGS = "embed_scale attn_scale attn_softcap logit_softcap windows local_rope_theta no_rope act norm_topk rope_theta rope_scaling norm_eps".split()


@pytest.mark.parametrize("case", CASES)
def test_every_difference_matters(tmp_path, case):
    "As Llama has it, each flag of a family gives other logits: what is checked above is noticed"
    reference = theirs(*CASES[case])
    right = loaded(saved(reference, tmp_path))
    odd = {f: ModelConfig.__dataclass_fields__[f].default for f in FLAGS}
    odd = {f: x for f, x in odd.items() if getattr(right.config, f) != x and (f != "rope_theta" or right.config.positions == "rope")}
    with torch.inference_mode():
        want = right.logits(right(ids_of(), Dense()))
        for f, x in odd.items():
            wrong = loaded(tmp_path, **{f: x})
            assert (wrong.logits(wrong(ids_of(), Dense())) - want).abs().max() > 1e-3, f
    print(*odd)


# ---- rotary positions

ROPES = {
    "default": dict(rope_theta=700.), "linear": dict(factor=4., rope_theta=1e4), "dynamic": dict(factor=4.),
    "llama3": dict(factor=4., low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=16),
    "yarn": dict(factor=4., original_max_position_embeddings=16),
    "yarn gain": dict(factor=4., original_max_position_embeddings=16, attention_factor=1.3, beta_fast=8., beta_slow=.5),
    "yarn mscale": dict(factor=4., original_max_position_embeddings=16, mscale=.7, mscale_all_dim=1.2, truncate=False),
    "longrope": dict(original_max_position_embeddings=16, short_factor=[1., 1.1, 1.2, 1.3, 1.4], long_factor=[1., 1.5, 2., 3., 5.]),
    "longrope gain": dict(original_max_position_embeddings=16, factor=6., attention_factor=1.2,
                          short_factor=[1., 1.1, 1.2, 1.3, 1.4], long_factor=[1., 1.5, 2., 3., 5.]),
}


def rope_model(kind, **kw):
    rope = dict(rope_theta=100., rope_type=kind.split()[0]) | ROPES[kind]
    return rope, theirs("Llama", SMALL | dict(rope_parameters=dict(rope), max_position_embeddings=15 if kind in ("linear", "dynamic") else 64) | kw)


@pytest.mark.parametrize("spelling", ["new", "old"])
@pytest.mark.parametrize("kind", ROPES)
def test_rope(tmp_path, kind, spelling):
    rope, reference = rope_model(kind)
    old = dict(rope_parameters=..., rope_theta=rope["rope_theta"], rope_scaling={k: x for k, x in rope.items() if k != "rope_theta"})
    model = loaded(saved(reference, tmp_path, **old if spelling == "old" else {}))
    check(model, reference, backends=["torch"])
    assert model.config.max_len == (60 if kind in ("linear", "dynamic") else 64)


@pytest.mark.parametrize("kind,max_len", [("dynamic", 40), ("dynamic", 12), ("longrope", 16), ("longrope", 40)])
def test_speeds_follow_the_longest_sequence(tmp_path, kind, max_len):
    "What transformers chooses for a text of that length, we choose for an engine of that length"
    reference = rope_model(kind)[1]
    check(loaded(saved(reference, tmp_path), max_len=max_len), reference, n=max_len, backends=["torch"])


@pytest.mark.parametrize("change,words", {
    "type": (dict(rope_type="mrope"), "rope type 'mrope' is not supported, only default, linear"),
    "odd": (dict(rope_type="linear", factor=2., beta_fast=2.), "'linear' has no parameter beta_fast"),
    "missing": (dict(rope_type="llama3", factor=2.), "'llama3': missing, or no number: 'original_max_position_embeddings'"),
    "text": (dict(rope_type="linear", factor="2"), "'linear': missing, or no number"), "none": (dict(rope_type="linear"), "'linear': missing, or no number"),
    "partial": (dict(rope_type="default", partial_rotary_factor=.5), "partial_rotary_factor")}.values())
def test_rope_refused(change, words):
    meta = dict(architectures=["LlamaForCausalLM"], **SMALL) | dict(rope_scaling=change)
    with pytest.raises(ValueError, match=words):
        config_from(meta)


# ---- configs

def test_an_unknown_architecture():
    with pytest.raises(ValueError) as e:
        config_from(SMALL | dict(architectures=["MambaForCausalLM"]))
    assert all(name in str(e.value) for f in families.values() for name in ("MambaForCausalLM", *f.architectures))


ODD = {"llama": dict(sliding_window=8), "qwen2": dict(attn_logit_softcapping=5.), "qwen3": dict(layer_types=["chunked_attention"]*3),
       "qwen3_moe": dict(mlp_only_layers=[1]), "mixtral": dict(shared_expert_intermediate_size=8), "gemma2": dict(hidden_activation="relu"),
       "gemma3": dict(use_bidirectional_attention=True), "olmo2": dict(clip_qkv=8.), "smollm3": dict(residual_multiplier=.5),
       "gpt2": dict(scale_attn_by_inverse_layer_idx=True), "mistral": dict(quantization_config=dict(quant_method="fp8"))}


@pytest.mark.parametrize("name", families)
def test_what_nobody_reads_is_refused(name, tmp_path):
    config = theirs(*CASES[name]).config
    config.architectures = list(families[name].architectures)
    config.save_pretrained(tmp_path)
    meta = json.loads((tmp_path/"config.json").read_text())
    assert config_from(meta).family == name
    (key, value), = ODD[name].items()
    with pytest.raises(ValueError, match=key if key != "hidden_activation" else "relu") as e:
        config_from(meta | {key: value})
    print(e.value)


PUBLISHED = {  # what the model's config.json says, and how many parameters it is known to have
    "Llama-2-7B": (6_738_415_616, dict(
        architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000,
        num_key_value_heads=32, rms_norm_eps=1e-5, hidden_act="silu", max_position_embeddings=4096, tie_word_embeddings=False, rope_scaling=None)),
    "Llama-3.1-8B": (8_030_261_248, dict(
        architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, vocab_size=128256,
        num_key_value_heads=8, rms_norm_eps=1e-5, hidden_act="silu", max_position_embeddings=131072, tie_word_embeddings=False, rope_theta=500000.0,
        rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3"))),
    "Llama-3.2-1B": (1_235_814_400, dict(
        architectures=["LlamaForCausalLM"], hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, vocab_size=128256,
        num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, hidden_act="silu", max_position_embeddings=131072, tie_word_embeddings=True,
        rope_theta=500000.0, rope_scaling=dict(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
                                               rope_type="llama3"))),
    "Qwen2.5-7B": (7_615_616_512, dict(
        architectures=["Qwen2ForCausalLM"], hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, vocab_size=152064,
        num_key_value_heads=4, rms_norm_eps=1e-6, hidden_act="silu", max_position_embeddings=131072, max_window_layers=28, rope_theta=1000000.0,
        sliding_window=131072, use_sliding_window=False, use_mrope=False, tie_word_embeddings=False)),
    "Qwen3-8B": (8_190_735_360, dict(
        architectures=["Qwen3ForCausalLM"], hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, vocab_size=151936,
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, hidden_act="silu", max_position_embeddings=40960, max_window_layers=36,
        rope_theta=1000000, rope_scaling=None, sliding_window=None, use_sliding_window=False, tie_word_embeddings=False, attention_bias=False)),
    "Gemma-2-9B": (9_241_705_984, dict(
        architectures=["Gemma2ForCausalLM"], hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16, vocab_size=256000,
        num_key_value_heads=8, head_dim=256, rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192,
        query_pre_attn_scalar=256, sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, rope_theta=10000.0)),
    "Gemma-3-1B": (999_885_952, dict(
        architectures=["Gemma3ForCausalLM"], hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4, vocab_size=262144,
        num_key_value_heads=1, head_dim=256, rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=32768,
        query_pre_attn_scalar=256, sliding_window=512, sliding_window_pattern=6, rope_theta=1000000, rope_local_base_freq=10000,
        attn_logit_softcapping=None, final_logit_softcapping=None, rope_scaling=None, cache_implementation="hybrid")),
    "OLMo-2-7B": (7_298_617_344, dict(
        architectures=["Olmo2ForCausalLM"], hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=100352,
        num_key_value_heads=32, rms_norm_eps=1e-6, hidden_act="silu", max_position_embeddings=4096, rope_theta=500000, rope_scaling=None,
        tie_word_embeddings=False, attention_bias=False)),
    "GPT-2 XL": (1_557_611_200, dict(
        architectures=["GPT2LMHeadModel"], n_embd=1600, n_layer=48, n_head=25, n_positions=1024, n_ctx=1024, vocab_size=50257,
        layer_norm_epsilon=1e-5, activation_function="gelu_new", summary_proj_to_labels=True, summary_activation=None)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    n, meta = PUBLISHED[name]
    config = config_from(meta)
    assert n_params(config) == n
    model = Transformer(config, device="meta")
    assert sum(p.numel() for p in model.parameters()) == n
    assert families[config.family].tensors(config).keys() == dict(model.named_parameters()).keys()


# ---- one more family

def fields(said):
    said("residual_multiplier"), said("logits_scaling")
    return dict(embed_scale=float(said("embedding_multiplier", 1)), attn_scale=float(said("attention_multiplier", 1)))


def weights(name, tensor, meta):
    if name.endswith(("o_proj.weight", "down_proj.weight")): return tensor*meta["residual_multiplier"]
    return tensor/meta["logits_scaling"] if name == "model.norm.weight" else tensor


def test_a_family_that_a_reader_adds(tmp_path, monkeypatch):
    monkeypatch.setitem(families, "granite", Family("granite", ("GraniteForCausalLM",), more=fields, adapt=weights))
    reference = theirs("Granite", SQUARE | dict(residual_multiplier=.4, logits_scaling=1.7, embedding_multiplier=3., attention_multiplier=.2))
    check(loaded(saved(reference, tmp_path)), reference)


def test_gpt2_as_it_was_first_published(tmp_path):
    "Names without a prefix, and masks among the weights"
    from safetensors.torch import load_file, save_file
    reference = theirs(*CASES["gpt2"])
    file = Path(saved(reference, tmp_path))/"model.safetensors"
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(file).items()}
    masks = {f"h.{l}.attn.bias": torch.ones(1, 1, 64, 64).tril() for l in range(3)}
    save_file({name: x for name, x in tensors.items() if name != "lm_head.weight"} | masks, file)
    check(loaded(tmp_path), reference, backends=[])


def test_norms_near_one_survive_16_bits(tmp_path):
    "1 + w is more than bfloat16 can say"
    reference = theirs(*CASES["gemma3"]).bfloat16()
    model = loaded(saved(reference, tmp_path), torch.bfloat16)
    w = reference.model.norm.weight.float() + 1
    assert model.dtype == torch.bfloat16 and torch.equal(model.norm.weight, w) and not torch.equal(w.bfloat16().float(), w)


# ---- the other back-ends

@pytest.mark.parametrize("name,case,n,sizes", [("triton", "gemma2", 13, (6, 1)), ("triton", "gemma3", 13, (6, 1)), ("triton", "smollm3", 7, (5, 1)),
                                               ("triton", "gpt2", 7, (5, 1)), ("fixed", "gemma2", 20, (1,)), ("fixed", "mistral", 20, (1,))])
def test_back_ends(tmp_path, monkeypatch, name, case, n, sizes):
    "Windows, caps, norms of heads, layers without positions: in kernels (interpreted), and in shapes that never change"
    monkeypatch.setitem(backends, "fixed", "pagedlm.graphs:FixedBackend")
    model = loaded(saved(theirs(*CASES[case]), tmp_path))
    ids = ids_of(n)
    with torch.inference_mode():
        want = model.logits(model(ids, Dense()))
    assert (paged(model, ids, name, sizes) - want).abs().max() < 1e-4


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("llama", "llama tied", "mistral no window")])
def test_the_compiled_step_says_what_it_does_not_know(case):
    pytest.importorskip("numba")
    from pagedlm.cpu_runner import unfit
    sizes = dict(width=64, head_dim=16, mlp_width=64, n_heads=4, n_kv_heads=2)
    why = unfit(Transformer(replace(ours_config(case), **sizes)))
    print(why)
    assert why and "multiple of" not in why
