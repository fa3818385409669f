"Everything a request may ask for x everything that may happen to it x every runner: always the answer that it gets alone"
from collections import Counter
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from test_graphs import Late, Replayed
from test_oracle import Real, model_of, naive

from pagedlm.attention import Dense
from pagedlm.core import SamplingParams, StructuredOutputsParams
from pagedlm.choose import request_processors
from pagedlm.runner import Runner
from pagedlm.sampling import bits_of
from pagedlm.scheduler import policies

pytestmark = pytest.mark.usefixtures("one_thread")
V, PROMPT = 64, [i*i % 64 for i in range(3, 13)]
HOT = dict(temperature=1.0, seed=5)
ODD = dict(structured_outputs=StructuredOutputsParams(regex="odd and even ids in turn"))
FEATURES = {  # name: parameters
    "greedy": {}, "seed": HOT, "top_k": HOT | dict(top_k=5), "top_p": HOT | dict(top_p=.7), "min_p": HOT | dict(min_p=.1),
    "all filters": HOT | dict(temperature=1.5, top_k=30, top_p=.9, min_p=.02),
    "repetition": dict(repetition_penalty=1.6), "repetition below 1": dict(repetition_penalty=.7),
    "presence": dict(presence_penalty=1.5), "frequency": dict(frequency_penalty=1.0), "rewards": dict(presence_penalty=-1, frequency_penalty=-.5),
    "all penalties, seed": HOT | dict(repetition_penalty=1.2, presence_penalty=.5, frequency_penalty=.5, top_p=.9),
    "bias": dict(logit_bias={5: 3.0, 62: -100.0, 24: -2.5}), "bias, repetition": dict(logit_bias={5: 8.0}, repetition_penalty=1.5),
    "bad word": dict(bad_word_ids=[[w] for w in range(0, 40, 2)]),
    "long bad words": dict(bad_word_ids=[[a, b] for a in range(64) for b in range(0, 64, 3)] + [[1, 2, 3]]),
    "allowed": dict(allowed_token_ids=[3, 9, 27, 63]), "allowed, seed": HOT | dict(allowed_token_ids=[*range(0, 64, 5)]),
    "min_tokens": dict(min_tokens=9, eos=range(40)), "min_tokens, seed": HOT | dict(min_tokens=4, stop_token_ids=[*range(30)], eos=range(50, 60)),
    "stop_token_ids": dict(stop_token_ids=[*range(20)]), "eos": dict(eos=range(30)),
    "max_tokens 1": dict(max_tokens=1), "no cache": dict(skip_reading_prefix_cache=True),
    "logprobs 0": dict(logprobs=0), "logprobs 3": HOT | dict(logprobs=3), "all logprobs": dict(logprobs=-1),
    "prompt_logprobs": dict(prompt_logprobs=2), "both logprobs": HOT | dict(prompt_logprobs=0, logprobs=4),
    "logprobs beside penalties": dict(logprobs=2, repetition_penalty=1.5, logit_bias={4: 2.0}),
    "processor": dict(extra_args=dict(step=7)), "grammar": ODD, "grammar, allowed, logprobs": ODD | dict(allowed_token_ids=[2, 4, 5, 6, 7], logprobs=1, seed=3, temperature=1.0),
}
MINE = {"processor", "grammar", "grammar, allowed, logprobs"}  # the oracle does not know these


class Step:
    "A logits processor: each id may differ from the last by at most `step`"
    def new_req_logits_processor(self, params):
        step = (params.extra_args or {}).get("step")
        if step is None:
            return None

        def near(prompt, answer, logits):
            last, ids = [*prompt, *answer][-1], torch.arange(len(logits))
            return logits.masked_fill((ids - last).abs() > step, -torch.inf)
        return near


def grammar(params):
    masks = bits_of(range(0, V, 2), V), bits_of(range(1, V, 2), V)
    return lambda answer: masks[len(answer) % 2]


CHOOSES = dict(processors=request_processors([Step]), grammar=grammar)


class Plain(Real):
    def runner_of(self, scheduler):
        pool = self.manager.pool
        runner = Runner(self.model, self.backend, pool.n_blocks, self.manager.block_size, scheduler.max_num_seqs,
                        scheduler.limit, **CHOOSES)
        runner.cache.fill(float("nan"))
        return runner


class Graphs(Replayed):
    "Decodes from a tape, a step ahead, with ids that come late"
    def __init__(self, model, **shape):
        kind = self.kind_of()
        super().__init__(model, wire=Late, kind=kind, **dict(ahead=1) | shape)

    def kind_of(self):
        from test_graphs import Counting
        return lambda *args, **kw: Counting(*args, **kw | CHOOSES)


class Compiled(Real):
    "The whole step as one compiled function"
    def runner_of(self, scheduler):
        from pagedlm.cpu_runner import CpuRunner
        sizes = self.manager.pool.n_blocks, self.manager.block_size, scheduler.max_num_seqs, scheduler.limit
        return CpuRunner(self.model, *sizes, kv_dtype=torch.float32, **CHOOSES)


