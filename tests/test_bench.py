"Workloads, how they are played, and what is computed from the events. No test looks at how long anything took"
import json
from types import SimpleNamespace

import pytest
import torch

from pagedlm import LLM
from pagedlm.bench import (WIDER, WORKLOADS, Ceilings, Roofline, arrivals, as_requests, ceilings, check_work, find_work,
                           latencies, make_work, number_kind, others_busy, phases, play, plot_phases, read_bytes,
                           seconds_of_run, span_of, spread, step_costs, throughput, workload_names)
from pagedlm.config import flops_per_token, kv_bytes_per_token
from pagedlm.core import ManualClock
from pagedlm.model import tiny_config, tiny_model
from pagedlm.quant import pack, stored_bytes
from pagedlm.tokenizer import ByteTokenizer
from pagedlm.trace import latency, steps_of

pytestmark = pytest.mark.usefixtures("one_thread")
V = 258
TOPS = Ceilings(dict(float32=1e12), {}, 1e11, "made up")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def llm(model):
    return LLM(model, tokenizer=ByteTokenizer())


class Slow:
    "A `run` without a model: a second for each step, and a tenth for each token"
    def __init__(self, clock):
        self.clock = clock

    def __call__(self, plan):
        self.clock.advance(1 + .1*plan.n_tokens)
        return [0]*sum(w.sample for w in plan.works)


@pytest.fixture
def slow(llm):
    llm.engine.clock = ManualClock(100)
    llm.engine.run = Slow(llm.engine.clock)
    return llm


# ---- workloads

@pytest.mark.parametrize("name, n, n_in, n_out", [("mix32", 32, 4972, 2283), ("one", 1, 128, 128), ("prefill8", 8, 8192, 128)])
def test_the_workloads_that_come_along(name, n, n_in, n_out):
    work = find_work(name, V)
    assert (len(work), sum(len(r["prompt"]) for r in work), sum(r["n"] for r in work)) == (n, n_in, n_out)
    assert all(0 <= i < 49152 for r in work for i in r["prompt"])
    assert len({tuple(r["prompt"][:16]) for r in work}) == n  # no two share a block
    assert workload_names() == ["mix32", "one", "prefill8"] and (WORKLOADS/f"{name}.json").is_file()


@pytest.mark.parametrize("recipe, n, prompts, outputs", [
    ("3x5+2", 3, {5}, {2}), ("40x1-3+2-4", 40, {1, 2, 3}, {2, 3, 4}), ("1x7-7+1", 1, {7}, {1})])
def test_recipes(recipe, n, prompts, outputs):
    work = find_work(recipe, V, seed=1)
    assert (len(work), {len(r["prompt"]) for r in work}, {r["n"] for r in work}) == (n, prompts, outputs)
    assert find_work(recipe, V, seed=1) == work != find_work(recipe, V, seed=2)
    assert all(100 <= i < V for r in work for i in r["prompt"])


@pytest.mark.parametrize("vocab_size", [2, 3, 150])
def test_recipes_for_small_vocabularies(vocab_size):
    assert all(0 <= i < vocab_size for r in make_work(5, (4, 9), (1, 1), vocab_size) for i in r["prompt"])


@pytest.mark.parametrize("what, says", [
    ("mix33", "mix32, one, prefill8"), ("0x5+2", "0 requests"), ("3x0+2", "prompt lengths 0-0"), ("3x5+0", "output lengths 0-0"),
    ("3x6-5+2", "prompt lengths 6-5"), ("3x5-+2", "length '5-'"), ("3x1-2-3+2", "length '1-2-3'"), ("3x5", "no recipe"),
    ("-1x5+2", "no recipe")])
def test_what_is_no_workload(what, says):
    with pytest.raises(ValueError, match=says):
        find_work(what, V)


def test_a_workload_from_a_file(tmp_path):
    path = tmp_path/"mine.json"
    path.write_text('[{"prompt": [5, 6], "n": 3, "why": "other keys do no harm"}]')
    assert find_work(str(path), V)[0]["prompt"] == [5, 6]


@pytest.mark.parametrize("text", ["", "[]", "{}", "7", '[{"prompt": [1]}]', '[{"prompt": [], "n": 1}]', '[{"prompt": [1], "n": 0}]',
                                  '[{"prompt": [1], "n": true}]', '[{"prompt": "hello", "n": 1}]', '[[1, 2]]'])
