"What requests ask of text: stop strings, log-probabilities, n answers, bad words and the rest, on a model that says what it is told"
import json
import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from test_llm import ask, empty, tiny

from pagedlm import LLM, SamplingParams
from pagedlm.core import RequestOutputKind, StructuredOutputsParams
from pagedlm.llm import Logprob, find_stop, live_stops, n_held
from pagedlm.model import tiny_config, tiny_model
from pagedlm.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


class Words(ByteTokenizer):
    "Ids stand for pieces of text; the last is special and not shown"
    def __init__(self, pieces):
        super().__init__()
        self.pieces, self.special_ids, self.eos_ids = pieces, frozenset([len(pieces) - 1]), ()

    def piece(self, id, first=False): return self.pieces[id].encode() if id < len(self.pieces) else b"?"
    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.pieces[i] for i in ids if not (skip_special_tokens and i in self.special_ids))


def says(pieces, order=None, **kw):
    "An LLM that says these pieces, one token each"
    llm = LLM(tiny_model(tiny_config(), seed=1), Words([*pieces, "<end>"]), **dict(block_size=4, num_gpu_blocks_override=40) | kw)
    order = order or range(len(pieces))

    def sampler(logits, t, k, p, m, seeds, positions):
        return torch.tensor([order[min(int(at) - 3, len(order) - 1)] for at in positions])
    llm.engine.run.chooser.sampler = sampler
    return llm


def say(pieces, stop=None, n=None, order=None, **params):
    "(text, finish_reason, stop_reason, ids, texts of a stream)"
    p = SamplingParams(stop=stop, max_tokens=n or len(order or pieces), **params)
    out, = ask(says(pieces, order), [[1, 2, 3]], p)
    llm = says(pieces, order)
    texts = [o.outputs[0].text for _, o in llm.stream([[1, 2, 3]], p)]
    deltas = [o.outputs[0].text for _, o in llm.stream([[1, 2, 3]], replace(p, output_kind=RequestOutputKind.DELTA))]
    c = out.outputs[0]
    assert texts[-1] == c.text == "".join(deltas) and all(b.startswith(a) for a, b in zip(texts, texts[1:])), texts
    assert empty(llm)
    return c.text, c.finish_reason, c.stop_reason, c.token_ids, texts


# ---- stop strings: case 24

def test_a_stop_string_across_tokens():
    assert say(["ab", "cde", "f"], ["bcd"])[:4] == ("a", "stop", "bcd", [0, 1])
    assert say(["ab", "cde", "f"], ["bcd"], include_stop_str_in_output=True)[:4] == ("abcd", "stop", "bcd", [0, 1])
    assert say(["ab", "cde", "f"], "bcd")[4] == ["a", "a"]  # "b" is held back


def test_a_near_miss_is_released():
    text, reason, why, _, texts = say(["ab", "cx", "yz"], ["bcd"])
    assert (text, reason, why) == ("abcxyz", "length", None) and texts == ["a", "abcx", "abcxyz"]


def test_what_is_held_back_is_shown_at_the_end():
    assert say(["ab", "c"], ["bcd"])[4] == ["a", "abc"]
    assert say(["ab", "c", "<end>"], ["bcd"], order=[0, 1, 3], stop_token_ids=[3])[:2] == ("abc", "stop")


def test_one_stop_is_a_prefix_of_another():
    for stops in (["bc", "bcd"], ["bcd", "bc"]):
        assert say(["ab", "c", "d"], stops)[:3] == ("a", "stop", "bc")  # complete first
    assert say(["a", "bcd"], ["bcd", "bc"])[:3] == ("a", "stop", "bc")  # as if it had come letter by letter
    assert say(["xab"], ["ab", "b"])[2] == "ab" and say(["xab"], ["b", "ab"])[2] == "b"


def test_stop_in_the_very_last_token():
    assert say(["ab", "cd"], ["cd"])[:3] == ("ab", "stop", "cd")
    assert say(["ab", "cd"], ["cd"], n=1)[:2] == ("ab", "length")


def test_the_prompt_is_not_searched():
    llm = says(["a", "b"])
    out, = ask(llm, [dict(prompt="stop", prompt_token_ids=[1, 2, 3])], SamplingParams(stop=["stop"], max_tokens=2))
    assert out.outputs[0].finish_reason == "length"


