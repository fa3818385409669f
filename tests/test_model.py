"The decoder against transformers' LlamaForCausalLM, in float64 to the last digits and in float32"
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from pagedlm.attention import Dense
from pagedlm.config import ModelConfig
from pagedlm.layers import rope_table
from pagedlm.model import Transformer

SHAPES = [(4, 2, 16, True), (4, 1, 32, False), (3, 3, 10, False), (8, 2, 6, True)] # H, Hk, D, tied


def theirs(H, Hk, D, tied):
    "A random Llama whose norm weights are not all 1"
    torch.manual_seed(H)
    config = LlamaConfig(
        vocab_size=300, hidden_size=48, num_hidden_layers=2, num_attention_heads=H, num_key_value_heads=Hk, head_dim=D, intermediate_size=80,
        tie_word_embeddings=tied, max_position_embeddings=256, initializer_range=.3, rms_norm_eps=1e-3, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).eval()
    for name, p in model.named_parameters():
        if p.dim() == 1: p.data.normal_(1, .2)
    return model


def ours(hf, dtype):
    "The same weights in our model, copied by name"
    c = hf.config
    config = ModelConfig(
        c.vocab_size, c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size,
        c.rms_norm_eps, max_len=c.max_position_embeddings, tied=c.tie_word_embeddings)
    w = hf.state_dict()
    def get(names): return torch.cat([w[f"{n}.weight"] for n in names.split()])
    mine = {"embed.weight": get("model.embed_tokens"), "norm.weight": get("model.norm")}
    if not config.tied: mine["head.weight"] = get("lm_head")
    for l in range(config.n_layers):
        p, a, m = f"model.layers.{l}.", f"model.layers.{l}.self_attn.", f"model.layers.{l}.mlp."
        parts = {"norm1": p + "input_layernorm", "attn.qkv": f"{a}q_proj {a}k_proj {a}v_proj", "attn.out": a + "o_proj",
                 "norm2": p + "post_attention_layernorm", "mlp.gate_up": f"{m}gate_proj {m}up_proj", "mlp.down": m + "down_proj"}
        mine |= {f"blocks.{l}.{name}.weight": get(names) for name, names in parts.items()}
    model = Transformer(config, dtype=dtype)
    model.load_state_dict(mine)
    return model


@pytest.fixture
def exact(monkeypatch):
    "transformers computes norms and angles in float32 even in a float64 model: let it do so in float64"
    def norm(self, x): return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)
    def angles(self, x, position_ids):
        D = self.config.head_dim
        speed = 10000. ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        angle = (position_ids[..., None] * speed).repeat(1, 1, 2)
        return angle.cos(), angle.sin()
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", angles)


@torch.inference_mode()
def distance(hf, dtype, T=100):
    "Largest difference of any logit"
    ids = torch.randint(0, 300, (T,), generator=torch.Generator().manual_seed(1))
    hf, model = hf.to(dtype), ours(hf, dtype)
    want = hf(ids[None]).logits[0]
    assert want.std() > .5
    return (model.logits(model(ids, Dense())) - want).abs().max().item()


@pytest.mark.parametrize("shape", SHAPES)
def test_float64(shape, exact): assert distance(theirs(*shape), torch.float64) < 1e-9


@pytest.mark.parametrize("shape", SHAPES)
def test_float32(shape): assert distance(theirs(*shape), torch.float32) < 1e-4


@pytest.mark.parametrize("theta", [10000., 500000.])
def test_angles(theta):
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=64, rope_parameters=dict(rope_type="default", rope_theta=theta))
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(300)[None])
    table = rope_table(64, 300, theta)
    assert (table - torch.cat([cos[0, :, :32], sin[0, :, :32]], -1)).abs().max() < 1e-4
