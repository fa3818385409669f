"Answers of a given form: each kind, in each situation, on each runner; random forms on random models; what is refused, and how long that takes"
import gc
import json
import random
import re
import sys
import threading
import time
import weakref
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import test_matrix
from common import mutant
from test_llm import ask, empty, tiny
from test_oracle import model_of
from test_tokenizer import INNERS

from pagedlm import LLM, SamplingParams, grammar
from pagedlm.core import StructuredOutputsParams
from pagedlm.grammar import Grammar, Spelling, closed, to_grammar
from pagedlm.model import tiny_config, tiny_model
from pagedlm.tokenizer import ByteTokenizer, Tokenizer

pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("one_thread")

PERSON = dict(type="object", properties=dict(name=dict(type="string", maxLength=8), age=dict(type="integer", minimum=0, maximum=120)),
              required=["name", "age"], additionalProperties=False)
CALL = dict(type="structural_tag", triggers=["<f"], structures=[dict(begin="<f=add>", schema=PERSON, end="</f>")])
KINDS = {  # what is asked: is this text all right?
    "json": (dict(json=PERSON), lambda s: jsonschema.validate(json.loads(s), PERSON) is None),
    "json text": (dict(json=json.dumps(PERSON), disable_any_whitespace=True), lambda s: json.dumps(json.loads(s), separators=(",", ":"), ensure_ascii=False) == s or "\\" in s),
    "json_object": (dict(json_object=True), lambda s: isinstance(json.loads(s), dict)),
    "regex": (dict(regex=r"[a-c]{2,9}![0-9]+;"), re.compile(r"[a-c]{2,9}![0-9]+;").fullmatch),
    "choice": (dict(choice=["yes", "no", 'per"haps', "🥭"]), {"yes", "no", 'per"haps', "🥭"}.__contains__),
    "lark": (dict(grammar='start: "(" start ")" | "x" | "y" start'), lambda s: s.count("(") == s.count(")") and set(s) <= set("(xy)")),
    "gbnf": (dict(grammar='root ::= "a" [0-9]+ ("b" | "c")'), re.compile("a[0-9]+[bc]").fullmatch),
    "structural_tag": (dict(structural_tag=json.dumps(CALL)), lambda s: True)}


def form(**asked):
    return StructuredOutputsParams(**asked)


def params(kind, **kw):
    return SamplingParams(**dict(temperature=1.0, seed=3, max_tokens=50, structured_outputs=form(**KINDS[kind][0])) | kw)


def said(llm, prompts, params):
    return [[(c.text, c.token_ids, c.finish_reason) for c in o.outputs] for o in ask(llm, prompts, params)]


