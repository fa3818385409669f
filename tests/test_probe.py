"""What is caught of a request is what one forward over its whole sequence has, however the engine cut and mixed it"""
from random import Random

import pytest
import torch

from pagedlm import LLM, SamplingParams
from pagedlm.attention import Dense, split_qkv, turn
from pagedlm.model import tiny_model
from pagedlm.probe import Hooks, attention_weights, capture, logit_lens, svg_heat, svg_lens
from pagedlm.tokenizer import ByteTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float64)


def make(model, backend="torch", **kw):
    return LLM(model, ByteTokenizer(), enforce_eager=True, attention_backend=backend, max_num_seqs=4, **kw)


def whole(model, ids):
    "Streams and attention weights of one forward, by hand"
    streams, looks = [model.embed(ids)], []

    def attn(layer, qkv, spec):
        q, k, _ = split_qkv(qkv, spec)
        at = torch.arange(len(ids))
        looks.append(attention_weights(turn(q, spec, at), turn(k, spec, at), at, spec.scale))
        return Dense()(layer, qkv, spec)

    x, residual = streams[0], None
    for layer, (block, spec) in enumerate(zip(model.blocks, model.specs)):
        x, residual = block(x, residual, attn, layer, spec)
        streams.append(x + residual)
    return torch.stack(streams), torch.stack(looks)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_chunks_neighbours_and_preemptions_change_nothing(model, backend, one_thread):
    rnd, n_preempted = Random(0), 0
    for i in range(6 if backend == "torch" else 2):
        llm = make(model, backend, block_size=rnd.randint(1, 4), max_num_batched_tokens=rnd.randint(4, 24),
                   num_gpu_blocks_override=rnd.choice([30, 60]), enable_prefix_caching=rnd.random() < .7)
        texts = ["".join(rnd.choice("abc ") for _ in range(rnd.randint(1, 16))) for _ in range(4)]
        plain = [o.outputs[0].token_ids for o in llm.generate(texts, GREEDY, use_tqdm=False)]
        params = GREEDY.clone()
        params.skip_reading_prefix_cache = True
        with llm.trace() as trace, Hooks(llm, None, request=str(4 + i % 4)) as h:
            outputs = llm.generate(texts, params, use_tqdm=False)
        n_preempted += any(name == "preempt" and f["request"] == h.request for _, name, f in trace.events)
        assert [o.outputs[0].token_ids for o in outputs] == plain
        o = outputs[i % 4]
        ids = torch.tensor((o.prompt_token_ids + o.outputs[0].token_ids)[:-1])
        streams, looks = whole(model, ids)
        torch.testing.assert_close(h.hidden, streams)
        caught = torch.stack([torch.stack([h.attention(layer, head) for head in range(4)]) for layer in range(2)])
        torch.testing.assert_close(caught, looks)
        assert llm.engine.run is h.runner and not any(m._forward_hooks for m in model.modules())
    assert backend == "reference" or n_preempted


def test_the_last_layer_of_the_lens_is_the_model(model):
    h = capture(make(model), "Hello", params=GREEDY)
    ids, chance = logit_lens(model, h.hidden, k=3)
    n = len(h.output.prompt_token_ids)
    assert ids[-1, n - 1:, 0].tolist() == h.output.outputs[0].token_ids[:len(h.ids) - n + 1]
    assert ids.shape == chance.shape == (3, len(h.ids), 3) and (chance.diff(dim=-1) <= 0).all()
    assert str(svg_lens(ids, chance, ByteTokenizer(), h.ids)).count("after layer") == 1


def test_nothing_stays_behind_when_something_fails(model):
    llm = make(model)
    backend = llm.engine.run.backend
    with pytest.raises(RuntimeError), Hooks(llm) as h:
        h.runner.rows.learn = None
        raise RuntimeError
    del h.runner.rows.learn
    assert llm.engine.run is h.runner and h.runner.backend is backend
    assert not any(m._forward_hooks for m in model.modules())
    assert llm.generate("Hello", GREEDY, use_tqdm=False)[0].finished


def test_what_cannot_be_watched_says_so(model):
    with pytest.raises(ValueError, match=r"head \(2, 0\), but there are 2 layers x 4"):
        Hooks(make(model), [(2, 0)])
    llm = make(model, block_size=4)
    llm.generate("Hello, hello", GREEDY, use_tqdm=False)
    with Hooks(llm) as h:
        llm.generate("Hello, hello", GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="12 positions were never computed, the first is 0"):
        h.hidden
    llm.engine.run = lambda plan: []
    with pytest.raises(ValueError, match="attention_backend='torch'"):
        Hooks(llm)


def test_a_heat_map_has_a_box_for_each_number_that_is_not_nothing():
    pic = str(svg_heat([[0, 1, .5], [.01, .2, 1]], names="ab", cols="xyz", note="a note"))
    assert pic.count("h13") == 4 and "a note" in pic
