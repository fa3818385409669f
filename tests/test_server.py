"The server as its clients meet it: OpenAI's own client, raw sockets, requests that a machine made up"
import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread

import pytest

openai = pytest.importorskip("openai")

from pagedlm import LLM, SamplingParams
from pagedlm.llm import Choice
from pagedlm.model import tiny_config, tiny_model
from pagedlm.server import Limits, Server
from pagedlm.tokenizer import ByteTokenizer

TEMPLATE = ("{% if tools %}{{ tools[0].function.name }}: <tool_call> {% endif %}{% for m in messages %}{{ m.role }}: "
            "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.city }}{% endif %}{{ '\\n' }}{% endfor %}assistant:")
HELLO = [dict(role="user", content="Hello")]
WEATHER = dict(type="function", function=dict(name="weather", parameters=dict(
    type="object", properties=dict(city=dict(type="string", maxLength=8)), required=["city"], additionalProperties=False)))


def tiny(**kw):
    kw = dict(block_size=4, num_gpu_blocks_override=300, max_num_seqs=16, chat_template=TEMPLATE, enforce_eager=True) | kw
    return LLM(tiny_model(tiny_config(), seed=1), ByteTokenizer(), **kw)


@pytest.fixture(scope="module", autouse=True)
def few_threads(one_thread): pass


@pytest.fixture(scope="module")
def server():
    with Server(tiny(), "tiny", max_queue=8, grace=5) as s:
        yield s


@pytest.fixture(scope="module")
def alone():
    "The same model, asked offline"
    llm = tiny()
    return lambda prompt, **kw: llm.generate(prompt, SamplingParams(**kw), use_tqdm=False)[0].outputs


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    "After every test: no request, every block free"
    yield
    if "server" in request.fixturenames:
        empty(request.getfixturevalue("server"))


def wait_for(fact, seconds=10):
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, "in vain"
        time.sleep(.005)


def pool_of(server):
    return server.engine.llm.engine.scheduler.manager.pool


def empty(server, seconds=10):
    end, pool = time.monotonic() + seconds, pool_of(server)
    while time.monotonic() < end:
        if not server.engine.seats.taken and not len(server.engine.llm.engine.scheduler) and pool.n_free == pool.n_blocks - 1:
            assert not server.engine.llm.texts.answers and not server.engine.desk.boxes
            return server.engine.llm.engine.scheduler.manager.check()
        time.sleep(.005)
    raise AssertionError(f"{server.engine.seats.taken} live, {pool.n_free} of {pool.n_blocks - 1} free")


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=30) as c:
        yield c


def chat(client, **kw):
    return client.chat.completions.create(**dict(model="tiny", messages=HELLO, temperature=0, max_completion_tokens=8) | kw)


def complete(client, **kw):
    return client.completions.create(**dict(model="tiny", prompt="Once", temperature=0, max_tokens=8) | kw)


def address(server):
    return "127.0.0.1", int(server.url.rpartition(":")[2])


def send(server, method, path, body=None, headers=()):
    with closing(HTTPConnection(*address(server), timeout=30)) as http:
        data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        http.request(method, path, data, {"Content-Type": "application/json", **dict(headers)})
        r = http.getresponse()
        return r.status, r.headers, r.read()


def refused(server, body, path="/v1/completions", status=400, headers=()):
    got, _, text = send(server, "POST", path, body, headers)
    error = json.loads(text)["error"]
    assert got == status and set(error) == {"message", "type", "param", "code"}, (got, text)
    return error


# ---- completions, with OpenAI's client

def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 256
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.models.retrieve("gpt-5")


def test_a_completion_is_what_the_engine_says_alone(client, alone):
    r = complete(client)
    assert r.object == "text_completion" and r.model == "tiny" and r.id.startswith("cmpl-")
    assert r.choices[0].text == alone("Once", temperature=0, max_tokens=8)[0].text
    assert r.choices[0].finish_reason == "length" and r.choices[0].logprobs is None
    assert (r.usage.prompt_tokens, r.usage.completion_tokens, r.usage.total_tokens) == (5, 8, 13)


def test_a_stream_adds_up_to_the_same(client):
    chunks = list(complete(client, stream=True, max_tokens=30))
    assert "".join(c.choices[0].text for c in chunks) == complete(client, max_tokens=30).choices[0].text
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert sum(c.choices[0].finish_reason is not None for c in chunks) == 1
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks)


def test_usage_in_a_stream(client):
    *chunks, last = complete(client, stream=True, stream_options=dict(include_usage=True), n=2, temperature=1, seed=3)
    assert last.choices == [] and last.usage.completion_tokens == 16 and last.usage.prompt_tokens == 5
    assert all(c.usage is None and c.choices for c in chunks)


def test_prompts_in_all_their_forms(client, alone):
    ids = [256, *b"Once"]
    one = alone("Once", temperature=0, max_tokens=8)[0].text
    assert complete(client, prompt=ids).choices[0].text == one
    for many in (["Once", "Twice"], [ids, [256, *b"Twice"]]):
        texts = [c.text for c in complete(client, prompt=many).choices]
        assert texts == [one, alone("Twice", temperature=0, max_tokens=8)[0].text]