def opened(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


# ---- in any batch, on any runner

WISHES = {kind: params(kind) for kind in KINDS} | {
    "n": params("json", n=3), "greedy": params("json", temperature=0), "stop": params("json", stop=['"age'], include_stop_str_in_output=True),
    "cut": params("json", max_tokens=5), "min_tokens": params("choice", min_tokens=12), "ignore_eos": params("choice", ignore_eos=True, max_tokens=9),
    "penalties": params("json", repetition_penalty=1.4, frequency_penalty=.5), "bad words": params("regex", bad_words=["a", "!"]),
    "logprobs": params("regex", logprobs=2), "allowed": params("regex", allowed_token_ids=[*b"ab!12;"], top_k=3)}
PLACES = {"mixed": {}, "preempted": dict(num_gpu_blocks_override=50), "chunked": dict(long_prefill_token_threshold=3), "ahead": dict(async_scheduling=True),
          "eager": dict(enforce_eager=True)}


@pytest.fixture(scope="module")
def alone():
    llm = tiny(num_gpu_blocks_override=160)
    return {wish: said(llm, "tell me", p)[0] for wish, p in WISHES.items()}


@pytest.mark.parametrize("place", PLACES)
def test_answers_are_what_they_are_alone(place, alone):
    llm = tiny(**dict(num_gpu_blocks_override=300) | PLACES[place])
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    prompts, every = ["tell me"]*len(WISHES) + ["something else", "tell me nothing"], [*WISHES.values(), free, free]
    with llm.trace() as trace:
        answers = said(llm, prompts, every)
    assert dict(zip(WISHES, answers)) == alone and empty(llm)
    assert said(llm, "tell me nothing", free) == answers[-1:]
    if place == "preempted":
        assert sum(name == "preempt" for _, name, _ in trace.events) > 3


def test_what_is_complete_has_its_form(alone):
    for kind, (_, right) in KINDS.items():
        for text, ids, reason in alone[kind]:
            assert reason == "length" and len(ids) == 50 or right(text), (kind, text)
    assert len({text for text, *_ in alone["n"]}) == 3
    assert alone["json"][0][0].startswith(alone["cut"][0][0]) and alone["cut"][0][2] == "length"
    text, ids, reason = alone["min_tokens"][0]
    assert KINDS["choice"][1](text) and len(ids) >= 12 and reason == "stop"
    text, ids, reason = alone["ignore_eos"][0]
    assert KINDS["choice"][1](text) and ids[len(text.encode()):] == [257]*(9 - len(text.encode())) and reason == "length"
    assert "a" not in alone["bad words"][0][0] and "!" in alone["bad words"][0][0]  # where only it may come, it comes
    assert set(alone["allowed"][0][0]) <= set("ab!12;")


PIECES = [*'{}[]":,-+.eE 0123456789', *"abcdefghijklmno", '{"', '":', '", "', "ab", "abc", "12", "}}", '"a"', "true", "null", "false", "[[", '"]', " 1", "\\", "n ", "u00", "<pad>", "<end>"]


class Letters(ByteTokenizer):
    "64 tokens for JSON, some of them of several letters"
    vocab_size, bos_id, eos_ids, special_ids = 64, None, (63,), frozenset((62, 63))
    pieces = [*PIECES[:-2], *(f"x{i}" for i in range(64 - len(PIECES))), *PIECES[-2:]]

    def piece(self, id, first=False): return self.pieces[id].encode() if id < 64 else b""
    def encode(self, text, add_special_tokens=True): return Spelling(self, 64).spell(text.encode())


FORMS = {"list": dict(json=dict(type="array", items=dict(type="integer", minimum=-99, maximum=99), minItems=2, maxItems=4)),
         "nest": dict(grammar='start: "[" (start ("," start)*)? "]" | /[0-9]/')}


def test_real_grammars_in_the_matrix(monkeypatch):
    "The situations of test_matrix, where grammars are played"
    features = {name: dict(structured_outputs=form(**asked), max_tokens=16, eos=[63], temperature=1.0, seed=4) for name, asked in FORMS.items()}
    monkeypatch.setattr(test_matrix, "FEATURES", features | dict(greedy={}))
    monkeypatch.setitem(test_matrix.CHOOSES, "grammar", Grammar(Letters(), 64))
    model, n = model_of(test_matrix.torch.float32, 2, 16), 0
    for feature in features:
        world, r = test_matrix.alone(test_matrix.Plain, model, feature)
        world.drain()
        want = r.output, r.finish_reason
        assert want[1] == "length" or want[0][-1] == 63
        for situation in test_matrix.SITUATIONS:
            for make in test_matrix.RUNNERS.values():
                world, r = situation(make, model, feature)
                world.drain()
                assert (r.output, r.finish_reason) == want, (feature, situation, make)
                n += 1
    print(n, "combinations")


# ---- random forms

def random_schema(rnd, depth=2):
    kind = rnd.choice(["string", "integer", "boolean", "enum", "null"] + ["object", "array", "anyOf"]*2*(depth > 0))
    low, high = sorted(rnd.randint(-50, 50) for _ in range(2))
    size = dict(zip(("min", "max"), sorted(rnd.randint(0, 3) for _ in range(2))))
    if kind == "string":
        return dict(type="string") | rnd.choice([dict(minLength=size["min"], maxLength=size["max"]), dict(pattern="^[a-f]{1,4}$"), dict(enum=["a b", 'q"\\', "🥭é"])])
    if kind == "integer":
        return dict(type="integer", minimum=low, maximum=high)
    if kind == "enum":
        return dict(enum=[rnd.choice([1, "one", None, True, [1, 2], dict(a=1)]), low])
    if kind == "array":
        return dict(type="array", items=random_schema(rnd, depth - 1), minItems=size["min"], maxItems=size["max"])
    if kind == "anyOf":
        return dict(anyOf=[random_schema(rnd, depth - 1) for _ in range(2)])
    if kind == "object":
        names = rnd.sample(["a", "b c", 'd"', "é", "properties"], rnd.randint(0, 3))
        return dict(type="object", properties={n: random_schema(rnd, depth - 1) for n in names}, additionalProperties=False,
                    required=[n for n in names if rnd.random() < .7])
    return dict(type=kind)


def test_random_schemas_on_random_models():
    rnd, ended = random.Random(7), 0
    for seed in range(3):
        llm = LLM(tiny_model(tiny_config(), seed=seed), ByteTokenizer(), block_size=4, num_gpu_blocks_override=300)
        schemas = [random_schema(rnd) for _ in range(16)]
        asked = [form(json=s, disable_any_whitespace=rnd.random() < .3, whitespace_pattern=None) for s in schemas]
        every = [SamplingParams(temperature=rnd.choice([0, 1, 2]), seed=i, max_tokens=rnd.choice([3, 60]), structured_outputs=a) for i, a in enumerate(asked)]
        for o, schema, p in zip(ask(llm, ["x"]*16, every), schemas, every):
            c = o.outputs[0]
            if c.finish_reason == "stop":
                jsonschema.validate(json.loads(c.text), schema)
                ended += 1
            m = llm.grammar(p)
            for n, id in enumerate(c.token_ids):
                assert id in opened(m(c.token_ids[:n])), (schema, c.text)
    assert 25 <= ended < 48, ended


def tokenizer_of(kind, folder):
    inner = INNERS[kind]()
    inner.add_special_tokens(["<s>", "</s>", "<a b>"])
    inner.save(str(folder/"tokenizer.json"))
    return Tokenizer(folder, eos_ids=[inner.token_to_id("</s>")])


@pytest.mark.parametrize("kind", INNERS)
def test_texts_are_what_the_tokenizer_makes_of_the_ids(kind, tmp_path):
    "Whatever way it spells blanks and bytes: drawn from the masks, decoded, matched by another library"
    tokenizer, n = tokenizer_of(kind, tmp_path), 0
    g = Grammar(tokenizer, tokenizer.vocab_size + 7)
    for regex in "[ab é日]{1,9}", "a( b| a|é){2,5}", " a *b", "(🦜|�|é| )+b", '"(<a b>|</s>a)*"b':
        for seed in range(5):
            rnd = random.Random(seed)
            try:
                m, ids = g(SamplingParams(structured_outputs=form(regex=regex))), []
            except ValueError as e:
                assert kind == "plain" or "nothing can match" in str(e)  # of words that lack letters
                continue
            while len(ids) < 40 and (id := rnd.choice(opened(m(ids)))) not in tokenizer.eos_ids:
                assert tokenizer.token(id) and id not in tokenizer.special_ids
                ids.append(id)
            if id in tokenizer.eos_ids:
                text = tokenizer.decode(ids)
                hidden = " "*(kind == "plain" or regex[0] == " " and kind in ("llama", "metaspace"))  # no text begins with a blank
                assert re.fullmatch(regex, text) or re.fullmatch(regex, hidden + text), (regex, text)
                n += 1
    assert n >= 5 or kind == "plain"


def test_masks_of_long_tokens_are_those_of_an_automaton(tmp_path):
    "Independently: a token may come if the text with it can still become a match"
    tokenizer = tokenizer_of("byte_level", tmp_path)
    begins = re.compile(r"(th?|the|the |the [a-t]{1,3}|the [a-t]{3}[0-9]*)?", re.A)
    g = Grammar(tokenizer, tokenizer.vocab_size + 40)
    for text in "", "the ", "the ab", "the abc", "the abc12":
        ids = tokenizer.encode(text, add_special_tokens=False)
        got = opened(g(SamplingParams(structured_outputs=form(regex="the [a-t]{3}[0-9]+")))(ids))
        plain = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids and (p := tokenizer.piece(i)).isascii()
                 and begins.fullmatch(text + p.decode())]
        assert got == sorted(plain + [*tokenizer.eos_ids]*(text == "the abc12")) or text == "" and len(got) == 1 and got[0] in plain