def test_stops_wait_for_min_tokens():
    assert say(["x", "stop", "x", "stop", "x"], ["stop"], min_tokens=2)[:4] == ("xstopx", "stop", "stop", [0, 1, 2, 3])
    assert say(["st", "op", "!"], ["stop"], min_tokens=1)[:2] == ("", "stop")  # complete after the first


def test_tokens_that_end_are_not_text():
    "As vLLM has it: the token that ended the answer is in its ids, not in its text, unless asked for"
    pieces = ["ab", "cd", "ef"]
    assert say(pieces, stop_token_ids=[1])[:4] == ("ab", "stop", 1, [0, 1])
    assert say(pieces, stop_token_ids=[1], include_stop_str_in_output=True)[0] == "abcd"
    assert say(pieces, stop_token_ids=[3], order=[0, 1, 3])[0] == "abcd"  # an invisible one cuts nothing of the text
    assert say(pieces, stop_token_ids=[3], order=[0, 1, 3], include_stop_str_in_output=True)[0] == "abcd"


@pytest.mark.parametrize("seed", range(4))
def test_stops_at_random(seed):
    "Cut in any way into tokens, the text ends where it would if it came letter by letter"
    rnd = random.Random(seed)
    for _ in range(12):
        text = "".join(rnd.choice("abé") for _ in range(rnd.randint(1, 24)))
        cuts = sorted(rnd.sample(range(len(text) + 1), rnd.randint(0, min(6, len(text)))))
        pieces = [p for p in (text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])) if p]
        stops = ["".join(rnd.choice("abé") for _ in range(rnd.randint(1, 4))) for _ in range(rnd.randint(1, 3))]
        keep = rnd.random() < .5
        found = next((f for i in range(1, len(text) + 1) if (f := find_stop(text[:i], 1, stops))), None)
        want = text if found is None else text[:found[keep]]
        got = say(pieces, stops, include_stop_str_in_output=keep)
        assert got[:3] == (want, "length" if found is None else "stop", found and found[2])
        shown = ["".join(pieces[:i + 1]) for i in range(len(got[4]))]
        if not keep:  # a stream holds back exactly what may become a stop string
            assert all(g == s[:len(s) - n_held(s, live_stops(stops))] for g, s in zip(got[4][:-1], shown))


def held_by_brute_force(text, stops):
    "What must wait: characters that some continuation would take away, tried out"
    def end(text):
        found = next((f for i in range(1, len(text) + 1) if (f := find_stop(text[:i], 1, stops))), None)
        return len(text) if found is None else found[0]
    longest = max(map(len, stops)) - 1
    continued = ("".join(c) for n in range(longest + 1) for c in product("ab", repeat=n))
    return len(text) - min(end(text + c) for c in continued if True)


def test_a_stream_waits_exactly_as_long_as_it_must():
    "Every text of up to 6 letters with each of 60 sets of stop strings, against every way to go on"
    rnd, n_held_back = random.Random(0), 0
    for _ in range(60):
        stops = ["".join(rnd.choices("ab", k=rnd.randint(1, 4))) for _ in range(rnd.randint(1, 3))]
        for n in range(1, 7):
            for text in map("".join, product("ab", repeat=n)):
                if any(s in text for s in stops):
                    continue
                held = n_held(text, live_stops(stops))
                assert held == held_by_brute_force(text, stops), (text, stops)
                n_held_back += held > 0
    assert n_held_back > 500


# ---- text on and off

def test_detokenize_off():
    out, = ask(says(["ab", "cd"]), [[1, 2, 3]], SamplingParams(detokenize=False, max_tokens=2, logprobs=1))
    assert (out.outputs[0].text, out.outputs[0].token_ids) == ("", [0, 1])
    assert {x.decoded_token for d in out.outputs[0].logprobs for x in d.values()} == {None}


def test_special_tokens_are_shown_if_asked():
    assert say(["ab", "cd", "<end>"], order=[0, 3, 1])[0] == "abcd"
    assert say(["ab", "cd", "<end>"], order=[0, 3, 1], skip_special_tokens=False)[0] == "ab<end>cd"
    for spaces in False, True:
        assert say(["ab", "<end>"], order=[2, 2, 0], skip_special_tokens=False, spaces_between_special_tokens=spaces)[0] == "<end><end>ab"


