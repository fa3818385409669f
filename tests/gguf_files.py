"Tiny models of each family that GGUF has, by transformers, and their files as llama.cpp's converter writes them"
import math
from typing import NamedTuple

import gguf
import numpy as np
import torch
import transformers as tf
from gguf.quants import dequantize, quantize

COMMON = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=2, head_dim=32, max_position_embeddings=128, rms_norm_eps=1e-5,
              bos_token_id=1, eos_token_id=2, pad_token_id=0)
PLAIN = dict(rope_type="default", rope_theta=5000.0)
LLAMA3 = dict(rope_type="llama3", rope_theta=5000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
GEMMA = dict(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=32, sliding_window=8)


class Case(NamedTuple):
    "A family, as transformers and as GGUF know it"
    config:type
    model:type
    arch:str          # in a GGUF
    changes:dict = {} # of `COMMON`


CASES = {
    "llama": Case(tf.LlamaConfig, tf.LlamaForCausalLM, "llama", dict(rope_parameters=PLAIN, tie_word_embeddings=False)),
    "llama with biases": Case(tf.LlamaConfig, tf.LlamaForCausalLM, "llama", dict(
        rope_parameters=PLAIN, attention_bias=True, tie_word_embeddings=True)),
    "llama 3": Case(tf.LlamaConfig, tf.LlamaForCausalLM, "llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "mistral": Case(tf.MistralConfig, tf.MistralForCausalLM, "llama", dict(rope_parameters=PLAIN, sliding_window=None)),
    "mixtral": Case(tf.MixtralConfig, tf.MixtralForCausalLM, "llama", dict(
        rope_parameters=PLAIN, sliding_window=None, num_local_experts=5, num_experts_per_tok=2)),
    "qwen2": Case(tf.Qwen2Config, tf.Qwen2ForCausalLM, "qwen2", dict(
        rope_parameters=PLAIN, head_dim=16, tie_word_embeddings=True, use_sliding_window=False)),
    "qwen3": Case(tf.Qwen3Config, tf.Qwen3ForCausalLM, "qwen3", dict(rope_parameters=PLAIN, tie_word_embeddings=True)),
    "qwen3moe": Case(tf.Qwen3MoeConfig, tf.Qwen3MoeForCausalLM, "qwen3moe", dict(
        rope_parameters=PLAIN, moe_intermediate_size=32, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True)),
    "gemma2": Case(tf.Gemma2Config, tf.Gemma2ForCausalLM, "gemma2", GEMMA | dict(
        rope_parameters=PLAIN | dict(rope_theta=10000.0), attn_logit_softcapping=5.0, final_logit_softcapping=3.0)),
    "gemma3": Case(tf.Gemma3TextConfig, tf.Gemma3ForCausalLM, "gemma3", GEMMA | dict(
        num_hidden_layers=7, rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1e6),
                                                  sliding_attention=dict(rope_type="default", rope_theta=1e4)))),
    "gpt2": Case(tf.GPT2Config, tf.GPT2LMHeadModel, "gpt2", dict(
        n_embd=64, n_layer=3, n_head=4, n_positions=128, n_inner=None)),
    "olmo2": Case(tf.Olmo2Config, tf.Olmo2ForCausalLM, "olmo2", dict(rope_parameters=PLAIN, head_dim=16)),
    "smollm3": Case(tf.SmolLM3Config, tf.SmolLM3ForCausalLM, "smollm3", dict(
        rope_parameters=PLAIN, num_hidden_layers=5, head_dim=16, tie_word_embeddings=True, use_sliding_window=False)),
}
IDS = torch.tensor(np.random.default_rng(0).integers(0, 300, 40))


def build(name, seed=0, **changes):
    "A model with random weights, norms and biases too: nothing in it is like anything else"
    case = CASES[name]
    said = COMMON | case.changes | changes
    if name == "gpt2":
        said = {k: v for k, v in said.items() if k.startswith("n_") or k in ("vocab_size", "bos_token_id", "eos_token_id")}
    model = case.model(case.config(**said)).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            x, narrow = torch.randn(p.shape, generator=rng), p.dim() == 1
            offset = 0 if key.endswith("bias") or case.arch.startswith("gemma") or not narrow else 1
            p.copy_(offset + x/4 if narrow else x/p.shape[-1]**.5)
    return model


@torch.inference_mode()
def logits(model):
    return model(IDS[None]).logits[0]


# ---- writing, after convert_hf_to_gguf.py