# ---- where an answer begins and ends

class Two(ByteTokenizer):
    "Any of two ids ends an answer"
    eos_ids = 256, 257


def test_every_end_is_open_at_the_end():
    g = Grammar(Two(), 300)
    m = g(SamplingParams(structured_outputs=form(regex="ab*")))
    assert opened(m([])) == [97] and opened(m([97])) == [98, 256, 257] and opened(m([97, 256])) == [256, 257] == opened(m([97, 256, 98]))
    late = g(SamplingParams(structured_outputs=form(regex="ab*")))
    assert opened(late([97, 98, 257])) == [256, 257]  # after a preemption: all at once


def test_special_tokens_are_no_text():
    m = Grammar(ByteTokenizer(), 300)(SamplingParams(structured_outputs=form(json=dict(type="string"))))
    for text in '"', '"<', '"<bo':
        assert not {*opened(m(list(text.encode())))} & {256, 257, 258, 299}
    class Chat(Letters):
        def encode(self, text, add_special_tokens=True): return [63 if text == "<end>" else 0]*3
    assert Spelling(Chat(), 64)("<end>") == [] and Spelling(Chat(), 64)('{"ab') == [Letters.pieces.index('{"'), Letters.pieces.index("ab")]


class Shy(Letters):
    "A blank at the start of an answer is not shown"
    def piece(self, id, first=False): return super().piece(id).lstrip() if first else super().piece(id)


