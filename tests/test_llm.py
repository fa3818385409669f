"Text in, text out: vLLM's names, answers equal to transformers', errors in words, and an engine that survives its users"
import inspect
import random
from collections import Counter, deque
from dataclasses import fields

import pytest
import torch

import pagedlm
from pagedlm import LLM, SamplingParams
from pagedlm.blocks import ByKey
from pagedlm.llm import CompletionOutput, RequestOutput
from pagedlm.model import tiny_config, tiny_model
from pagedlm.sampling import generate_naive
from pagedlm.tokenizer import ByteTokenizer


def tiny(**kw):
    return LLM(tiny_model(tiny_config(), seed=1), ByteTokenizer(), **dict(block_size=4, num_gpu_blocks_override=40) | kw)


def ask(llm, *args, **kw):
    return llm.generate(*args, use_tqdm=False, **kw)


def empty(llm):
    pool = llm.engine.scheduler.manager.pool
    llm.engine.scheduler.manager.check()
    return not len(llm.engine.scheduler) and pool.n_free == pool.n_blocks - 1 and not llm.texts.answers and not llm.texts.fresh


# ---- the default model

PLAIN = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "The year 2024 was"]
CHATS = ["What is the capital of Italy?", "Name three fruits.", "Write a haiku about the sea.", "What is 7 + 5?",
         "Explain gravity in one sentence."]


def test_greedy_answers_are_those_of_transformers(default_pair, default_reference):
    model, tokenizer = default_pair
    llm = LLM(model, tokenizer, max_num_batched_tokens=64, block_size=8)
    prompts = PLAIN + llm.chat_prompts([[dict(role="user", content=q)] for q in CHATS])
    outputs = ask(llm, prompts, SamplingParams(temperature=0, max_tokens=20))
    for o in outputs:
        ids = torch.tensor([o.prompt_token_ids])
        theirs = default_reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20,
                                            eos_token_id=list(tokenizer.eos_ids), pad_token_id=0)
        assert o.outputs[0].token_ids == theirs[0, ids.shape[1]:].tolist(), o.prompt
        assert o.outputs[0].text == tokenizer.decode(o.outputs[0].token_ids)
    assert sum(o.outputs[0].finish_reason == "stop" for o in outputs) > 0
    assert max(o.num_cached_tokens for o in outputs) > 0
    assert empty(llm)


# ---- the interface

def test_names_are_vllms():
    "A script written for vLLM's offline interface finds what it asks for"
    init = set(inspect.signature(LLM.__init__).parameters)
    assert {"model", "tokenizer", "dtype", "quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
            "block_size", "num_gpu_blocks_override", "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization",
            "tensor_parallel_size", "seed", "chat_template", "logits_processors"} <= init
    assert list(inspect.signature(LLM.generate).parameters)[1:] == ["prompts", "sampling_params", "use_tqdm", "priority"]
    assert list(inspect.signature(LLM.chat).parameters)[1:4] == ["messages", "sampling_params", "use_tqdm"]
    assert {f.name for f in fields(RequestOutput)} == {"request_id", "prompt", "prompt_token_ids", "prompt_logprobs",
                                                       "outputs", "finished", "metrics", "num_cached_tokens"}
    assert {f.name for f in fields(CompletionOutput)} == {"index", "text", "token_ids", "cumulative_logprob", "logprobs",
                                                          "finish_reason", "stop_reason"}


def test_outputs_are_in_the_order_of_the_prompts():
    llm, rnd = tiny(max_num_seqs=3, max_num_batched_tokens=5), random.Random(0)
    prompts = [[rnd.randrange(256) for _ in range(rnd.randint(1, 30))] for _ in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=rnd.randint(1, 12)) for _ in prompts]
    outputs = ask(llm, prompts, params)
    for o, prompt, p in zip(outputs, prompts, params, strict=True):
        assert o.prompt is None and o.prompt_token_ids == prompt and o.finished
        assert o.outputs[0].token_ids == generate_naive(llm.model, prompt, p, (257,), max_len=llm.engine.scheduler.limit)
    assert empty(llm)


