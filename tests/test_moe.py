"A mixture of experts is transformers' mixture, however its tokens are sorted, packed or alone"
import numpy as np
import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from pagedlm.layers import act_mul
from pagedlm.model import tiny_config, tiny_model
from pagedlm.moe import MoE, by_expert, route
from pagedlm.quant import QLinear, pack


def tiny(dtype=torch.float64, **changes):
    "A layer with random weights, and tokens for it"
    config = tiny_config(**dict(n_experts=6, n_active=3, mlp_width=40) | changes)
    moe, rng = MoE(config, dtype=dtype), torch.Generator().manual_seed(0)
    for p in moe.parameters():
        p.copy_(torch.randn(p.shape, generator=rng) / p.shape[1]**.5)
    return moe, torch.randn(33, config.width, generator=rng).to(dtype)


def by_hand(moe, x):
    "Token by token, expert by expert"
    F, out = moe.down.weight.shape[1], torch.zeros_like(x)
    for t, row in enumerate(x):
        p = (moe.router.weight @ row).softmax(0)
        best = sorted(range(moe.E), key=lambda e: (-p[e].item(), e))[:moe.router.k]
        whole = sum(p[e] for e in best) if moe.router.norm else 1
        for e in best:
            up, down = moe.gate_up.weight[2*F*e:2*F*(e + 1)], moe.down.weight[len(row)*e:len(row)*(e + 1)]
            out[t] += p[e]/whole * (down @ act_mul((up @ row)[None])[0])
    return out


@pytest.mark.parametrize("E,k", [(1, 1), (2, 1), (6, 3), (6, 6), (64, 2)])
@pytest.mark.parametrize("norm", [True, False])
def test_equals_the_formula(E, k, norm):
    moe, x = tiny(n_experts=E, n_active=k, norm_topk=norm)
    want = by_hand(moe, x)
    for T in (1, 2, 33):
        assert (moe(x[:T]) - want[:T]).abs().max() < 1e-12


def filled(theirs, moe):
    "transformers' block with the weights of ours"
    F, C = moe.down.weight.shape[1], moe.down.weight.shape[0]//moe.E
    with torch.no_grad():
        theirs.gate.weight.copy_(moe.router.weight)
        theirs.experts.gate_up_proj.copy_(moe.gate_up.weight.view(moe.E, 2*F, C))
        theirs.experts.down_proj.copy_(moe.down.weight.view(moe.E, C, F))
    return theirs.double().eval()


@pytest.mark.parametrize("norm", [True, False])
def test_qwen3(norm):
    moe, x = tiny(norm_topk=norm)
    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=40, num_experts=6, num_experts_per_tok=3, norm_topk_prob=norm)
    got = filled(Qwen3MoeSparseMoeBlock(config), moe)(x[None])
    got = got[0] if isinstance(got, tuple) else got
    assert (moe(x) - got[0]).abs().max() < 1e-6  # their weights of experts are float32


def test_mixtral():
    moe, x = tiny()
    config = MixtralConfig(hidden_size=64, intermediate_size=40, num_local_experts=6, num_experts_per_tok=3)
    got = filled(MixtralSparseMoeBlock(config), moe)(x[None])
    got = got[0] if isinstance(got, tuple) else got
    assert (moe(x) - got[0]).abs().max() < 1e-6


def test_nobody_is_dropped():
    "Everyone wants the same experts, and gets them"
    moe, x = tiny()
    moe.router.weight.zero_()
    assert moe.router(x)[1].unique().tolist() == [0, 1, 2]
    assert (moe(x) - by_hand(moe, x)).abs().max() < 1e-12


def test_ties_go_to_the_first():
    weights, experts = route(torch.zeros(3, 9), 4)
    assert experts.tolist() == [[0, 1, 2, 3]]*3 and weights.eq(.25).all()


def test_same_bits_twice_and_alone():
    "Sums have an order; a token's experts and weights do not depend on its neighbours"
    moe, x = tiny(torch.float32)
    assert torch.equal(moe(x), moe(x))
    alone = torch.cat([moe.router(row[None])[1] for row in x])
    assert torch.equal(alone, moe.router(x)[1])
    assert torch.allclose(torch.cat([moe(row[None]) for row in x]), moe(x), atol=1e-5)


@pytest.mark.parametrize("counts", [[0, 0, 5], [5, 0, 0], [1, 3, 1], [0, 5, 0]])
def test_runs(counts):
    moe, x = tiny(n_experts=3, n_active=1)
    got = by_expert(moe.gate_up, x[:5], torch.tensor(counts))
    owners = [e for e, n in enumerate(counts) for _ in range(n)]
    assert torch.equal(got, torch.stack([moe.gate_up.weight[80*e:80*(e + 1)] @ row for e, row in zip(owners, x)])) or (
        got - torch.stack([moe.gate_up.weight[80*e:80*(e + 1)] @ row for e, row in zip(owners, x)])).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["int8", "Q4_1"])
def test_packed(kind):
    "Experts are rows of a packed matrix: the same numbers as that matrix unpacked, but for rounded activations"
    model = tiny_model(tiny_config(n_experts=4, n_active=2, mlp_width=64))
    packed = pack(tiny_model(tiny_config(n_experts=4, n_active=2, mlp_width=64)), kind)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    for block, plain in zip(packed.blocks, model.blocks):
        assert isinstance(block.mlp.gate_up, QLinear) and block.mlp.router.weight.equal(plain.mlp.router.weight)
        for name in "gate_up", "down":
            (part,) = getattr(block.mlp, name).parts
            getattr(plain.mlp, name).weight.copy_(part.unpack())
        want, got = plain.mlp(x), block.mlp(x)
        assert (got - want).norm() < .02*want.norm()


def test_through_the_engine():
    "Chunks, batches, sorted by expert: the ids of one full forward at a time"
    from pagedlm.core import SamplingParams
    from pagedlm.llm import LLM
    from pagedlm.sampling import generate_naive
    from pagedlm.tokenizer import ByteTokenizer
    model = tiny_model(tiny_config(n_experts=8, n_active=2, mlp_width=32), dtype=torch.float64)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = LLM(model, ByteTokenizer(), max_num_batched_tokens=7, num_gpu_blocks_override=40)
    prompts = [list(np.random.default_rng(i).integers(0, 256, 5 + 6*i)) for i in range(4)]
    for prompt, o in zip(prompts, llm.generate(prompts, greedy, use_tqdm=False)):
        assert o.outputs[0].token_ids == generate_naive(model, [int(i) for i in prompt], greedy)