def test_output_kinds():
    llm, p = says(["ab", "c", "de"]), SamplingParams(max_tokens=3, logprobs=0)
    kinds = {kind: [o for _, o in llm.stream([[1, 2, 3]], replace(p, output_kind=kind))] for kind in RequestOutputKind}
    texts = {kind.name: [o.outputs[0].text for o in some] for kind, some in kinds.items()}
    assert texts == dict(CUMULATIVE=["ab", "abc", "abcde"], DELTA=["ab", "c", "de"], FINAL_ONLY=["abcde"])
    deltas, whole = kinds[RequestOutputKind.DELTA], kinds[RequestOutputKind.FINAL_ONLY][0].outputs[0]
    assert sum((o.outputs[0].token_ids for o in deltas), []) == whole.token_ids == [0, 1, 2]
    assert sum((o.outputs[0].logprobs for o in deltas), []) == whole.logprobs
    assert sum(o.outputs[0].cumulative_logprob for o in deltas) == pytest.approx(whole.cumulative_logprob)
    assert [o.finished for o in deltas] == [False, False, True]
    out, = ask(llm, [[1, 2, 3]], replace(p, output_kind=RequestOutputKind.DELTA))  # `generate` gives all of it
    assert out.outputs[0].text == "abcde"


# ---- log-probabilities

def test_logprobs_have_vllms_shape():
    llm = tiny()
    out, = ask(llm, "hello", SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2))
    c = out.outputs[0]
    assert len(c.logprobs) == len(c.token_ids) and c.cumulative_logprob == pytest.approx(
        sum(d[id].logprob for d, id in zip(c.logprobs, c.token_ids)))
    for d, id in zip(c.logprobs, c.token_ids):
        assert len(d) == 3 and next(iter(d)) == id and d[id].rank == 1 and isinstance(d[id], Logprob)
        assert [x.rank for x in sorted(d.values(), key=lambda x: -x.logprob)] == [1, 2, 3]
        assert d[id].decoded_token == llm.tokenizer.decode([id], skip_special_tokens=False)
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(out.prompt_token_ids)
    assert all(id in d and 2 <= len(d) <= 3 for id, d in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:]))
    plain, = ask(llm, "hello", SamplingParams(temperature=0, max_tokens=5))
    assert plain.outputs[0].token_ids == c.token_ids
    assert plain.prompt_logprobs is plain.outputs[0].logprobs is plain.outputs[0].cumulative_logprob is None


def test_the_chosen_token_is_always_there():
    out, = ask(tiny(), "hello", SamplingParams(temperature=2.0, seed=1, max_tokens=20, logprobs=0))
    assert all([*d] == [id] for d, id in zip(out.outputs[0].logprobs, out.outputs[0].token_ids))
    assert max(d[id].rank for d, id in zip(out.outputs[0].logprobs, out.outputs[0].token_ids)) > 5


def test_prompt_logprobs_do_not_read_the_cache():
    llm, p = tiny(), SamplingParams(max_tokens=1, prompt_logprobs=0)
    first, again = (ask(llm, "hello, hello, hello", p)[0] for _ in range(2))
    assert first.num_cached_tokens == again.num_cached_tokens == 0 and first.prompt_logprobs == again.prompt_logprobs
    assert ask(llm, "hello, hello, hello", SamplingParams(max_tokens=1))[0].num_cached_tokens > 0


def test_too_many_logprobs():
    for name in "logprobs", "prompt_logprobs":
        for n in 21, -1:
            with pytest.raises(ValueError, match=f"{name}={n}, but max_logprobs=20"):
                ask(tiny(), "a", SamplingParams(**{name: n}))
        out, = ask(tiny(max_logprobs=-1), "ab", SamplingParams(max_tokens=1, **{name: -1}))
        assert len((out.outputs[0].logprobs or out.prompt_logprobs)[-1]) == 258


# ---- n answers