def test_forms_of_a_prompt():
    llm, text = tiny(), "abc"
    ids = llm.tokenizer.encode(text)
    forms = [text, ids, tuple(ids), dict(prompt=text), dict(prompt_token_ids=ids), dict(prompt="shown", prompt_token_ids=ids)]
    outputs = ask(llm, forms, SamplingParams(temperature=0, max_tokens=3))
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert [o.prompt for o in outputs] == [text, None, None, text, None, "shown"]
    assert ask(llm, text)[0].prompt == text and ask(llm, ids)[0].prompt_token_ids == ids


def test_a_salt_keeps_prefixes_apart():
    llm, ids = tiny(), list(range(20))
    cached = [ask(llm, dict(prompt_token_ids=ids, **salt), SamplingParams(max_tokens=1))[0].num_cached_tokens
              for salt in ({}, dict(cache_salt="a"), dict(cache_salt="b"), {}, dict(cache_salt="a"))]
    assert cached == [0, 0, 0, 16, 16]


def test_prefix_caching_off():
    llm = tiny(enable_prefix_caching=False)
    assert [ask(llm, list(range(20)))[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_who_is_evicted_is_an_option():
    "A beginning that is found again and again outlives newer ones under lfu, not under lru; an order of one's own is three lines"
    class Lucky(ByKey):
        def key(self, block): return -self.n_found[block]
    cached, often, p = {}, list(range(20)), SamplingParams(max_tokens=1)
    for order in "lru", "lfu", Lucky:
        llm = tiny(num_gpu_blocks_override=14, eviction_order=order)
        for i in range(4):
            ask(llm, often, p)
        for i in range(1, 4):
            ask(llm, [i]*20, p)
        cached[order] = ask(llm, often, p)[0].num_cached_tokens
    assert cached == {"lru": 0, "lfu": 16, Lucky: 0}


def test_names_to_import():
    "What vLLM's scripts import, and nothing that is not there"
    for name in pagedlm.__all__:
        assert getattr(pagedlm, name) is not None
    assert pagedlm.TokensPrompt(prompt_token_ids=[1]) == dict(prompt_token_ids=[1]) and pagedlm.RequestOutput is RequestOutput
    with pytest.raises(ImportError, match="PoolingParams"):
        from pagedlm import PoolingParams


def test_stop_reasons():
    llm = tiny()
    ids = ask(llm, "abc", SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids
    third = ids[2]
    out, = ask(llm, "abc", SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[third]))
    n = ids.index(third) + 1
    assert (out.outputs[0].token_ids, out.outputs[0].finish_reason, out.outputs[0].stop_reason) == (ids[:n], "stop", third)
    out, = ask(llm, "abc", SamplingParams(temperature=0, max_tokens=None))
    assert out.outputs[0].finish_reason == "length" or out.outputs[0].token_ids[-1] == 257
    assert len(out.prompt_token_ids) + len(out.outputs[0].token_ids) <= llm.engine.scheduler.limit


def test_the_model_ends_its_answer_unless_told_not_to():
    llm = tiny()
    llm.engine.run.chooser.sampler = lambda logits, *how: torch.full((len(logits),), 257)
    stopped, = ask(llm, "abc", SamplingParams(max_tokens=3))
    went_on, = ask(llm, "abc", SamplingParams(max_tokens=3, ignore_eos=True))
    assert (stopped.outputs[0].token_ids, stopped.outputs[0].finish_reason) == ([257], "stop")
    assert (went_on.outputs[0].token_ids, went_on.outputs[0].finish_reason) == ([257]*3, "length")
    assert stopped.outputs[0].text == ""


def test_metrics_are_in_order():
    m = ask(tiny(), "abc")[0].metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time


def test_unseeded_requests_differ_but_engines_repeat():
    params = SamplingParams(temperature=1.0, max_tokens=8)
    first, again, other = (ask(tiny(seed=s), ["abc"]*3, params) for s in (0, 0, 1))
    ids = [[tuple(o.outputs[0].token_ids) for o in some] for some in (first, again, other)]
    assert ids[0] == ids[1] != ids[2] and len(set(ids[0])) > 1


def test_a_seed_does_not_see_the_crowd():
    mine, rnd = SamplingParams(temperature=1.0, top_k=20, seed=5, max_tokens=10), random.Random(0)
    alone = ask(tiny(), "abc", mine)[0].outputs[0].token_ids
    for _ in range(8):
        llm = tiny(max_num_seqs=3, max_num_batched_tokens=rnd.randint(3, 9), num_gpu_blocks_override=rnd.randint(8, 20))
        crowd = [[rnd.randrange(256) for _ in range(rnd.randint(1, 12))] for _ in range(4)]
        where = rnd.randint(0, 4)
        prompts = crowd[:where] + ["abc"] + crowd[where:]
        params = [SamplingParams(temperature=rnd.choice([0, 1.0]), max_tokens=rnd.randint(1, 12)) for _ in prompts]
        params[where] = mine
        assert ask(llm, prompts, params)[where].outputs[0].token_ids == alone


# ---- errors in words

BAD_PROMPTS = [
    ([], "at least 1 token"), ([[]], "0 tokens"), ({"prompt": None}, "None"), ({"prompt": 5}, "5"), ([3.5], "3.5"), (["a", None], "None"),
    ([258], "258"), ([-1], "-1"), ([[1, 2], [1, 999]], "prompt 1"), ([1, True, "x"], "whole numbers"),
    ("x"*300, "301"), ({"prompt": "a", "lora": 1}, "lora")]


@pytest.mark.parametrize("prompt, says", BAD_PROMPTS, ids=[str(p)[:20] for p, _ in BAD_PROMPTS])
def test_bad_prompts(prompt, says):
    llm = tiny()
    with pytest.raises(ValueError, match=says):
        ask(llm, prompt)
    assert empty(llm) and ask(llm, "fine")[0].finished


def test_no_bos_no_tokens():
    class NoBos(ByteTokenizer):
        def encode(self, text, add_special_tokens=True): return list(text.encode())
    llm = LLM(tiny_model(), NoBos())
    for prompt in ("", [""], ["fine", ""]):
        with pytest.raises(ValueError, match="0 tokens"):
            ask(llm, prompt)
    assert empty(llm)


@pytest.mark.parametrize("params", [dict(temperature=-1), dict(temperature=float("nan")), dict(top_p=0), dict(top_p=1.1), dict(top_k=-2),
                                    dict(min_p=2), dict(max_tokens=0), dict(max_tokens=1.5), dict(stop_token_ids=["x"]),
                                    dict(n=0), dict(stop=[""]), dict(logprobs=-2), dict(presence_penalty=3), dict(detokenize=1)],
                         ids=str)
def test_bad_params_name_themselves(params):
    with pytest.raises(ValueError, match=next(iter(params))):
        SamplingParams(**params)


def test_stop_ids_outside_the_vocabulary():
    llm = tiny()
    with pytest.raises(ValueError, match="258"):
        ask(llm, "a", SamplingParams(stop_token_ids=[258]))
    assert empty(llm)


@pytest.mark.parametrize("kw, says", [
    (dict(quantization="int8"), "int8"), (dict(tensor_parallel_size=3), "tensor_parallel_size=3, but this model has 4 heads"), (dict(kv_cache_dtype="fp8"), "cpu back-end keeps auto, bfloat16"),
    (dict(kv_cache_dtype="fp8", attention_backend="torch"), "torch back-end keeps"), (dict(kv_cache_dtype="int3"), "int3"),
    (dict(logits_processors=[print]), "logits_processors"), (dict(max_model_len=257), "257.*256"), (dict(max_model_len=0), "max_model_len=0"),
    (dict(max_num_seqs=0), "max_num_seqs=0"), (dict(max_num_seqs=9, max_num_batched_tokens=8), "8.*9"), (dict(block_size=0), "block_size=0"),
    (dict(eviction_order="magic"), "magic.*lru"), (dict(gpu_memory_utilization=0), "gpu_memory_utilization=0"), (dict(num_gpu_blocks_override=1), "n_blocks=1"), (dict(attention_backend="magic"), "magic"), (dict(scheduling_policy="magic"), "magic"),
    (dict(trust_remote_code=True), "trust_remote_code=True"), (dict(pipeline_parallel_size=2), "pipeline_parallel_size=2"),
    (dict(long_prefill_token_threshold=-1), "-1"), (dict(num_gpu_blocks_override=None, kv_cache_memory_bytes=100), "100")], ids=str)
def test_bad_options(kw, says):
    with pytest.raises(ValueError, match=says):
        tiny(**kw)


def test_options_that_ask_for_what_is_so():
    assert ask(tiny(trust_remote_code=False, enable_chunked_prefill=True), "a", SamplingParams(max_tokens=1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocksize'"):
        tiny(blocksize=16)


def test_a_step_ahead_answers_the_same():
    "Answers do not depend on when their ids are read, nor on who sits in a row that was left"
    rnd = random.Random(5)
    prompts = [[rnd.randrange(256) for _ in range(rnd.randint(1, 30))] for _ in range(12)]
    params = [SamplingParams(temperature=rnd.choice([0, 1]), seed=i, max_tokens=rnd.randint(1, 12)) for i in range(12)]
    answers = {}
    for ahead in False, True:
        llm = tiny(max_num_seqs=3, max_num_batched_tokens=5, async_scheduling=ahead)
        answers[ahead] = [o.outputs[0].token_ids for o in ask(llm, prompts, params)]
        assert llm.engine.ahead == ahead and empty(llm)
    assert answers[True] == answers[False]


def test_priorities_need_a_policy_that_looks_at_them():
    llm = tiny(scheduling_policy="priority", max_num_seqs=1)
    with llm.trace() as trace:
        ask(llm, ["later", "first"], SamplingParams(max_tokens=2), priority=[1, 0])
    assert [f["request"] for _, name, f in trace.events if name == "admit"] == ["1", "0"]
    assert len(ask(llm, ["a", "b"], SamplingParams(max_tokens=2), priority=3)) == 2
    for policy in "fcfs", "shortest_first", "prefill_first":
        llm = tiny(scheduling_policy=policy)
        with pytest.raises(ValueError, match="does not look at it"):
            ask(llm, ["a", "b"], SamplingParams(max_tokens=2), priority=[1, 0])
        assert empty(llm)


def test_bad_models(tmp_path):
    for model in ("nowhere", tmp_path, str(tmp_path/"x.gguf")):
        with pytest.raises(ValueError, match=str(model)):
            LLM(model)
    with pytest.raises(ValueError, match="float8"):
        LLM(dtype="float8")
    with pytest.raises(ValueError, match="tokenizer"):
        LLM(tiny_model())


def test_lengths_must_agree():
    llm = tiny()
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        ask(llm, ["a", "b"], [SamplingParams()])
    with pytest.raises(ValueError, match="3 priority for 2 prompts"):
        ask(tiny(scheduling_policy="priority"), ["a", "b"], priority=[1, 2, 3])
    with pytest.raises(ValueError, match="SamplingParams"):
        ask(llm, "a", dict(temperature=0))
    assert empty(llm)


def test_chat_errors():
    llm = tiny()
    for messages in ([], [{}], [dict(role="user")], "hello"):
        with pytest.raises(ValueError):
            llm.chat(messages)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    llm = tiny(chat_template=template)
    out, = llm.chat([dict(role="user", content="hi")], use_tqdm=False)
    assert out.prompt == "user: hi\n"
    many = llm.chat([[dict(role="user", content=c)] for c in "ab"], use_tqdm=False)
    assert [o.prompt for o in many] == ["user: a\n", "user: b\n"]


# ---- nothing is lost

class Trouble(Exception):
    pass


@pytest.mark.parametrize("what", [Trouble, KeyboardInterrupt])
def test_an_interrupt_at_any_step_leaves_the_engine_empty_and_usable(what):
    "An exception that does not come again is nobody's end; Ctrl-C is everybody's"
    llm = tiny(max_num_seqs=3, max_num_batched_tokens=4, num_gpu_blocks_override=12)
    prompts, params = ["abc", "abcdefgh", "xyz", "abcd"], SamplingParams(temperature=0, max_tokens=8)
    expected = [o.outputs[0].token_ids for o in ask(llm, prompts, params)]
    run, steps = llm.engine.run, 0
    for at in range(1, 40):
        left = at
        def fails(plan):
            nonlocal left
            left -= 1
            if left == 0: raise what
            return run(plan)
        llm.engine.run = fails
        try:
            assert [o.outputs[0].token_ids for o in ask(llm, prompts, params)] == expected
            if left > 0: break
            assert what is Trouble
        except KeyboardInterrupt:
            assert what is KeyboardInterrupt
        assert empty(llm)
        llm.engine.run, steps = run, steps + 1
        assert [o.outputs[0].token_ids for o in ask(llm, prompts, params)] == expected
    assert steps > 10


@pytest.mark.parametrize("n_tokens", [0, 3, 7, 11])
def test_one_prompt_that_cannot_be_computed(n_tokens):
    "In its prompt or later: all others are answered as alone, then it is raised; streams end in the same way"
    llm = tiny(max_num_seqs=3, max_num_batched_tokens=4, num_gpu_blocks_override=12)
    prompts, params = ["abc", "abcd!", "xyz", "abcd"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected, run, bad = [o.outputs[0].token_ids for o in ask(llm, prompts, params)], llm.engine.run, {}

    def fails(plan):
        for a in plan.admitted: bad[a.row] = ord("!") in a.ids[:a.n_prompt]
        if any(bad[w.row] and w.start + w.n >= n_tokens for w in plan.works): raise Trouble("no")
        return run(plan)
    llm.engine.run = fails
    with pytest.raises(Trouble, match="no") as e:
        ask(llm, prompts, params)
    ids = [o.outputs[0].token_ids for o in e.value.outputs]
    assert [o.outputs[0].finish_reason for o in e.value.outputs] == ["length", "error", "length", "length"]
    assert [*ids[:1], *ids[2:]] == [*expected[:1], *expected[2:]] and ids[1] == expected[1][:len(ids[1])]
    assert "prompt 1 of 4" in e.value.__notes__[0] and empty(llm)
    said = {}
    with pytest.raises(Trouble):
        for i, o in llm.stream(prompts, params):
            said[i] = o
    assert [said[i].outputs[0].token_ids for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)] and empty(llm)
    with pytest.raises(Trouble) as e:
        ask(llm, ["a!", "b"], SamplingParams(n=3, seed=1, max_tokens=10))  # siblings share a prompt
    assert all(c.finish_reason for o in e.value.outputs for c in o.outputs) and len(e.value.outputs[1].outputs) == 3 and empty(llm)
    llm.engine.run = run
    assert [o.outputs[0].token_ids for o in ask(llm, prompts, params)] == expected


def test_a_runner_that_always_fails_is_heard_of_soon():
    llm, calls = tiny(), []
    def fails(plan):
        calls.append(plan)
        raise Trouble
    llm.engine.run = fails
    with pytest.raises(Trouble):
        ask(llm, ["a prompt"]*500)
    assert len(calls) <= 64 and empty(llm)


@pytest.mark.parametrize("where", ["schedule", "update"])
def test_an_interrupt_inside_the_scheduler(where, monkeypatch):
    llm, greedy = tiny(), SamplingParams(temperature=0)
    expected = ask(llm, "abc", greedy)[0].outputs[0].token_ids
    manager, method = llm.engine.scheduler.manager, dict(schedule="grow", update="name_full")[where]
    whole = getattr(manager, method)
    def halfway(*args):
        whole(*args)
        raise KeyboardInterrupt
    monkeypatch.setattr(manager, method, halfway)
    with pytest.raises(KeyboardInterrupt):
        ask(llm, ["abc", "other"])
    monkeypatch.undo()
    assert empty(llm) and ask(llm, "abc", greedy)[0].outputs[0].token_ids == expected


def test_stream_tells_as_it_goes():
    llm = tiny()
    params, seen = SamplingParams(temperature=0, max_tokens=7), {}
    for i, o in llm.stream(["abc", "xyz"], params):
        ids = o.outputs[0].token_ids
        assert ids[:len(seen.get(i, []))] == seen.get(i, []) and len(ids) == len(seen.get(i, [])) + 1
        assert o.finished == (o.outputs[0].finish_reason is not None) == (len(ids) == 7)
        seen[i] = ids
    assert [seen[0], seen[1]] == [o.outputs[0].token_ids for o in ask(llm, ["abc", "xyz"], params)]
    assert empty(llm)


def test_leaving_a_stream_aborts_only_its_own():
    llm, params = tiny(), SamplingParams(temperature=0, max_tokens=6)
    other = llm.stream("other", params)
    next(other)
    mine = llm.stream(["abc", "xyz"], params)
    next(mine)
    mine.close()
    assert list(llm.texts.answers) == [r.id for r in llm.engine.scheduler.running.values()] and len(llm.texts.answers) == 1
    last = [o for _, o in other][-1]
    assert last.outputs[0].token_ids == ask(llm, "other", params)[0].outputs[0].token_ids
    assert empty(llm)


def test_abort_ends_a_stream():
    llm, said = tiny(), []
    for i, o in llm.stream(["abc", "xyz"], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)):
        if i == 0 and not o.finished: llm.abort(o.request_id)
        said.append((i, o.outputs[0].finish_reason))
    assert (0, "abort") in said and (1, "length") in said and empty(llm)


def test_text_never_shows_half_a_character():
    llm, text = tiny(), "a🥭é!"
    ids = iter(list(text.encode()) + [0xf0, 0x9f])
    llm.engine.run.chooser.sampler = lambda logits, *how: torch.tensor([next(ids)])
    texts = [o.outputs[0].text for _, o in llm.stream("x", SamplingParams(max_tokens=len(text.encode()) + 2))]
    assert all("\ufffd" not in t for t in texts[:-1]) and texts[-1] == text + "\ufffd"
    assert all(b.startswith(a) for a, b in zip(texts, texts[1:]))


def test_tracing_comes_and_goes():
    llm = tiny()
    with llm.trace() as trace:
        ask(llm, "abc", SamplingParams(max_tokens=2))
    n = len(trace.events)
    ask(llm, "abc")
    assert len(trace.events) == n > 0 and trace.events[0][1] == "arrive"


def containers(x, path="llm", seen=None):
    "(where, size) of every list, dict, set and deque that can be reached through our own objects"
    seen = {} if seen is None else seen
    if id(x) in seen:
        return
    seen[id(x)] = x  # and it stays alive, so that no other gets its number
    if isinstance(x, (dict, list, set, deque)):
        yield path, len(x)
        inside = [*x.values()] if isinstance(x, dict) else [*x]
    else:
        inside = [*x] if isinstance(x, tuple) else []
    for y in inside:
        if not isinstance(y, (int, float, str, bytes, type(None))):
            yield from containers(y, path + "[]", seen)
    if type(x).__module__.startswith("pagedlm"):
        for name, y in vars(x).items() if hasattr(x, "__dict__") else ():
            yield from containers(y, f"{path}.{name}", seen)


def sizes(llm):
    total = Counter()
    for where, n in containers(llm):
        total[where] += n
    return total


def test_thousands_of_prompts_leave_nothing_behind():
    "With stops, several answers, penalties, log-probabilities, aborts: each container is as large as before"
    llm, rnd = tiny(max_num_seqs=32, max_num_batched_tokens=128), random.Random(0)
    wishes = [{}, dict(n=2), dict(stop=["a", "e"]), dict(logprobs=1), dict(prompt_logprobs=0), dict(repetition_penalty=1.2), dict(bad_words=["q"]),
              dict(allowed_token_ids=[97, 98, 99]), dict(min_tokens=1, stop_token_ids=[5])]

    def some(n):
        params = [SamplingParams(max_tokens=rnd.randint(1, 2), **rnd.choice(wishes)) for _ in range(n)]
        answers = [llm.texts.add([rnd.randrange(256) for _ in range(rnd.randint(1, 9))], p) for p in params]
        for a in rnd.sample(answers, n//8):
            llm.abort(a.id)
        for _ in llm.texts.run(answers):
            pass
    for _ in range(3):
        some(300)
    before = sizes(llm)
    for _ in range(10):
        some(300)
    after = sizes(llm)
    run, rows = "llm.engine.run.chooser", 32  # what rows that left last have left behind goes when others come, or with the next plan
    bounded = {"llm.engine.scheduler.manager.pool.named": 39, "llm.engine.scheduler.rows._gone": rows, f"{run}.wishes": rows,
               f"{run}.wishes[].stops": 2*rows, f"{run}.wishes[].params.stop_token_ids": rows, f"{run}.quick.kept[]": 4*rows}
    assert all(n == before[where] or n <= bounded.get(where, 0) for where, n in after.items()) and empty(llm)
    assert len(before) > 30