def test_a_blank_that_is_not_shown_does_not_count():
    one, blank = Letters.pieces.index("1"), Letters.pieces.index(" 1")
    def starts(tokenizer, **asked): return opened(Grammar(tokenizer, 64)(SamplingParams(structured_outputs=form(**asked)))([]))
    assert starts(Letters(), regex=" ?1a") == sorted([one, blank, Letters.pieces.index(" ")])
    assert starts(Shy(), regex=" ?1a") == [one]
    assert starts(Shy(), regex=" 1a")  # nothing else would be left


def test_an_answer_that_is_too_complex_ends(caplog, monkeypatch):
    llm, free = tiny(), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    p = SamplingParams(seed=1, max_tokens=60, structured_outputs=form(grammar='start: /[ab]{4}[cd]/ x*\nx: ' + " | ".join(f'"b{i}"' for i in range(500))))
    want = said(tiny(), "abc", free)
    def outcome():
        caplog.clear()
        outs = said(llm, ["abc", "abc"], [p, free])
        assert outs[1:] == want and "an answer ends before its form does" in caplog.text and not llm.grammar.kept and empty(llm)
        return outs[0][0]
    monkeypatch.setitem(grammar.LIMITS, "max_items_in_row", 100)
    assert re.fullmatch("[ab]{4}[cd]", outcome()[0]) and "Current row has" in caplog.text
    monkeypatch.undo()
    llm.grammar.check(p)
    monkeypatch.setattr(grammar, "MASK_SECONDS", -1)
    assert outcome()[:2] == ("", [257]) and "a mask took" in caplog.text


# ---- what is refused

REFUSED = [
    (dict(regex="(a"), "unclosed group"), (dict(regex="(?=a)b"), "look-around"), (dict(regex=5), "must be a string"), (dict(choice=[]), "at least one"),
    (dict(choice="yes"), "list"), (dict(choice=["a", 1]), "string"), (dict(choice=["\ud83d"]), "surrogates"), (dict(json="{"), "property name"),
    (dict(json=True), "schema"), (dict(json="3"), "schema"), (dict(json=dict(type="objekt")), "objekt"), (dict(json={"$ref": "#/no"}), "/no"),
    (dict(json={"$ref": "https://example.org/x"}), "example.org"), (dict(json=dict(uniqueItems=True)), "uniqueItems"), (dict(json={"a": {1}}), "set"),
    (dict(json=dict(allOf=[dict(type="null"), dict(type="string")])), "nsatisfiable"), (dict(json=dict(enum=[])), "empty"), (dict(json_object=False), "True"),
    (dict(json={"$defs": dict(a={"$ref": "#/$defs/a"}), "$ref": "#/$defs/a"}), "nothing can match"), (dict(grammar="start: word"), "word"),
    (dict(grammar="hello"), "GBNF"), (dict(grammar='{"grammars": []}'), "notation"), (dict(grammar="start: A\nA: /a/ & /b/"), "nothing can match"),
    (dict(structural_tag="{}"), "structures"), (dict(structural_tag='{"triggers": ["<x"], "structures": [{"begin": "<f", "schema": {}, "end": ""}]}'), "triggers"),
    (dict(structural_tag='{"type": "structural_tag", "format": {"type": "const_string"}}'), "structures"), (dict(json={}, whitespace_pattern=" *"), "64 blanks"),
    (dict(json={}, whitespace_pattern="x"), "64 blanks"), (dict(json={}, whitespace_pattern="("), "unclosed"), (dict(regex="a", whitespace_pattern=" "), "whitespace_pattern"),
    (dict(json={}, whitespace_pattern=" ", disable_any_whitespace=True), "disable_any_whitespace"), (dict(regex="a"*300_000), "300,000 characters, but at most")]