def test_several_answers_to_several_prompts(client, alone):
    asked = dict(prompt=["Once", "Twice"], n=3, temperature=1, seed=5, max_tokens=20)
    whole = complete(client, **asked)
    assert [c.index for c in whole.choices] == [*range(6)]
    expected = [o.text for p in asked["prompt"] for o in alone(p, n=3, temperature=1, seed=5, max_tokens=20)]
    assert [c.text for c in whole.choices] == expected
    texts, ends = [""]*6, [0]*6
    for c in complete(client, **asked, stream=True):
        texts[c.choices[0].index] += c.choices[0].text
        ends[c.choices[0].index] += c.choices[0].finish_reason is not None
    assert texts == expected and ends == [1]*6


def test_stop_strings(client, alone):
    text = alone("Once", temperature=0, max_tokens=40)[0].text
    stop = text[10:13]
    for kw in (dict(stop=stop), dict(stop=["nowhere in it", stop])):
        r = complete(client, max_tokens=40, **kw)
        assert r.choices[0].text == text[:text.index(stop)] and r.choices[0].finish_reason == "stop"
        assert "".join(c.choices[0].text for c in complete(client, max_tokens=40, stream=True, **kw)) == r.choices[0].text
    kept = complete(client, max_tokens=40, stop=stop, extra_body=dict(include_stop_str_in_output=True)).choices[0].text
    assert kept == text[:text.index(stop) + 3]


def test_echo_and_logprobs(client):
    r = complete(client, echo=True, logprobs=2, max_tokens=3).choices[0]
    told = r.logprobs
    assert r.text.startswith("Once") and told.tokens[:2] == ["<bos>", "O"] and len(told.tokens) == 5 + 3
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    assert all(p <= 0 for p in told.token_logprobs[1:]) and told.text_offset[:3] == [0, 5, 6]
    assert all(t in top and 1 <= len(top) <= 3 for t, top in zip(told.tokens[1:], told.top_logprobs[1:]))
    streamed = [c.choices[0] for c in complete(client, echo=True, logprobs=2, max_tokens=3, stream=True)]
    assert "".join(c.text for c in streamed) == r.text
    assert [t for c in streamed if c.logprobs for t in c.logprobs.token_logprobs] == told.token_logprobs
    scored = complete(client, echo=True, logprobs=1, max_tokens=0)
    assert scored.choices[0].text == "Once" and scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.token_logprobs == told.token_logprobs[:5]


def test_seeds_and_penalties(client, alone):
    a, b = (complete(client, temperature=1, seed=s, max_tokens=20).choices[0].text for s in (1, 2))
    assert a == complete(client, temperature=1, seed=1, max_tokens=20).choices[0].text != b
    how = dict(presence_penalty=1.5, frequency_penalty=.5, logit_bias={"65": 20})
    r = complete(client, max_tokens=20, **how, extra_body=dict(repetition_penalty=1.2, top_k=5, min_tokens=3))
    how["logit_bias"] = {65: 20}
    expected = alone("Once", temperature=0, max_tokens=20, repetition_penalty=1.2, top_k=5, min_tokens=3, **how)
    assert r.choices[0].text == expected[0].text and "A" in r.choices[0].text


def test_the_prefix_cache_is_told(client):
    prompt = "A beginning that is long enough for several blocks."
    complete(client, prompt=prompt)
    assert complete(client, prompt=prompt + " And more").usage.prompt_tokens_details.cached_tokens >= 48
    other = complete(client, prompt=prompt, extra_body=dict(cache_salt="mine"))
    assert other.usage.prompt_tokens_details.cached_tokens == 0


# ---- chats

def test_a_chat(client, alone):
    r = chat(client)
    prompt = "user: Hello\nassistant:"
    assert r.object == "chat.completion" and r.choices[0].message.role == "assistant" and not r.choices[0].message.tool_calls
    assert r.choices[0].message.content == alone([list(prompt.encode())], temperature=0, max_tokens=8)[0].text
    assert r.usage.prompt_tokens == len(prompt)


def test_a_streamed_chat(client):
    chunks = list(chat(client, stream=True, n=2, temperature=1, seed=1))
    first = {c.choices[0].index: c.choices[0].delta for c in reversed(chunks)}
    assert all(d.role == "assistant" and d.content == "" for d in first.values())
    whole = chat(client, n=2, temperature=1, seed=1)
    for i in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == i]
        assert "".join(c.delta.content or "" for c in mine) == whole.choices[i].message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]


def test_messages_in_all_their_forms(client):
    parts = [dict(type="text", text="one"), dict(type="text", text="two")]
    a = chat(client, messages=[dict(role="developer", content="Be kind."), dict(role="user", content=parts)])
    b = chat(client, messages=[dict(role="system", content="Be kind."), dict(role="user", content="one\ntwo")])
    assert a.choices[0].message.content == b.choices[0].message.content
    again = [*HELLO, a.choices[0].message, dict(role="user", content="More")]  # as clients keep a conversation
    assert chat(client, messages=again).usage.prompt_tokens > a.usage.prompt_tokens


