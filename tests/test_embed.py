"Vectors and perplexities of prompts are those of one plain forward pass, whatever the engine does meanwhile"
import math

import pytest
import torch

from pagedlm.attention import Dense
from pagedlm.core import SamplingParams
from pagedlm.llm import LLM
from pagedlm.model import tiny_config, tiny_model
from pagedlm.tokenizer import ByteTokenizer

PROMPTS = [[i*7 % 256 for i in range(start, start + n)] for start, n in ((0, 3), (5, 40), (5, 41), (9, 1), (50, 17))]
WAYS = {"eager": dict(enforce_eager=True), "compiled": {}, "chunks": dict(enforce_eager=True, max_num_batched_tokens=7),
        "chunks, compiled": dict(max_num_batched_tokens=7),
        "preempted": dict(enforce_eager=True, num_gpu_blocks_override=13, block_size=4, max_num_batched_tokens=16)}


@pytest.fixture(scope="module")
def model():
    return tiny_model(tiny_config(mlp_width=128))


def make(model, way):
    return LLM(model, ByteTokenizer(), **WAYS[way])


@torch.inference_mode()
def hidden(model, ids):
    return model(torch.tensor(ids), Dense())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embed(model, way, pooling):
    llm = make(model, way)
    for again in range(2):  # the second time with a warm cache
        outs = llm.embed(PROMPTS, pooling=pooling, normalize=False, use_tqdm=False)
        for prompt, o in zip(PROMPTS, outs):
            want = hidden(model, prompt)[-1] if pooling == "last" else hidden(model, prompt).mean(0)
            assert torch.allclose(torch.tensor(o.outputs.embedding), want, atol=2e-2 if way in ("compiled", "chunks, compiled") else 1e-5)
            assert o.prompt_token_ids == prompt and o.finished and o.num_cached_tokens <= len(prompt)
            assert pooling == "last" or o.num_cached_tokens == 0
    assert llm.engine.run.watch is None
    (unit,) = llm.embed(PROMPTS[1], pooling=pooling, use_tqdm=False)
    assert math.isclose(sum(x*x for x in unit.outputs.embedding), 1, rel_tol=1e-5)


def test_moved_weights():
    "Where the compiled step took the weights away from the model, its own norm is left, and enough"
    from pagedlm.weights import default_model
    llm = LLM(default_model(), max_num_batched_tokens=16)
    assert llm.model.blocks[0].attn.qkv.parts[0].q.is_meta
    text = "The old garden behind the house had been left alone for years."
    (last,), (mean,) = (llm.embed(text, pooling=p, use_tqdm=False) for p in ("last", "mean"))
    eager = LLM(default_model(), enforce_eager=True)
    for o, pooling in ((last, "last"), (mean, "mean")):
        want = torch.tensor(eager.embed(text, pooling=pooling, use_tqdm=False)[0].outputs.embedding)
        assert torch.tensor(o.outputs.embedding) @ want > .995


def test_beside_other_work(model):
    "A request that was there before goes on, and is not taken for one of ours"
    llm = make(model, "chunks")
    other = llm.texts.add(dict(prompt_token_ids=PROMPTS[1]), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    llm.texts.step()
    (o,) = llm.embed([PROMPTS[4]], normalize=False, use_tqdm=False)
    assert torch.allclose(torch.tensor(o.outputs.embedding), hidden(model, PROMPTS[4])[-1], atol=1e-5)
    for _ in llm.texts.run([other]):
        pass
    alone = make(model, "eager").generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    assert other.output().outputs[0].token_ids == alone[0].outputs[0].token_ids


@pytest.mark.parametrize("way", WAYS)
def test_perplexity(model, way):
    llm = make(model, way)
    for prompt in PROMPTS[1:3]:
        logp = model.logits(hidden(model, prompt)[:-1]).log_softmax(-1)
        want = (-logp.gather(1, torch.tensor(prompt[1:])[:, None]).mean()).exp().item()
        assert math.isclose(llm.perplexity(prompt), want, rel_tol=.03 if "compiled" in way else 1e-4)
    both = llm.perplexity(PROMPTS[1:3])
    assert both == pytest.approx([llm.perplexity(p) for p in PROMPTS[1:3]], rel=1e-4)


def test_refused(model):
    llm = make(model, "eager")
    with pytest.raises(ValueError, match="pooling='max', but there is only last, mean"):
        llm.embed("a", pooling="max")
    with pytest.raises(ValueError, match="text 1 has 1 token, but a perplexity needs at least 2"):
        llm.perplexity([[1, 2], [3]])
    with pytest.raises(ValueError, match="prompt 0"):
        llm.embed([list(range(200))*2])
    assert llm.engine.run.watch is None and not llm.texts.answers