def test_files_that_are_no_workload(text):
    with pytest.raises(ValueError, match="workload mine"):
        check_work(text, "mine")


def test_lengths():
    assert span_of("128") == (128, 128) and span_of("3-9") == (3, 9)
    for text in ("", "x", "1.5", "-3", "3-"):
        with pytest.raises(ValueError, match="length"):
            span_of(text)


# ---- playing

def test_every_request_gets_all_its_tokens(llm):
    work = find_work("6x10-40+3-9", V)
    found = latency(play(llm, work))
    assert [(r["n_prompt"], r["n_output"], r["reason"]) for r in found.values()] == [(len(r["prompt"]), r["n"], "length") for r in work]


def test_an_end_of_sequence_does_not_end_it(slow):
    slow.engine.run = lambda plan: [257]*sum(w.sample for w in plan.works)
    assert latency(play(slow, find_work("1x3+5", V)))["0"]["n_output"] == 5


def test_nothing_is_cached_between_runs(llm):
    work = find_work("2x64+2", V)
    for _ in range(2):
        assert [r["n_cached"] for r in latency(play(llm, work)).values()] == [0, 0]


def test_listeners_do_not_pile_up(llm):
    before = len(llm.emit.listeners)
    play(llm, find_work("1x3+2", V))
    assert len(llm.emit.listeners) == before


def test_requests_that_cannot_be_answered_in_full(llm):
    for work, says in ((find_work("one", V), "request 0: token id .* outside"), (find_work("1x200+57", V), "200 \\+ 57 tokens, but at most 256")):
        with pytest.raises(ValueError, match=says):
            play(llm, work)
    assert len(as_requests(llm, find_work("1x200+56", V))) == 1


def test_an_engine_at_work_is_not_measured(llm):
    llm.texts.add("hello", as_requests(llm, find_work("1x3+2", V))[0].params)
    with pytest.raises(ValueError, match="1 requests are under way"):
        play(llm, find_work("1x3+2", V))


def test_after_an_error_the_engine_can_be_used(slow):
    def fail(plan):
        raise RuntimeError("tripped")
    slow.engine.run = fail
    with pytest.raises(RuntimeError, match="tripped"):
        play(slow, find_work("2x3+2", V))
    slow.engine.run = Slow(slow.engine.clock)
    assert len(latency(play(slow, find_work("2x3+2", V)))) == 2


def test_waiting_counts_from_when_a_request_was_due(slow):
    "By hand: 3 tokens in 1.3 s, then 1 in 1.1 s. The second is due in the middle of a step, the third long after"
    found = latency(play(slow, find_work("3x3+2", V), dues=[0, 1, 50]))
    assert [round(r["ttft"], 6) for r in found.values()] == [1.3, 1.7, 1.3]      # 1.3 + (1 + .1*4) - 1
    assert [round(r["e2e"], 6) for r in found.values()] == [2.7, 2.8, 2.4]
    assert [[round(x, 6) for x in r["itl"]] for r in found.values()] == [[1.4], [1.1], [1.1]]


def test_arrivals():
    assert arrivals(3) == [0, 0, 0] and arrivals(1, 5) == [0]
    times = arrivals(20001, rate=4, seed=3)
    gaps = [b - a for a, b in zip(times, times[1:])]
    mean = sum(gaps)/len(gaps)
    assert times == sorted(times) and times[0] == 0 and abs(mean*4 - 1) < .05
    assert abs(sum((g - mean)**2 for g in gaps)/len(gaps)/mean**2 - 1) < .1  # an exponential's variance is its mean squared
    assert arrivals(9, 2, seed=1) == arrivals(9, 2, seed=1) != arrivals(9, 2, seed=2)
    for rate in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            arrivals(3, rate)


# ---- what is told

def test_throughput_by_hand(slow):
    "Two requests of 4 tokens in and 3 out: 1.8 s for the prompts, then two steps of 1.2 s"
    told, events = throughput(slow, find_work("2x4+3", V), n_iters=3, n_warmup=2)
    assert seconds_of_run(events) == pytest.approx(4.2)
    for name, value in dict(seconds=4.2, requests_per_second=2/4.2, total_tokens_per_second=14/4.2, output_tokens_per_second=6/4.2).items():
        assert told[name] == dict.fromkeys(["median", "min", "max"], pytest.approx(value)), name
    assert (told["requests"], told["tokens_in"], told["tokens_out"], told["steps"]) == (2, 8, 6, 3)
    assert (told["n_iters"], told["n_warmup"]) == (3, 2)
    json.dumps(told, allow_nan=False)