def permute(w, heads):
    return w.reshape(heads, 2, w.shape[0]//heads//2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def fields(w, arch, c):
    "The metadata that the converter writes for this family"
    if arch == "gpt2":
        w.add_context_length(c.n_positions), w.add_embedding_length(c.n_embd), w.add_block_count(c.n_layer)
        w.add_feed_forward_length(4*c.n_embd), w.add_head_count(c.n_head), w.add_layer_norm_eps(c.layer_norm_epsilon)
        return
    w.add_context_length(c.max_position_embeddings), w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers), w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads), w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    if getattr(c, "head_dim", None):
        w.add_key_length(c.head_dim), w.add_value_length(c.head_dim)
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    if arch != "gemma2":
        w.add_rope_freq_base(rope["rope_theta"])
    if arch in ("llama", "smollm3"):
        w.add_rope_dimension_count(c.head_dim), w.add_vocab_size(c.vocab_size)
    if arch == "gemma2":
        w.add_attn_logit_softcapping(c.attn_logit_softcapping), w.add_final_logit_softcapping(c.final_logit_softcapping)
    if arch.startswith("gemma"):
        w.add_sliding_window(c.sliding_window)
    if n := getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None):
        w.add_expert_count(n), w.add_expert_used_count(c.num_experts_per_tok)
        if arch == "qwen3moe":
            w.add_expert_feed_forward_length(c.moe_intermediate_size)


def tensors(model, arch):
    "(name in the GGUF, numbers) as the converter makes them"
    c = model.config
    table = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), c.num_hidden_layers)
    for name, p in model.named_parameters():
        x, part = p.detach().numpy(), name.split(".")[-2]
        if name.endswith("experts.gate_up_proj"):
            l = name.split(".")[2]
            yield f"blk.{l}.ffn_gate_exps.weight", x[:, :x.shape[1]//2]
            yield f"blk.{l}.ffn_up_exps.weight", x[:, x.shape[1]//2:]
            continue
        if name.endswith("experts.down_proj"):
            yield f"blk.{name.split('.')[2]}.ffn_down_exps.weight", x
            continue
        if arch in ("llama", "smollm3") and part in ("q_proj", "k_proj"):
            x = permute(x, c.num_attention_heads if part == "q_proj" else c.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            x = x + 1
        if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            x = x.T
        ours = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if ours is None and ".gate." in name:  # a router, which the table knows by older names
            ours = f"blk.{name.split('.')[2]}.ffn_gate_inp.weight"
        assert ours, name
        yield ours, np.ascontiguousarray(x)
    rope = getattr(c, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(rope, c.head_dim)


def llama3_factors(rope, D):
    out = []
    for i in range(0, D, 2):
        length = 2*math.pi*rope["rope_theta"]**(i/D)
        low, high = (rope["original_max_position_embeddings"]/rope[f"{end}_freq_factor"] for end in ("low", "high"))
        smooth = (rope["original_max_position_embeddings"]/length - rope["low_freq_factor"])/(
            rope["high_freq_factor"] - rope["low_freq_factor"])
        middle = 1/((1 - smooth)/rope["factor"] + smooth)
        out.append(1 if length < high else rope["factor"] if length > low else middle)
    return np.array(out, np.float32)


def write(model, name, path, kind="F32", vocabulary=None):
    "The model as a GGUF, its matrices rounded as `kind` says"
    arch = CASES[name].arch
    w = gguf.GGUFWriter(path, arch)
    fields(w, arch, model.config)
    (vocabulary or (lambda w: None))(w)
    for ours, x in tensors(model, arch):
        q = gguf.GGMLQuantizationType[kind if x.ndim > 1 and "norm" not in ours and "gate_inp" not in ours
                                      and x.shape[-1] % 32 == 0 and "position" not in ours else "F32"]
        w.add_tensor(ours, quantize(np.ascontiguousarray(x), q), raw_dtype=q)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    return path


def rounded(model, kind):
    "The same model with its matrices rounded as `write` rounds them; rows are rounded one by one, so their order is free"
    q = gguf.GGMLQuantizationType[kind]
    transposed = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2 or "norm" in name or name.endswith((".gate.weight", "wpe.weight")):
                continue
            x = p.T if name.endswith(transposed) else p
            x = torch.from_numpy(np.array(dequantize(quantize(np.ascontiguousarray(x.numpy()), q), q)))
            p.copy_(x.T if name.endswith(transposed) else x)
    return model