RUNNERS = {"Runner": Plain, "Runner, ahead": lambda model, **shape: Plain(model, **dict(ahead=2) | shape), "GraphRunner": Graphs}
if find_spec("pagedlm.cpu_runner") and find_spec("llvmlite"):
    RUNNERS["CpuRunner"] = Compiled


def add(world, feature, prompt=None, **kw):
    f = dict(FEATURES[feature])
    f = dict(max_tokens=12, temperature=0, eos_ids=tuple(f.pop("eos", ())), ignore_eos=False) | f | kw
    if "bad_word_ids" in f:
        f["bad_words"] = ["…"]
    return world.add(PROMPT if prompt is None else prompt, **f)


def others(world, feature, n=3):
    "Requests that want something else"
    names = [*FEATURES]
    i = names.index(feature)
    for j in range(1, n + 1):
        add(world, names[(i + 7*j) % len(names)], [(x + 3*j) % V for x in PROMPT[:3 + 2*j]])


def alone(make, model, feature):
    world = make(model, n_blocks=40)
    return world, add(world, feature)


def mixed(make, model, feature):
    world = make(model, n_blocks=60)
    others(world, feature, 1)
    world.step()
    r = add(world, feature)
    others(world, feature, 2)
    return world, r


def preempted(make, model, feature):
    "Twice, by somebody more urgent: between two tokens, and a little later"
    world = make(model, n_blocks=14, max_num_seqs=1, policy=policies["priority"])
    r = add(world, feature, priority=1)
    for steps in 3, 4:
        for _ in range(steps):
            world.step()
        add(world, "greedy", [steps]*25, priority=0, max_tokens=2)
    return world, r


def chunked(make, model, feature):
    world = make(model, n_blocks=60, max_chunk=3)
    r = add(world, feature)
    others(world, feature, 1)
    return world, r


def prefix_hit(make, model, feature):
    world = make(model, n_blocks=60)
    add(world, "greedy", max_tokens=1)
    world.drain()
    return world, add(world, feature)


def forgotten(make, model, feature):
    "The runner loses all it knows, again and again"
    world = make(model, n_blocks=60)
    r = add(world, feature)
    others(world, feature, 1)
    for steps in 1, 2, 3:
        for _ in range(steps):
            world.step()
        world.lose_rows()
    return world, r


def shared(make, model, feature):
    "Beside its twin"
    world = make(model, n_blocks=60)
    add(world, feature)
    return world, add(world, feature)


SITUATIONS = [alone, mixed, preempted, chunked, prefix_hit, forgotten, shared]


@cache
def reference(feature):
    "Ids, scores of the output, scores of the prompt: alone, and as the oracle has it"
    model = model_of(torch.float32, 2, 16)
    world, r = alone(Plain, model, feature)
    world.drain()
    if feature not in MINE:
        assert r.output == naive(model, tuple(PROMPT), r.params, tuple(FEATURES[feature].get("eos", ())), world.scheduler.limit)
    check_scores(model, r)
    return r.output, r.scores, r.prompt_scores, r.finish_reason


@torch.inference_mode()
def check_scores(model, r):
    "What `transformers` and vLLM call logprobs: log-softmax of the whole model's logits"
    x = model.logits(model(torch.tensor(r.tokens), Dense())).log_softmax(-1)
    for scores, at, k in ((r.scores, r.n_prompt - 1, r.params.logprobs), (r.prompt_scores, 0, r.params.prompt_logprobs)):
        if scores is None:
            assert k is None
            continue
        assert len(scores) == (r.n_output if at else r.n_prompt - 1)
        for i, s in enumerate(scores):
            row = x[at + i]
            assert s.id == r.tokens[at + i + 1] and abs(s.logprob - float(row[s.id])) < 1e-4
            assert s.rank == int((row >= row[s.id]).sum()) and len(s.top_ids) == (V if k == -1 else k)
            assert np.allclose(s.top_logprobs, row.topk(len(s.top_ids)).values, atol=1e-4)
            assert np.allclose(s.top_logprobs, row[s.top_ids], atol=1e-4) and sum(np.exp(s.top_logprobs)) < 1 + 1e-4


def same(a, b):
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(x.id == y.id and x.rank == y.rank and abs(x.logprob - y.logprob) < 1e-4
                                    and np.allclose(x.top_logprobs, y.top_logprobs, atol=1e-4) for x, y in zip(a, b))


TOTAL = Counter()


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("runner", RUNNERS)
def test_the_answer_is_the_one_it_gets_alone(runner, situation):
    model = model_of(torch.float32, 2, 16)
    for feature in FEATURES:
        world, r = situation(RUNNERS[runner], model, feature)
        world.drain()
        ids, scores, prompt_scores, reason = reference(feature)
        assert (r.output, r.finish_reason) == (ids, reason), feature
        assert same(r.scores, scores) and same(r.prompt_scores, prompt_scores), feature
        if situation is preempted and len(ids) > 3:
            assert r.n_preempted >= 1, feature
        if situation is prefix_hit:
            assert r.n_cached == (8 if r.params.reads_cache else 0), feature
        assert world.manager.pool.n_free == world.manager.pool.n_blocks - 1 and not world.manager.tables
        TOTAL[runner, situation.__name__] += 1