def test_the_run_that_is_shown_is_the_one_of_median_length(slow):
    lengths = iter([0, 30, 10, 20])  # the first warms up
    play_one, slow.engine.reset = slow.engine.reset, lambda: (play_one(), setattr(slow.engine, "run", Delayed(slow.engine.clock, next(lengths))))
    told, events = throughput(slow, find_work("1x1+1", V), n_iters=3)
    assert told["seconds"] == dict(median=pytest.approx(21.1), min=pytest.approx(11.1), max=pytest.approx(31.1))
    assert seconds_of_run(events) == pytest.approx(21.1)


class Delayed(Slow):
    def __init__(self, clock, delay):
        super().__init__(clock)
        self.delay = delay

    def __call__(self, plan):
        self.clock.advance(self.delay)
        return super().__call__(plan)


def test_latencies_by_hand(slow):
    told, events = latencies(slow, find_work("2x4+3", V), n_iters=2)
    assert told["ttft"] == dict(n=4, **dict.fromkeys(["mean", "p50", "p90", "p99"], pytest.approx(1.8)))
    assert told["itl"]["n"] == 8 and told["itl"]["p99"] == pytest.approx(1.2)
    assert told["e2e"]["p50"] == pytest.approx(4.2) and told["seconds"]["median"] == pytest.approx(4.2)
    assert told["rate"] is None and len(latency(events)) == 4  # no two runs share an id
    json.dumps(told, allow_nan=False)


def test_latencies_at_a_rate(slow):
    calm, _ = latencies(slow, find_work("30x2+1", V), rate=.01, n_warmup=0)
    busy, _ = latencies(slow, find_work("30x2+1", V), rate=3, n_warmup=0)
    assert calm["ttft"]["p50"] == pytest.approx(1.2) and busy["ttft"]["p50"] > calm["ttft"]["p90"] and busy["rate"] == 3


def test_latencies_of_one_token_answers_have_no_gaps(slow):
    told, _ = latencies(slow, find_work("2x2+1", V))
    assert told["itl"] == dict(n=0, mean=None, p50=None, p90=None, p99=None)


@pytest.mark.parametrize("how", [dict(n_iters=0), dict(n_warmup=-1)])
def test_nothing_to_measure(slow, how):
    for measure in (throughput, latencies):
        with pytest.raises(ValueError, match="runs after"):
            measure(slow, find_work("1x2+1", V), **how)


def test_spread():
    assert spread([3, 1, 2, 10]) == dict(median=2.5, min=1, max=10)


# ---- ceilings and shares

def test_ceilings_say_what_is_missing():
    tops = ceilings(kinds=("float32", "bfloat16", "int8", "int3"), seconds=0, n=16, n_bytes=2**12)
    assert tops.rates["float32"] > 0 and tops.rates["bfloat16"] > 0 and tops.bandwidth > 0
    assert set(tops.rates) | set(tops.missing) == {"float32", "bfloat16", "int8", "int3"} and "int3" in tops.missing
    assert "\n" not in tops.missing["int3"] and tops.name.startswith("cpu, ")
    json.dumps(tops._asdict(), allow_nan=False)


def test_a_narrow_type_may_use_the_rate_of_a_wider_one():
    tops = Ceilings(dict(float32=30., bfloat16=7., int8=50.), {}, 10., "here")
    assert [tops.roof(k).flops for k in ("float32", "bfloat16", "int8")] == [30, 30, 50]
    assert tops.roof("float32")[1:] == (10, "float32, here")
    assert Ceilings(dict(float64=3., bfloat16=99.), {}, 1., "").roof("float64").flops == 3
    with pytest.raises(KeyError):
        Ceilings(dict(bfloat16=7.), {}, 1., "").roof("float32")
    assert all(k in fits for k, fits in WIDER.items())


def test_costs_by_hand(llm):
    config, size = llm.model.config, kv_bytes_per_token(llm.model.config, 4)
    costs = step_costs(play(llm, [dict(prompt=[1]*5, n=3), dict(prompt=[2]*7, n=1)]), llm.model, size)
    prompt = sum(flops_per_token(config, p, logits=p in last) for n, last in ((5, {5}), (7, {7})) for p in range(1, n + 1))
    assert [c.flops for c in costs] == [prompt, flops_per_token(config, 6), flops_per_token(config, 7)]
    whole = stored_bytes(llm.model)
    assert [c.n_bytes for c in costs] == [whole + 12*size, whole + 6*size, whole + 7*size]
    assert [(c.kind, c.n_tokens) for c in costs] == [("prefill", 12), ("decode", 1), ("decode", 1)]