def test_chat_logprobs(client):
    told = chat(client, logprobs=True, top_logprobs=3, temperature=1, seed=4).choices[0].logprobs.content
    assert len(told) == 8
    for t in told:
        ps = [x.logprob for x in t.top_logprobs]
        assert len(ps) == 3 and ps == sorted(ps, reverse=True) and t.logprob <= ps[0] + 1e-6
        assert len(t.bytes) >= 1
    assert chat(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    streamed = [c.choices[0].logprobs for c in chat(client, logprobs=True, top_logprobs=3, temperature=1, seed=4, stream=True)]
    assert [t.logprob for p in streamed if p for t in p.content] == [t.logprob for t in told]


def saying(server, text):
    "Make the model say a text: a runner's sampler that knows what comes next"
    import torch
    chooser = server.engine.llm.engine.run.chooser
    ids, sampler = iter([*text.encode(), 257]), chooser.sampler
    chooser.sampler = lambda logits, *how: torch.tensor([next(ids)])
    return lambda: setattr(chooser, "sampler", sampler)


CALL = 'So. <tool_call>[{"name": "weather", "arguments": {"city": "Kobe"}}]</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(server, client, stream):
    restore = saying(server, CALL)
    try:
        r = chat(client, tools=[WEATHER], max_completion_tokens=200, stream=stream)
        if stream:
            chunks = [c.choices[0] for c in r]
            content, end = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
            calls = [t for c in chunks for t in c.delta.tool_calls or ()]
            assert [c.index for c in calls] == [0]
        else:
            content, calls, end = r.choices[0].message.content, r.choices[0].message.tool_calls, r.choices[0].finish_reason
    finally:
        restore()
    assert content == "So. " and end == "tool_calls" and len(calls) == 1 and calls[0].id.startswith("call_")
    assert (calls[0].function.name, json.loads(calls[0].function.arguments)) == ("weather", dict(city="Kobe"))
    history = [*HELLO, dict(role="assistant", tool_calls=[dict(id=calls[0].id, type="function", function=dict(
        name="weather", arguments=calls[0].function.arguments))]), dict(role="tool", tool_call_id=calls[0].id, content="sunny")]
    assert chat(client, messages=history, tools=[WEATHER], max_completion_tokens=1).usage.prompt_tokens == len(
        "weather: <tool_call> user: Hello\nassistant: Kobe\ntool: sunny\nassistant:")


def test_what_only_looks_like_a_call_is_text(server, client):
    for said in ("<tool_call>[{broken", CALL.replace("weather", "time"), "1 < 2, <tool_calls> and <tool_call"):
        restore = saying(server, said)
        try:
            r = chat(client, tools=[WEATHER], max_completion_tokens=200)
        finally:
            restore()
        assert r.choices[0].message.content == said and not r.choices[0].message.tool_calls
        assert r.choices[0].finish_reason == "stop"


def test_tools_that_must_be_called(client):
    r = chat(client, tools=[WEATHER], tool_choice=dict(type="function", function=dict(name="weather")),
             max_completion_tokens=200, temperature=1, seed=1)
    call = r.choices[0].message.tool_calls[0].function
    assert call.name == "weather" and set(json.loads(call.arguments)) == {"city"} and r.choices[0].message.content is None
    for stream in (False, True):
        r = chat(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_completion_tokens=200,
                 temperature=1, seed=1, stream=stream)
        calls = [t for c in r for t in c.choices[0].delta.tool_calls or ()] if stream else r.choices[0].message.tool_calls
        assert [c.function.name for c in calls] == ["weather"] and "city" in json.loads(calls[0].function.arguments)


def test_a_schema_is_kept(client):
    schema = dict(type="object", properties=dict(ok=dict(type="boolean")), required=["ok"], additionalProperties=False)
    r = chat(client, temperature=1, seed=2, max_completion_tokens=100,
             response_format=dict(type="json_schema", json_schema=dict(name="x", schema=schema, strict=True)))
    assert set(json.loads(r.choices[0].message.content)) == {"ok"} and r.choices[0].finish_reason == "stop"
    r = complete(client, max_tokens=30, temperature=1, extra_body=dict(structured_outputs=dict(choice=["yes", "no"])))
    assert r.choices[0].text in ("yes", "no")


def test_one_form_only(client):
    with pytest.raises(openai.BadRequestError, match="response_format and structured_outputs"):
        chat(client, response_format=dict(type="json_object"), extra_body=dict(structured_outputs=dict(regex="a")))
    with pytest.raises(openai.BadRequestError, match="at most 65536"):
        complete(client, extra_body=dict(structured_outputs=dict(regex="a"*70_000)))
    with pytest.raises(openai.BadRequestError):
        complete(client, extra_body=dict(structured_outputs=dict(regex="(")))
    with pytest.raises(openai.BadRequestError):
        chat(client, response_format=dict(type="json_schema", json_schema=dict(name="x", schema=dict(type="nonsense"))))


# ---- what is wrong is said, whoever asks

WRONG = [  # a change to a right request, the field that is to blame
    (dict(temperature=-1), "temperature"), (dict(temperature=3), "temperature"), (dict(temperature="hot"), "temperature"),
    (dict(top_p=0), "top_p"), (dict(n=0), "n"), (dict(n=17), "n"), (dict(n=2), "n"), (dict(max_tokens=-1), "max_tokens"),
    (dict(max_tokens=0), "max_tokens"), (dict(max_tokens=1.5), "max_tokens"), (dict(max_tokens=True), "max_tokens"),
    (dict(logprobs=21), "logprobs"), (dict(stop=[""]), "stop.0"), (dict(stop=["x"]*17), "stop"), (dict(stop="x"*257), "stop"),
    (dict(prompt=[]), "prompt"), (dict(prompt=[[]]), "prompt.0"), (dict(prompt=["ok", 5]), "prompt.1"),
    (dict(prompt=[1, -1]), None), (dict(prompt=[99999]), None), (dict(prompt="word "*100), None), (dict(prompt=5), "prompt"),
    (dict(logit_bias={"x": 1}), "logit_bias"), (dict(logit_bias={"1": 101}), "logit_bias"), (dict(logit_bias={"999": 1}), "logit_bias"),
    (dict(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"), (dict(stop_token_ids=[258]), "stop_token_ids"),
    (dict(suffix="end"), "suffix"), (dict(best_of=3), "best_of"), (dict(temprature=1), "temprature"), (dict(logits_processors=["os"]), "logits_processors"),
    (dict(top_k=2**31), "top_k"), (dict(repetition_penalty=5e-324), "repetition_penalty"), (dict(priority=3), "priority"), (dict(min_tokens=9), "min_tokens"), (dict(seed=2**63), "seed"), (dict(stream=1), "stream"),
    (dict(structured_outputs=dict(jsn=1)), "structured_outputs"), (dict(frequency_penalty=2.1), "frequency_penalty"),
    (dict(stream_options=dict(usage=True)), "stream_options.usage"), (dict(bad_words=[""]), "bad_words.0")]


@pytest.mark.parametrize("stream", [False, True])
def test_every_wrong_field_is_named(server, stream):
    for change, param in WRONG:
        error = refused(server, dict(prompt="Once", max_tokens=8, temperature=0) | (dict(stream=True) if stream else {}) | change)
        assert param is None or error["param"] == param, (change, error)
        assert len(error["message"]) < 500


def test_wrong_chats(server):
    path = "/v1/chat/completions"
    for change, param in [
            (dict(messages=[]), "messages"), (dict(messages=[dict(content="x")]), "messages.0.role"),
            (dict(messages=[dict(role="robot", content="x")]), "messages.0.role"),
            (dict(messages=[dict(role="user", content=[dict(type="image_url", image_url=dict(url="x"))])]), None),
            (dict(functions=[dict(name="x")]), "functions"), (dict(tool_choice="required"), "tool_choice"),
            (dict(tools=[WEATHER], tool_choice=dict(type="function", function=dict(name="time"))), "tool_choice"),
            (dict(top_logprobs=2), "top_logprobs"), (dict(chat_template="{{ x }}"), "chat_template"),
            (dict(chat_template_kwargs=dict(messages=[])), "chat_template_kwargs"), (dict(modalities=["audio"]), "modalities.0"),
            (dict(response_format=dict(type="xml")), "response_format.type"), (dict(max_completion_tokens=0), "max_completion_tokens")]:
        error = refused(server, dict(messages=HELLO) | change, path)
        assert param is None or error["param"] == param, (change, error)


def test_other_models_and_paths(server, client):
    with pytest.raises(openai.NotFoundError) as e:
        chat(client, model="gpt-5")
    assert e.value.code == "model_not_found" and e.value.param == "model"
    assert json.loads(send(server, "GET", "/v2")[2])["error"]["code"] == "not_found"
    assert send(server, "GET", "/v1/completions")[0] == 405 and send(server, "DELETE", "/v1/models")[0] == 405
    assert send(server, "POST", "/v1/completions", dict(prompt="a", max_tokens=1))[0] == 200  # without a model: the one there is


def test_bodies_that_are_none(server):
    for body in (b"", b"{", b"nonsense", b"[]", b'"text"', b"null", b'{"prompt": "\xff\xfe"}', b'{"prompt": NaN}', b"["*100_000,
                 b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "max_tokens": ' + b"9"*5000 + b"}",
                 b'{"prompt": "\\ud800"}', b'{"prompt": "a", "user": ' + b'{"a":'*2000 + b"1" + b"}"*2000 + b"}",
                 b'{"prompt": "a", "stop": "\\udc00", "seed": 99999999999999999999}', b"\x00", b'{"prompt": {"a": 1}}'):
        refused(server, body)
    assert refused(server, b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})["param"] == "content-type"
    refused(server, b'{"prompt": "a"}', headers={"Content-Type": "application/x-www-form-urlencoded"})
    refused(server, dict(messages=[dict(role="user", content="\ud800")]), "/v1/chat/completions")
    text = "é \x00 \u2028 🥭"  # whatever JSON can say is a prompt
    assert send(server, "POST", "/v1/completions", dict(prompt=text, max_tokens=1, echo=True))[0] == 200


def test_tokens(server, client):
    post = lambda path, **body: json.loads(send(server, "POST", path, body)[2])
    assert post("/tokenize", prompt="ab", return_token_strs=True) == dict(
        count=3, max_model_len=256, tokens=[256, 97, 98], token_strs=["<bos>", "a", "b"])
    assert post("/tokenize", prompt="ab", add_special_tokens=False)["tokens"] == [97, 98]
    assert bytes(post("/tokenize", messages=HELLO)["tokens"]) == b"user: Hello\nassistant:"
    assert post("/detokenize", tokens=[*"né".encode()]) == dict(prompt="né")
    refused(server, dict(tokens=[258]), "/detokenize")
    refused(server, {}, "/tokenize")
    refused(server, dict(prompt="a", messages=HELLO), "/tokenize")


# ---- who may, and how much

def test_names_of_the_machine_only(server):
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "[", "user@evil.example"):
        assert refused(server, dict(prompt="a"), status=403, headers={"Host": host})["param"] == "host"
    for host in ("localhost", "LocalHost:1234", "127.0.0.1", "[::1]:9"):
        assert send(server, "GET", "/v1/models", headers={"Host": host})[0] == 200
    _, headers, _ = send(server, "POST", "/v1/completions", dict(prompt="a", max_tokens=1), {"Origin": "https://evil.example"})
    assert not [k for k in headers if k.lower().startswith("access-control")]
    assert send(server, "OPTIONS", "/v1/completions", headers={"Origin": "https://evil.example"})[0] == 405


def test_keys_and_limits():
    limits = Limits(body_bytes=2000, body_seconds=.3)
    with Server(tiny(), "tiny", key="sésame", limits=limits) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sésam"}, {"Authorization": "Bearer "}):
            assert refused(server, dict(prompt="a"), status=401, headers=headers)["code"] == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/events", "/version", "/openapi.json"):
            assert send(server, "GET", path)[0] == 401
        assert send(server, "GET", "/health")[0] == 200
        mine = {"Authorization": "Bearer sésame".encode()}
        assert send(server, "POST", "/v1/completions", dict(prompt="a", max_tokens=1), mine)[0] == 200
        for size in (2001, 15_000, 10**6):
            refused(server, b"{" + b" "*size, status=413, headers=mine)
        slow = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s\xe9same\r\nContent-Length: 50\r\n\r\n{"
        start = time.monotonic()
        assert b"408" in raw(server, slow.replace(b"\xe9", "é".encode())).partition(b"\r\n")[0] and time.monotonic() - start < 3


def raw(server, data, seconds=10):
    with socket.create_connection(address(server), timeout=seconds) as s:
        s.sendall(data)
        got = b""
        try:
            while part := s.recv(65536):
                got += part
        except ConnectionResetError:
            pass
        return got


def test_malformed_http(server):
    assert server.inner.config.http == "h11" # other parsers, which uvicorn takes where they are, do not bound the head
    good = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for data in (b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
                 good + b"Content-Length: x\r\n\r\n", good + b"Content-Length: -5\r\n\r\n", good + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
                 good + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a"*10**6 + b"\r\n\r\n",
                 b"GET /v1/models HTTP/1.1\r\n\r\n"):
        head = raw(server, data).partition(b"\r\n")[0]
        assert head == b"" or head.split()[1] in (b"400", b"403", b"404", b"431", b"505"), (data[:60], head)
    half = good + b"Content-Length: 100\r\n\r\n{\"prompt\""
    with socket.create_connection(address(server)) as s:
        s.sendall(half)  # and gone
    chunked = good + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + b"e\r\n{\"prompt\":\"a\"}\r\n0\r\n\r\n"
    assert b" 200 " in raw(server, chunked).partition(b"\r\n")[0]


# ---- many at once, and those who leave

def test_many_at_once_are_answered_as_alone(server, alone):
    rnd = random.Random(0)
    asked = [dict(prompt=f"request {i} "*rnd.randint(1, 6), max_tokens=rnd.randint(1, 40), temperature=rnd.choice([0, 1]), seed=i)
             for i in range(24)]

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as c:
            async def one(i, kw):
                r = await c.completions.create(model="tiny", stream=i % 2 == 0, **kw)
                return "".join([x.choices[0].text async for x in r]) if i % 2 == 0 else r.choices[0].text
            return await asyncio.gather(*(one(i, kw) for i, kw in enumerate(asked)))
    texts = asyncio.run(run())
    for kw, text in zip(asked, texts):
        kw = dict(kw)
        assert text == alone(kw.pop("prompt"), **kw)[0].text


LONG = dict(prompt="Tell me everything", max_tokens=220, ignore_eos=True)


def leave(server, seconds, at_once=False, **kw):
    body = json.dumps(LONG | kw).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(address(server)) as s:
        if at_once:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not a good-bye
        s.sendall(head % len(body) + body)
        time.sleep(seconds)
        return server.engine.seats.taken


@pytest.mark.parametrize("kw", [dict(stream=True), {}, dict(n=3), dict(n=3, stream=True), dict(prompt=["a", "b"], stream=True),
                                dict(at_once=True, stream=True)], ids=str)
def test_who_leaves_gives_blocks_back(server, kw):
    live = [leave(server, seconds, **kw) for seconds in (0, .01, .05)]
    assert live[-1] >= 1
    empty(server)
    text = send(server, "GET", "/metrics")[2].decode()
    assert 'finished_reason="abort"' in text


def test_openais_stream_can_be_closed(server, client):
    stream = complete(client, stream=True, max_tokens=220, extra_body=dict(ignore_eos=True))
    next(iter(stream))
    stream.close()
    empty(server)


def test_too_many_are_told_when_to_come_back(server):
    def ask(i):
        return send(server, "POST", "/v1/completions", LONG | dict(max_tokens=60))
    with ThreadPoolExecutor(60) as many:
        replies = list(many.map(ask, range(60)))
    assert {status for status, _, _ in replies} == {200, 429}
    for status, headers, text in replies:
        if status == 429:
            assert 1 <= int(headers["Retry-After"]) <= 60 and json.loads(text)["error"]["code"] == "queue_full"
    refused(server, dict(prompt=["a"]*30, max_tokens=1), status=400)  # more than could ever wait


SECRET = "what no log may say"


class Around:
    "A runner around another"
    def __init__(self, run):
        self.run = run

    def __getattr__(self, name):
        return getattr(self.run, name)

    def __call__(self, plan):
        return self.run(plan)


class Allergic(Around):
    "Raises whenever a request is in the plan whose prompt has a `!` and that knows so many tokens"
    def __init__(self, run, n):
        self.run, self.n, self.bad, self.n_raised = run, n, {}, 0

    def __call__(self, plan):
        for a in plan.admitted:
            self.bad[a.row] = ord("!") in a.ids[:a.n_prompt]
        if any(self.bad[w.row] and w.start + w.n >= self.n for w in plan.works):
            self.n_raised += 1
            raise MemoryError(SECRET)
        return self.run(plan)


@contextmanager
def allergic(server, n=0):
    engine = server.engine.llm.engine
    engine.run, run = Allergic(engine.run, n), engine.run
    yield engine.run
    engine.run = run


def test_an_answer_that_cannot_be_computed(server, client, caplog):
    with allergic(server), pytest.raises(openai.InternalServerError) as e:
        complete(client, prompt="Once!")
    assert e.value.code == "step_failed"
    id = e.value.message.rpartition(" id ")[2][:8]
    assert f"id {id}" in caplog.text and "MemoryError" in caplog.text and SECRET not in caplog.text
    with allergic(server), pytest.raises(openai.InternalServerError):
        complete(client, prompt="Once!", stream=True)  # before the first chunk: a status
    with allergic(server), pytest.raises(openai.InternalServerError):
        complete(client, prompt=["Once!", "Twice"], n=3, temperature=1)
    with allergic(server, 12):
        chunks = []
        with pytest.raises(openai.APIError, match="the engine failed"):  # after it: an event
            for c in complete(client, prompt="Once!", stream=True, max_tokens=50):
                chunks.append(c)
        assert chunks
    assert complete(client).choices[0].finish_reason == "length"


@pytest.mark.parametrize("n", [0, 30, 60])
def test_a_bad_request_harms_no_other(server, alone, n):
    "In its prompt, at its first token, or in the middle of its answer; streamed or not, greedy or not"
    prompts = [f"a prompt of some length, number {i}" + "!"*(i in (3, 7)) for i in range(14)]
    how = [dict(max_tokens=40 + i, temperature=i % 3 and 1, seed=i, ignore_eos=True) for i in range(14)]

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as c:
            async def one(i):
                kw = dict(how[i])
                body = dict(ignore_eos=kw.pop("ignore_eos"))
                try:
                    r = await c.completions.create(model="tiny", prompt=prompts[i], stream=i % 2 == 0, extra_body=body, **kw)
                    return "".join([x.choices[0].text async for x in r]) if i % 2 == 0 else r.choices[0].text
                except openai.APIError as e:
                    return e
            return await asyncio.gather(*map(one, range(14)))
    with allergic(server, n) as runner:
        texts = asyncio.run(run())
    for i, (prompt, kw, text) in enumerate(zip(prompts, how, texts)):
        if i in (3, 7):
            assert isinstance(text, openai.APIError) and text.code == "step_failed", text
        else:
            assert text == alone(prompt, **kw)[0].text
    assert 2 <= runner.n_raised <= 30


def test_a_device_that_is_lost(server, client):
    "Everybody hears of it, also who waits, after a number of steps that does not depend on how many they are"
    engine, calls = server.engine.llm.engine, []

    class Lost(Around):
        def __call__(self, plan):
            calls.append(1)
            raise OSError("the device is lost")
    engine.run, run = Lost(engine.run), engine.run
    try:
        with ThreadPoolExecutor(24) as many:
            replies = list(many.map(lambda i: send(server, "POST", "/v1/completions", dict(prompt=f"{i}")), range(24)))
    finally:
        engine.run = run
    assert {status for status, _, _ in replies} == {500} and len(calls) <= 24*2*2
    assert complete(client).choices[0].finish_reason == "length"


def test_an_answer_that_cannot_be_told(server, client, alone, monkeypatch):
    "Its text cannot be read: the step is fine, and so is everybody else"
    monkeypatch.setattr("pagedlm.llm.Choice.read", lambda c, read=Choice.read: read(c) if c.answer.prompt != "Once!" else 1/0)
    with ThreadPoolExecutor(2) as many:
        good = many.submit(complete, client, max_tokens=30)
        with pytest.raises(openai.InternalServerError):
            complete(client, prompt="Once!")
        assert good.result().choices[0].text == alone("Once", temperature=0, max_tokens=30)[0].text


def test_a_listener_that_raises_is_told_no_more(server, client, caplog):
    heard = []

    def listen(name, **fields):
        heard.append(name)
        raise KeyError(SECRET)
    emit = server.engine.llm.emit
    emit.listeners.append(listen)
    assert complete(client).choices[0].finish_reason == "length"
    assert len(heard) == 1 and listen not in emit.listeners and "KeyError" in caplog.text and SECRET not in caplog.text


def test_a_mistake_of_ours_is_a_500_with_an_id(server, client, caplog, monkeypatch):
    monkeypatch.setattr("pagedlm.server.completion_params", lambda *a: 1/0)
    error = refused(server, dict(prompt="my secret prompt"), status=500)
    id = error["message"].rpartition(" id ")[2]
    assert len(id) == 8 and id in caplog.text and "ZeroDivisionError" in caplog.text and "my secret" not in caplog.text


def test_prompts_are_never_logged(server, client, caplog, capfd):
    caplog.set_level("DEBUG", "pagedlm")
    complete(client, prompt="a confidential matter")
    for body in (dict(prompt="a confidential matter", n=0), dict(prompt="confidential "*50), dict(prompt="a", temprature="confidential")):
        refused(server, body)
    with allergic(server), pytest.raises(openai.InternalServerError):
        complete(client, prompt="a confidential matter!")
    assert "confidential" not in caplog.text + "".join(capfd.readouterr())


def test_an_answer_may_take_so_long():
    with Server(tiny(), "tiny", limits=Limits(answer_seconds=.05)) as server:
        assert refused(server, LONG | dict(max_tokens=230), status=504)["code"] == "timeout"
        empty(server)


# ---- what it tells of itself

def test_metrics(server, client):
    def read():
        lines = send(server, "GET", "/metrics")[2].decode().splitlines()
        return {s.rpartition(" ")[0]: float(s.rpartition(" ")[2]) for s in lines if s.startswith("pagedlm:")}
    before = read()
    complete(client, prompt="metrics, please", max_tokens=5, extra_body=dict(ignore_eos=True))
    after, label = read(), '{model_name="tiny"}'
    grew = {k.removeprefix("pagedlm:").replace(label, ""): v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}
    assert grew["generation_tokens_total"] == 5 and grew["prompt_tokens_total"] == 16 == grew["request_prompt_tokens_sum"]
    assert grew["time_to_first_token_seconds_count"] == 1 and grew["inter_token_latency_seconds_count"] == 4
    assert grew['request_success_total{finished_reason="length",model_name="tiny"}'] == 1
    assert grew["iteration_tokens_total_sum"] == 20 and grew["iteration_tokens_total_count"] == 5
    assert grew["e2e_request_latency_seconds_sum"] >= grew["time_to_first_token_seconds_sum"] > 0
    assert after[f"pagedlm:num_requests_running{label}"] == 0 == after[f"pagedlm:kv_cache_usage_perc{label}"]


def test_health_and_version(server):
    from pagedlm import __version__
    assert json.loads(send(server, "GET", "/health")[2]) == dict(status="ok")
    assert json.loads(send(server, "GET", "/version")[2]) == dict(version=__version__)


def test_events_have_no_text_in_them(server, client):
    with closing(HTTPConnection(*address(server), timeout=10)) as http:
        http.request("GET", "/events")
        r, seen = http.getresponse(), []
        assert r.status == 200 and r.headers["content-type"].startswith("text/event-stream")
        asked = Thread(target=complete, args=(client,), kwargs=dict(prompt="a secret prompt"))
        for line in r:
            if line.startswith(b"event: snapshot"):
                asked.start()
            if line.startswith(b"data: "):
                seen.append(json.loads(line[6:]))
                if isinstance(seen[-1], list) and any(name == "finish" for _, name, _ in seen[-1]):
                    break
        asked.join()
    names = [name for batch in seen[1:] for _, name, _ in batch]
    assert seen[0]["n_blocks"] == 300 and names[0] == "arrive" and names.count("step") == 8 and names.count("token") == 8
    assert "secret" not in json.dumps(seen)


def test_the_description_is_true(server):
    description = json.loads(send(server, "GET", "/openapi.json")[2])
    assert set(description["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize",
                                         "/health", "/version", "/metrics", "/events"}
    text = json.dumps(description)
    assert "ValidationError" not in text and not any("422" in o["responses"] for p in description["paths"].values() for o in p.values())
    assert description["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False


# ---- the end

def test_health_says_that_a_rank_is_lost():
    model = tiny_model(tiny_config(), seed=1)
    with Server(LLM(model, ByteTokenizer(), tensor_parallel_size=2, enforce_eager=True), "tiny") as server:
        body = dict(model="tiny", prompt="ab", max_tokens=3)
        assert send(server, "POST", "/v1/completions", body)[0] == 200 == send(server, "GET", "/health")[0]
        rank = server.engine.llm.engine.run.crew.processes[1]
        rank.kill()
        assert send(server, "POST", "/v1/completions", body)[0] == 500
        status, _, text = send(server, "GET", "/health")
        error = json.loads(text)["error"]
        assert status == 503 and error["code"] == "engine_ended" and f"rank 1 (process {rank.pid}) has ended" in error["message"]


def test_shutting_down_lets_them_finish():
    with Server(tiny(), "tiny", grace=20) as server:
        with ThreadPoolExecutor(4) as many:
            asked = [many.submit(send, server, "POST", "/v1/completions", LONG | dict(stream=bool(i % 2))) for i in range(4)]
            wait_for(lambda: server.engine.seats.taken == 4)
            server.inner.handle_exit(signal.SIGTERM, None)
            results = [a.result() for a in asked]
    assert [status for status, _, _ in results] == [200]*4 and json.loads(results[0][2])["usage"]["completion_tokens"] == 220
    assert not server.engine.alive


def test_shutting_down_does_not_wait_for_ever():
    with Server(tiny(max_num_seqs=1), "tiny", grace=.2) as server:
        with ThreadPoolExecutor(8) as many:
            asked = [many.submit(send, server, "POST", "/v1/completions", LONG | dict(stream=bool(i % 2))) for i in range(8)]
            wait_for(lambda: server.engine.seats.taken == 8)
            server.inner.handle_exit(signal.SIGTERM, None)
            start, results = time.monotonic(), [a.result() for a in asked]
    assert time.monotonic() - start < 5
    cut = [text for status, _, text in results if b"shutting_down" in text]
    assert len(cut) >= 4 and {status for status, _, _ in results} <= {200, 503}
    for status, _, text in results:
        if status == 200 and b"shutting_down" in text:
            assert text.endswith(b"data: [DONE]\n\n")


# ---- the page "Serve it", and the command

PAGE = Path(__file__).parent.parent/"nbs"/"serve.ipynb"


def snippets():
    "The fenced blocks of the page: (language, source)"
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)


STARTS = [s for _, s in snippets() if "pagedlm serve" in s]
SNIPPETS = [(kind, s) for kind, s in snippets() if s not in STARTS]


@pytest.fixture(scope="module")
def command():
    "`pagedlm serve`, the default model and all: the process, and its `url`"
    code = "from pagedlm.cli import main; raise SystemExit(main())"
    child = subprocess.Popen([sys.executable, "-u", "-c", code, "serve", "--port", "0", "--max-model-len", "1024"],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = child.stdout.readline()
        assert line.startswith("SmolLM2-135M-Instruct is served at http://127.0.0.1:"), line
        child.url = re.search(r"http://\S+?(?=/v1)", line)[0]
        yield child
    finally:
        child.kill()


@pytest.mark.parametrize("kind, source", SNIPPETS, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(SNIPPETS)])
def test_snippets_of_the_page(command, capsys, kind, source):
    source = source.replace("http://localhost:8000", command.url)
    if kind == "python":
        exec(compile(source, "serve.ipynb", "exec"), {})
        assert capsys.readouterr().out.strip()
        return
    assert kind == "bash"
    if "curl" in source and not shutil.which("curl"):
        pytest.skip("there is no curl here")
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    done = subprocess.run(["bash", "-ec", source], env=os.environ | dict(PATH=path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "SmolLM2" in done.stdout and '"error"' not in done.stdout


def test_the_command(command):
    with openai.OpenAI(base_url=f"{command.url}/v1", api_key="-", max_retries=0) as c:
        r = chat(c, model="SmolLM2-135M-Instruct", messages=[dict(role="user", content="What is the capital of Japan?")])
        assert "Tokyo" in r.choices[0].message.content


def test_how_the_page_starts_it(monkeypatch, capsys):
    "A key from the environment, and a warning where there is none"
    from pagedlm import cli, server
    made = []

    class Fake:
        url = "somewhere"

        def __init__(self, *args, **kw):
            made.append(args)
            args[2].close()

        def run(self): pass

    monkeypatch.setattr(server, "Server", Fake)
    monkeypatch.setattr(cli, "_load", lambda args, **options: options)
    assert len(STARTS) == 2
    for start, key in zip(STARTS, (None, "a key")):
        *_, line = start.strip().splitlines()
        if key:
            monkeypatch.setenv("PAGEDLM_API_KEY", key)
        assert cli.main([*line.partition("pagedlm ")[2].split(), "--port", "0", "--max-num-seqs", "3"]) == 0
        options, name, _, said, hosts, max_queue = made.pop()
        assert (options, name, said, hosts, max_queue) == (dict(max_num_seqs=3), "SmolLM2-135M-Instruct", key, [], 256)
    monkeypatch.delenv("PAGEDLM_API_KEY")
    capsys.readouterr()
    assert cli.main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 0
    assert "give it an --api-key" in capsys.readouterr().err


@pytest.mark.parametrize("args, says", [(["--port", "99999"], "99999"), (["--host", "nowhere.invalid"], "nowhere.invalid"),
                                        (["--max-queue", "-1"], "--max-queue -1"), (["--option", "block_sise=3"], "block_sise")], ids=str)
def test_the_command_refuses_in_words(args, says, capsys):
    from pagedlm.cli import main
    assert main(["serve", *args]) == 2 and says in capsys.readouterr().err


def test_the_command_ends_in_good_order(command):
    "While somebody is being answered, who hears the end; the last test that needs it"
    with closing(HTTPConnection(command.url.removeprefix("http://"), timeout=60)) as http:
        http.request("POST", "/v1/completions", json.dumps(LONG | dict(stream=True, max_tokens=60)), {"Content-Type": "application/json"})
        r = http.getresponse()
        r.readline()
        command.send_signal(signal.SIGTERM)
        text = r.read()
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 0 and not errors, errors
    assert text.endswith(b"data: [DONE]\n\n") and text.count(b'"finish_reason":"length"') == 1


# ---- requests that a machine makes up (and tests/soak.py, for faults of all kinds)

def fuzz(server, n, seed=0):
    "Requests from the server's own description, right and wrong: no 500, and every refusal in one form"
    import hypothesis
    import schemathesis
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    todo = [op.ok() for op in schema.get_all_operations() if op.ok().path != "/events"]
    todo.sort(key=lambda op: op.method.upper() == "POST")  # those with a body last: there is no end to them
    weights, seen = [6 if op.method.upper() == "POST" else 1 for op in todo], []
    for i, op in enumerate(todo):
        share = max(5, -(-(n - len(seen))*weights[i]//sum(weights[i:])))

        @hypothesis.seed(seed)
        @hypothesis.settings(max_examples=share, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck),
                             phases=[hypothesis.Phase.generate])
        @hypothesis.given(case=op.as_strategy() | op.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
        def one(case):
            r = case.call(timeout=30)
            seen.append(r.status_code)
            assert r.status_code < 500, (op.path, case.body, r.text)
            if r.status_code >= 400:
                assert set(r.json()["error"]) == {"message", "type", "param", "code"}, r.text
        one()
    return seen


def test_made_up_requests():
    with Server(tiny(max_model_len=48), "tiny") as server:
        seen = fuzz(server, 150)
        empty(server)
    assert len(seen) >= 150 and 200 in seen and 400 in seen