def test_n_answers_are_n_requests_with_seeds_in_a_row():
    llm = tiny()
    out, = ask(llm, "a prompt of some length", SamplingParams(n=3, seed=7, max_tokens=8))
    each = [ask(llm, "a prompt of some length", SamplingParams(seed=7 + i, max_tokens=8))[0].outputs[0].token_ids for i in range(3)]
    assert [c.index for c in out.outputs] == [0, 1, 2] and [c.token_ids for c in out.outputs] == each
    assert out.finished and len({tuple(x) for x in each}) == 3 and empty(llm)


def test_n_answers_share_the_prompts_blocks():
    llm, prompt = tiny(), "twenty-one characters"
    with llm.trace() as trace:
        ask(llm, prompt, SamplingParams(n=4, max_tokens=3))
    cached = [f["n_cached"] for _, name, f in trace.events if name == "admit"]
    assert sorted(cached) == [0, 20, 20, 20]
    most = max(len({b for t in tables for b in t}) for tables in held(trace.events))
    assert most <= 5 + 4*2  # five blocks of the prompt, once; then each its own
    off = tiny(enable_prefix_caching=False)
    assert [len(o.outputs) for o in ask(off, [prompt, "x"], SamplingParams(n=4, max_tokens=3))] == [4, 4] and empty(off)


def held(events):
    tables = {}
    for _, name, f in events:
        if name in ("take", "share"):
            tables.setdefault(f["request"], []).extend(f["blocks"])
        if name == "free":
            tables.pop(f["request"], None)
        yield [list(t) for t in tables.values()]


def test_unseeded_answers_differ():
    out, = ask(tiny(), "abc", SamplingParams(n=4, max_tokens=8))
    assert len({tuple(c.token_ids) for c in out.outputs}) > 1


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("what", ["all", "first", "last", "left"])
def test_n_answers_taken_back_at_any_moment(steps, what):
    llm = tiny(max_num_batched_tokens=16)  # the prompt takes two steps
    free = llm.engine.scheduler.manager.pool.n_free
    stream = llm.stream(["a prompt of 24 letters..", "b"], SamplingParams(n=3, max_tokens=5, ignore_eos=True))
    a, b = llm.texts.answers.values() if (first := next(stream)) else ()
    for _ in range(steps):
        llm.texts.step()
    if what == "left":
        stream.close()
        assert empty(llm) and llm.engine.scheduler.manager.pool.n_free == free
        return
    llm.abort({"all": a.id, "first": a.lead.id, "last": a.choices[-1].request.id}[what])
    last = {i: o for i, o in stream}
    assert last[0].finished and last[1].finished and empty(llm) and first
    reasons = [c.finish_reason for c in last[0].outputs]
    assert all(c.finish_reason == "length" and len(c.token_ids) == 5 for c in last[1].outputs)
    if what == "last" and reasons[-1] == "abort":
        assert reasons[:-1] == ["length"]*2
    assert llm.engine.scheduler.manager.pool.n_free == free


def test_children_of_an_aborted_prompt_end_too():
    llm = tiny(max_num_batched_tokens=8)
    answer = llm.texts.add("a prompt of 24 letters..", SamplingParams(n=3, max_tokens=5))
    llm.texts.step()
    assert len(llm.engine.scheduler) == 1 and len(answer.pending) == 2
    llm.abort(answer.id)
    assert answer.done and [c.finish_reason for c in answer.output().outputs] == ["abort"]*3
    assert list(llm.texts.run([answer])) == [answer] and empty(llm)


def test_n_logprobs_and_stops():
    out, = ask(tiny(), "abcdefgh", SamplingParams(n=2, seed=1, max_tokens=4, logprobs=1, prompt_logprobs=1))
    assert all(len(c.logprobs) == len(c.token_ids) for c in out.outputs) and len(out.prompt_logprobs) == 8 or out.prompt_logprobs


# ---- words and ids

def test_bad_words_are_not_said():
    llm = tiny()
    plain = ask(llm, "abc", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].token_ids
    said = [chr(i) for i in plain if 32 < i < 127]
    assert said
    out = ask(llm, "abc", SamplingParams(temperature=0, max_tokens=12, bad_words=said))[0].outputs[0].token_ids
    assert not {ord(c) for c in said} & {*out}