# ---- the same with text: what `LLM` gives

TEXT = "what a model says to this, nobody knows"
WISHES = {
    "plain": {}, "stop": dict(stop=2), "stop, shown": dict(stop=3, include_stop_str_in_output=True), "stops, min_tokens": dict(stop=1, min_tokens=6),
    "n": dict(n=3, temperature=1.0, seed=3), "n, stop, logprobs": dict(n=2, temperature=.8, seed=1, stop=2, logprobs=1),
    "bad words": dict(bad_words=4), "no text": dict(detokenize=False), "logprobs": dict(logprobs=2, prompt_logprobs=1),
    "penalties": dict(repetition_penalty=1.3, presence_penalty=.5), "special": dict(skip_special_tokens=False, ignore_eos=True),
    "bias": dict(logit_bias={257: 9.0}), "allowed": dict(allowed_token_ids=[*range(97, 123)], frequency_penalty=1.0)}
COMPANY = ["what a model says to others", "short", "a third one that is not like the first"]
PLACES = {  # options of the LLM; is there company?; is it asked before?
    "alone": ({}, False, False), "mixed": ({}, True, False), "preempted": (dict(num_gpu_blocks_override=32), True, False),
    "chunked": (dict(long_prefill_token_threshold=3), True, False), "prefix hit": ({}, True, True), "ahead": (dict(async_scheduling=True), True, False)}


def asked(llm, wish, company=False):
    "The `RequestOutput` of a wish; numbers stand for texts that the model does say, or would"
    from test_llm import ask
    p = dict(temperature=0, max_tokens=14) | WISHES[wish]
    said = plain_text()
    if "stop" in p:
        p["stop"] = said[p["stop"] + 4:][:p["stop"]]
    if "bad_words" in p:
        p["bad_words"] = [c for c in said[:p["bad_words"]] if c.isascii() and not c.isspace()] + ["qu"]
    params = [SamplingParams(**p)] + [SamplingParams(temperature=1.0, seed=i, max_tokens=20, presence_penalty=i/2, ignore_eos=True)
                                      for i in range(3*company)]
    return ask(llm, [TEXT, *COMPANY[:3*company]], params)[0]


@cache
def plain_text():
    from test_llm import ask, tiny
    return ask(tiny(), TEXT, SamplingParams(temperature=0, max_tokens=14))[0].outputs[0].text


@cache
def lone(wish):
    from test_llm import tiny
    return asked(tiny(), wish)


@pytest.mark.parametrize("place", PLACES)
def test_text_is_what_it_is_alone(place):
    from test_llm import empty, tiny
    options, company, before = PLACES[place]
    n_preempted = 0
    for wish in WISHES:
        llm = tiny(**dict(num_gpu_blocks_override=160) | options)
        if before:
            asked(llm, wish)
        with llm.trace() as trace:
            out = asked(llm, wish, company)
        n_preempted += sum(name == "preempt" for _, name, _ in trace.events)
        for a, b in zip(out.outputs, lone(wish).outputs, strict=True):
            assert (a.index, a.text, a.token_ids, a.finish_reason, a.stop_reason) == (b.index, b.text, b.token_ids, b.finish_reason, b.stop_reason), wish
            likely(a.logprobs, b.logprobs)
        likely(out.prompt_logprobs, lone(wish).prompt_logprobs)
        assert empty(llm) and not llm.texts.choices
    assert n_preempted > 5 if place == "preempted" else not n_preempted


def likely(a, b):
    assert (a is None) == (b is None)
    for x, y in zip(a or (), b or (), strict=True):
        assert (x is None) == (y is None)
        assert x is None or [*x] == [*y] and all(abs(x[i].logprob - y[i].logprob) < 1e-4 and x[i].rank == y[i].rank for i in x)


def test_every_wish_changes_something():
    for wish in WISHES:
        if wish not in ("plain", "logprobs", "special"):
            a, b = lone(wish).outputs, lone("plain").outputs
            assert len(a) > 1 or (a[0].text, a[0].token_ids) != (b[0].text, b[0].token_ids), wish


def test_every_feature_changes_something():
    "A feature that is dropped on the way gives the greedy answer"
    greedy = reference("greedy")
    for feature in FEATURES:
        if feature not in ("greedy", "no cache"):
            assert reference(feature) != greedy, feature
        if FEATURES[feature].get("temperature") and feature != "seed":
            assert reference(feature) != reference("seed"), feature


def test_how_many_combinations_ran():
    print(f"{len(FEATURES)} features x {len(SITUATIONS)} situations x {len(RUNNERS)} runners: {sum(TOTAL.values())} combinations")
    assert not TOTAL or all(n == len(FEATURES) for n in TOTAL.values())