def test_what_is_refused_is_refused_before_anything_runs():
    llm, p = tiny(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    want, stream = said(tiny(), "abc", p)[0], llm.stream("abc", p)
    next(stream)
    for asked, why in REFUSED:
        with pytest.raises(ValueError, match=f"prompt 1: structured_outputs: {[*asked][0]}=.*{re.escape(why)}"):
            ask(llm, ["fine", "not fine"], [SamplingParams(), SamplingParams(structured_outputs=form(**asked))])
    o = [o for _, o in stream][-1].outputs[0]
    assert (o.text, o.token_ids, o.finish_reason) == want[0] and empty(llm)


def chain(n, link):
    return {"$defs": {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(n)} | {f"d{n}": dict(type="string")}, "$ref": "#/$defs/d0"}


def deep(n, of="items"):
    out = {}
    for _ in range(n):
        out = {of: out}
    return out


NASTY = [
    dict(regex="(a{1,1000}){1,1000}"), dict(regex="((a{1,100}){1,100}){1,100}b{1,1000}"), dict(regex=".*a.{30}"), dict(regex="(" * 9000 + "a" + ")" * 9000), dict(regex="a" + "?"*9000),
    dict(regex=r"(\p{L}\w\d[^a]){1,900}"), dict(regex="a|"*40_000), dict(json=deep(120)), dict(json=deep(3000)), dict(json='{"items":'*9000), dict(json="["*9000),
    dict(json=chain(1400, lambda ref: {"$ref": ref})), dict(json=chain(1200, lambda ref: dict(allOf=[{"$ref": ref}]))),
    dict(json=chain(1200, lambda ref: dict(anyOf=[{"$ref": ref}, dict(type="null")]))), dict(json=dict(enum=[f"value {i}" for i in range(5000)])),
    dict(json=dict(type="array", minItems=100_000)), dict(json=dict(type="string", maxLength=1_000_000)), dict(json=dict(type="integer", multipleOf=999_999_999)),
    dict(choice=[f"value {i}" for i in range(5000)]), dict(grammar="start: " + "("*9000 + '"a"' + ")"*9000), dict(grammar='start: "a"' + "?"*40_000),
    dict(grammar='start: "a"' + ' | "b"'*8000), dict(grammar="start: A0\n" + "\n".join(f"A{i}: A{i + 1}" for i in range(5000)) + '\nA5000: "a"'),
    dict(grammar="start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(5000)) + '\na5000: "a"'), dict(grammar="start: start"), dict(grammar="start: A\nA: A"),
    dict(grammar="root ::= " + "("*5000 + '"a"' + ")"*5000), dict(grammar="start: A\nA: /(.*a.{10})*/ & ~/(.*b.{10})*/ & /(.*c.{9})*/")]


def test_nothing_nasty_hangs_or_kills():
    g, slowest = Grammar(ByteTokenizer(), 258), 0
    g.check(SamplingParams(structured_outputs=form(regex="a")))
    for asked in NASTY:
        start, p = time.perf_counter(), SamplingParams(structured_outputs=form(**asked))
        try:
            m, ids, rnd = g(p), [], random.Random(1)
        except ValueError as e:
            assert len(str(e)) < 900
        else:
            for _ in range(12):
                ids.append(rnd.choice(opened(m(ids))))
        slowest = max(slowest, time.perf_counter() - start)
    assert slowest < 3, slowest


def test_the_library_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    llm = tiny()
    with pytest.raises(ValueError, match=r"llguidance is not installed: pip install 'pagedlm\[grammar\]'"):
        ask(llm, "abc", params("regex"))
    assert ask(llm, "abc", SamplingParams(max_tokens=2)) and empty(llm)


def test_a_model_whose_answers_never_end():
    class Endless(ByteTokenizer):
        eos_ids = ()
    llm = LLM(tiny_model(tiny_config(), seed=1), Endless(), num_gpu_blocks_override=40)
    with pytest.raises(ValueError, match="no token of this model ends an answer"):
        ask(llm, "abc", params("regex"))


# ---- state

def test_nothing_is_built_before_it_is_asked_for():
    llm = tiny()
    ask(llm, "abc", SamplingParams(max_tokens=2))
    assert llm.grammar.words is None and not llm.grammar.kept


def test_a_form_may_change_while_a_request_runs():
    llm, schema = tiny(max_num_seqs=1), json.loads(json.dumps(PERSON))
    p = params("json", max_tokens=12)
    p.structured_outputs.json = schema
    want = said(tiny(), ["abc", "abc"], p)
    stream = llm.stream(["abc", "abc"], p)
    next(stream)
    schema["type"] = "nonsense"
    last = {i: o.outputs[0] for i, o in stream}
    assert [[(c.text, c.token_ids, c.finish_reason)] for c in last.values()] == want


def test_few_are_kept_and_forgotten_ones_compiled_again():
    llm = tiny(max_num_seqs=2)
    llm.grammar.max_kept = 1
    every = [SamplingParams(seed=i, max_tokens=30, structured_outputs=form(regex=f"[{c}]{{3,6}}")) for i, c in enumerate("abcdef")]
    for c, (answer,) in zip("abcdef", said(llm, ["x"]*6, every)):
        assert re.fullmatch(f"{c}{{3,6}}", answer[0])
    assert len(llm.grammar.kept) == 1


def test_abort_lets_go():
    llm = tiny()
    for _, o in llm.stream(["abc"]*3, params("json_object", n=2, max_tokens=50)):
        llm.abort(o.request_id)
    assert empty(llm)
    ask(llm, "abc", SamplingParams(max_tokens=1))
    assert not llm.engine.run.chooser.wishes


def test_two_llms_in_two_threads():
    llms, every, found = [tiny(num_gpu_blocks_override=200) for _ in range(2)], [params(kind, seed=i) for i, kind in enumerate(KINDS)], {}
    want = said(tiny(num_gpu_blocks_override=200), ["abc"]*len(every), every)
    def run(i): found[i] = said(llms[i], ["abc"]*len(every), every)
    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert found[0] == found[1] == want


def test_closed():
    schema = dict(type="object", properties=dict(a=dict(properties=dict(b={})), properties=dict(enum=[dict(properties={})]), c=dict(properties={}, additionalProperties=True)))
    want = dict(type="object", additionalProperties=False, properties=dict(
        a=dict(properties=dict(b={}), additionalProperties=False), properties=dict(enum=[dict(properties={})]), c=dict(properties={}, additionalProperties=True)))
    assert closed(schema) == want and [*closed(schema)][-1] == "additionalProperties"
    assert json.loads(to_grammar(form(json=schema, disable_additional_properties=True)))["grammars"][0]["json_schema"]["properties"] == want["properties"]


def test_properties_keep_their_order():
    llm = tiny()
    first, second = (form(json=dict(PERSON, properties=dict(sorted(PERSON["properties"].items(), reverse=r)))) for r in (False, True))
    p = SamplingParams(max_tokens=7, structured_outputs=first)
    assert [ask(llm, "x", q)[0].outputs[0].text[:6] for q in (p, replace(p, structured_outputs=second))] == ['{"age"', '{"name']


# ---- the tests see it

PLANTED = {
    "only one of the ends is open": ("return mask | self.closing if", "return mask if"),
    "blanks without end": ('c + " ?"*(not tight)', 'c + " *"'),
    "a blank that is not shown": ("if piece and t.piece(i, True) != piece", "if False"),
    "ids without a spelling": ('if tokenizer.token(i) else b""', 'if tokenizer.token(i) else b" "'),
    "special tokens are text": ("self.special_token_ids = [i for i in self.special if i < V]", "self.special_token_ids = []"),
    "it reads what it has read": ("ids[self.n_read:], len(ids)", "ids, len(ids)")}


def is_wrong(module):
    "Does a grammar of this module let through what it should not?"
    def masks(tokenizer, steps, **asked):
        m = module.Grammar(tokenizer, tokenizer.vocab_size + 6)(SamplingParams(structured_outputs=form(**asked)))
        return [opened(m(steps[:n])) for n in range(len(steps) + 1)]
    return (masks(Two(), [*b"ab", 256, 98], regex="ab*") != [[97], [98, 256, 257], [98, 256, 257], [256, 257], [256, 257]]
            or 32 in masks(ByteTokenizer(), [*b'{"a": '], json_object=True)[-1]
            or masks(Shy(), [], regex=" ?1a") != [[Letters.pieces.index("1")]]
            or any({*range(62, 70)} & {*m} for m in masks(Letters(), [Letters.pieces.index('"')], json=dict(type="string"))))


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_noticed(bug, tmp_path):
    assert not is_wrong(grammar) and is_wrong(mutant(grammar, *PLANTED[bug], tmp_path/"planted.py"))


def test_what_a_refused_grammar_held_is_let_go():
    "Without waiting for Python to look for cycles: one of a few hundred bytes may hold a hundred megabytes"
    class Big: pass
    held = []
    def compile():
        big = Big()
        held.append(weakref.ref(big))
        raise ValueError("no")
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no"): grammar.in_a_deep_thread(compile)
        assert held[0]() is None
    finally: gc.enable()