def test_bad_words_of_the_default_model(default_pair):
    model, tokenizer = default_pair
    llm = LLM(model, tokenizer)
    p = SamplingParams(temperature=0, max_tokens=6)
    plain = ask(llm, "The capital of France is", p)[0].outputs[0].text
    assert "Paris" in plain
    other = ask(llm, "The capital of France is", replace(p, bad_words=["Paris"]))[0].outputs[0].text
    assert "Paris" not in other


@pytest.mark.parametrize("params,match", [
    (dict(logit_bias={258: 1}), "logit_bias: token id 258"), (dict(allowed_token_ids=[258]), "allowed_token_ids: token id 258"),
    (dict(stop_token_ids=[258]), "stop_token_ids: token id 258"),
    (dict(structured_outputs=StructuredOutputsParams(regex="(a")), "structured_outputs"),
    (dict(min_tokens=2, allowed_token_ids=[257]), "all of allowed_token_ids")], ids=str)
def test_what_cannot_be_asked_of_this_model(params, match):
    "Case 29: and the others in the batch are not disturbed"
    llm = tiny()
    stream = llm.stream("abc", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    next(stream)
    with pytest.raises(ValueError, match=match):
        ask(llm, ["fine", "not fine"], [SamplingParams(), SamplingParams(**params)])
    said = [o.outputs[0].token_ids for _, o in stream][-1]
    assert said == ask(llm, "abc", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0].outputs[0].token_ids and empty(llm)


def test_bans_that_leave_nothing_harm_nobody():
    llm = tiny()
    outs = ask(llm, ["abc", "abc"], [SamplingParams(max_tokens=4, allowed_token_ids=[65, 66], bad_words=["A", "B"]),
                                     SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)])
    assert {*outs[0].outputs[0].token_ids} <= {65, 66}
    assert outs[1].outputs[0].token_ids == ask(llm, "abc", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids


def test_parameters_may_change_while_a_request_runs():
    llm, p = tiny(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    stream = llm.stream("abc", p)
    next(stream)
    p.max_tokens = 1
    assert len([o for _, o in stream][-1].outputs[0].token_ids) == 6
    assert len(ask(llm, "abc", p)[0].outputs[0].token_ids) == 1
    p.max_tokens = -1
    with pytest.raises(ValueError, match="max_tokens=-1"):
        ask(llm, "abc", p)


def test_salts():
    for salt in "", 5, b"x":
        with pytest.raises(ValueError, match="cache_salt"):
            ask(tiny(), dict(prompt="abc", cache_salt=salt))


def test_a_processor_of_ones_own():
    class Forced:
        "Says the letters that `extra_args` brings"
        def new_req_logits_processor(self, params):
            word = (params.extra_args or {}).get("say")

            def force(answer, logits):
                out = torch.full_like(logits, -torch.inf)
                out[ord(word[len(answer) % len(word)])] = 0
                return out
            return force if word else None
    llm = tiny(logits_processors=[Forced])
    outs = ask(llm, ["a", "b", "c"], [SamplingParams(max_tokens=5, extra_args=dict(say=w) if w else None) for w in ("hey", "", "you")])
    assert [o.outputs[0].text for o in (outs[0], outs[2])] == ["heyhe", "youyo"]
    with pytest.raises(ValueError, match="logits_processors"):
        tiny(logits_processors=[lambda *_: None])


def test_defaults_of_the_models_folder(tmp_path, caplog):
    from pagedlm.llm import default_params
    (tmp_path/"generation_config.json").write_text(json.dumps(dict(temperature=.3, top_k=7, max_new_tokens=9, do_sample=True, eos_token_id=[1, 2])))
    assert default_params(tmp_path) == dict(temperature=.3, top_k=7, max_tokens=9)
    assert "generation_config" in caplog.text
    (tmp_path/"generation_config.json").write_text(json.dumps(dict(top_p=7)))
    with pytest.raises(ValueError, match="top_p=7"):
        default_params(tmp_path)
    llm = tiny()
    assert llm.get_default_sampling_params() == SamplingParams()
    llm.default_params = dict(max_tokens=2)
    assert len(ask(llm, "abc")[0].outputs[0].token_ids) <= 2