def test_costs_of_chunks_and_of_preempted_requests(model):
    "A chunk that says nothing reads no head; what is computed again is paid for again"
    llm = LLM(model, tokenizer=ByteTokenizer(), max_num_batched_tokens=4, max_num_seqs=2, num_gpu_blocks_override=7, block_size=4)
    events = play(llm, find_work("2x10+8", V))
    costs, (body, head) = step_costs(events, model, 0), read_bytes(model)
    assert sum(r["n_preempt"] for r in latency(events).values()) > 0
    assert {c.n_bytes for c in costs} == {body, body + head} and costs[0].n_bytes == body
    assert sum(c.n_tokens for c in costs) == sum(s.n_tokens for s in steps_of(events)) > 2*(10 + 7)
    assert body + head == stored_bytes(model)


def test_steps_that_overlap_are_not_counted_twice():
    events = [(0., "arrive", dict(request="a", n_prompt=1)), (0., "admit", dict(request="a", n_cached=0)),
              (2., "step", dict(works=(("a", 1),), start=0.)), (2., "token", dict(request="a", n_output=1)),
              (3., "step", dict(works=(("a", 1),), start=1.)), (3., "token", dict(request="a", n_output=2)),
              (9., "step", dict(works=(("a", 1),), start=8.)), (9., "token", dict(request="a", n_output=3))]
    assert [c.seconds for c in step_costs(events, tiny_model(), 0)] == [2, 1, 1]


def test_phases(llm):
    found = phases(play(llm, find_work("3x20+4", V)), llm, TOPS)
    assert [(p["steps"], p["tokens"]) for p in (found["prefill"], found["decode"])] == [(1, 60), (3, 9)]
    for p in found.values():
        assert p["flops_per_byte"] == pytest.approx(p["flops_per_second"]/p["bytes_per_second"])
        assert p["share_of_rate"] == pytest.approx(p["flops_per_second"]/1e12)
        assert p["share_of_bandwidth"] == pytest.approx(p["bytes_per_second"]/1e11)
        assert 0 < max(p["share_of_rate"], p["share_of_bandwidth"]) <= p["share_of_roof"]*(1 + 1e-9)
    assert list(phases(play(llm, find_work("3x20+1", V)), llm, TOPS)) == ["prefill"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [None, "Q8_0", "Q4_1"])
def test_what_a_step_reads(tied, kind):
    model = tiny_model(tiny_config(tied=tied))
    n = V*model.config.width
    size = 4*n if kind is None else n//32*{"Q8_0": 34, "Q4_1": 20}[kind]
    if kind:
        pack(model, kind)
    body, head = read_bytes(model)
    assert head == size and body == stored_bytes(model) - (2 - tied)*size
    assert number_kind(model) == ("int8" if kind else "float32")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_number_kind_of_plain_models(dtype):
    assert number_kind(tiny_model(dtype=dtype)) == str(dtype).removeprefix("torch.")
    if dtype == torch.float32:
        assert number_kind(pack(tiny_model(), "bf16")) == "bfloat16"


def test_the_figure_has_a_point_for_each_phase():
    from matplotlib import pyplot as plt
    phase = dict(steps=1, flops_per_byte=2., flops_per_second=1e10)
    for found, names in ((dict(prefill=phase, decode=phase), ["prefill", "decode"]), (dict(a=dict(decode=phase), b=dict(decode=phase)), ["a", "b"])):
        ax = plot_phases(found, TOPS, "float32")
        assert [t.get_text() for t in ax.texts] == names
        plt.close(ax.figure)


def test_roofline():
    roof = Roofline(100, 10)
    assert (roof.balance, roof.attainable(5), roof.attainable(50)) == (10, 50, 100)


def test_others():
    busy = others_busy(.01)
    assert busy is None or 0 <= busy <= 1


def test_where_the_system_does_not_tell(monkeypatch):
    import pagedlm.bench as bench
    monkeypatch.setattr(bench, "Path", lambda name: SimpleNamespace(read_text=lambda: open("/no/such/file").read()))
    assert bench.others_busy(0) is None and "cores" in bench.machine()
