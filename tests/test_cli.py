"The command line as a shell sees it: a process, its streams, its exit status"
import json
import os
import signal
import subprocess
import sys

import pytest

from pagedlm import __version__
from pagedlm.weights import default_model

pytestmark = pytest.mark.usefixtures("cached_model")


@pytest.fixture(scope="module")
def cached_model(): return default_model()


PAGEDLM = [sys.executable, "-u", "-c", "from pagedlm.cli import main; raise SystemExit(main())"]
ENDLESS = [*PAGEDLM, "generate", "Once upon a time", "--max-tokens", "4000", "--ignore-eos"]


def pagedlm(*args):
    return subprocess.run([*PAGEDLM, *args], capture_output=True, text=True, timeout=300)


def test_version_and_help():
    assert pagedlm("--version").stdout.split() == ["pagedlm", __version__]
    for args in ([], ["generate"], ["demo"], ["bench"], ["bench", "throughput"], ["bench", "latency"]):
        done = pagedlm(*args, "--help")
        assert done.returncode == 0 and "usage: pagedlm" in done.stdout and not done.stderr


def test_demo_answers_three_questions_and_shows_what_happened():
    done = pagedlm("demo")
    assert done.returncode == 0, done.stderr
    for words in ("Tokyo", "> Name three fruits.", "step ", "request 2", "prefix cache", "fullest", "tokens/s"):
        assert words in done.stdout, words
    assert max(map(len, done.stdout.splitlines()[-20:])) <= 100


def test_several_prompts_as_json(tmp_path):
    trace = tmp_path/"trace.json"
    done = pagedlm("generate", "--json", "--max-tokens", "4", "--trace", trace, "The capital of France is", "Water boils at")
    assert done.returncode == 0, done.stderr
    steps = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    assert [e["args"]["step"] for e in steps] == [0, 1, 2, 3]
    *answers, account = map(json.loads, done.stdout.splitlines())
    assert sorted(a["number"] for a in answers) == [0, 1]
    assert all(a["finished"] and len(a["outputs"][0]["token_ids"]) == 4 for a in answers)
    assert "Paris" in next(a for a in answers if a["number"] == 0)["outputs"][0]["text"]
    a = account["account"]
    assert (a["requests"], a["tokens_out"], a["steps"]) == (2, 8, 4) and a["tokens_in"] == a["prefill_tokens"] > 0


@pytest.mark.parametrize("args, says", [
    (["generate", "x", "--temperature", "-1"], "temperature"), (["generate", "x", "--max-tokens", "0"], "max_tokens"),
    (["generate", "x", "--model", "not/there"], "not/there"), (["generate", ""], "0 tokens"),
    (["generate", "x", "--trace", "no/folder/t.json"], "no/folder"), (["generate", "x", "--json-schema", "no.json"], "no.json"),
    (["generate", "x", "--dtype", "float8"], "float8"), (["generate", "x", "--device", "abacus"], "abacus")], ids=str)
def test_errors_are_one_line_and_a_status(args, says):
    done = pagedlm(*args)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr and not done.stdout.strip()


def test_usage_errors():
    for args in ([], ["generate"], ["conjure"], ["generate", "x", "--no-such-option"], ["bench"], ["bench", "luck"]):
        done = pagedlm(*args)
        assert done.returncode == 2 and "usage" in done.stderr


def test_interrupt_leaves_cleanly():
    process = subprocess.Popen(ENDLESS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(20)  # it speaks
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"interrupted" in err and b"Traceback" not in err


def test_a_reader_that_has_seen_enough():
    read, write = os.pipe()
    process = subprocess.Popen(ENDLESS, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    os.read(read, 20)
    os.close(read)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and b"Traceback" not in err


# ---- bench, in a process of its own and with a tiny model in this one

def test_a_measurement_as_a_shell_sees_it(tmp_path):
    path = tmp_path/"result.json"
    done = pagedlm("bench", "throughput", "2x8+3", "--num-iters", "2", "--num-iters-warmup", "0", "--no-ceilings", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "2x8+3: 2 requests, 16 tokens in, 6 out, 3 steps; 2 runs, 0 before" in done.stdout and "output" in done.stdout
    assert json.loads(path.read_text())["results"]["2x8+3"]["steps"] == 3


@pytest.fixture
def bench(monkeypatch, capsys):
    "Run a `bench` command on a tiny model: (status, what it printed, what it complained of, keywords for LLM)"
    from pagedlm import LLM, cli
    from pagedlm import bench as module
    from pagedlm.model import tiny_model
    from pagedlm.tokenizer import ByteTokenizer
    keywords = {}

    def load(args, **kw):
        keywords.update(kw)
        return LLM(tiny_model(), tokenizer=ByteTokenizer(), **kw)

    monkeypatch.setattr(cli, "_load", load)
    monkeypatch.setattr(module, "others_busy", lambda: .5)
    monkeypatch.setattr(module, "ceilings", lambda device, kinds: module.Ceilings(dict.fromkeys(kinds, 1e12), {}, 1e11, "made up"))

    def run(*args):
        keywords.clear()
        status = cli.main(["bench", *args])
        return status, *capsys.readouterr(), dict(keywords)
    return run


def spread(x):
    return set(x) == {"median", "min", "max"} and x["min"] <= x["median"] <= x["max"]


def test_throughput_as_json(bench):
    status, out, err, _ = bench("throughput", "2x8+3", "1x20+2", "--num-iters", "2", "--json", "-")
    found = json.loads(out)
    assert status == 0 and "other programs use 50%" in err
    assert (found["bench"], found["kind"], found["others_busy"], list(found["results"])) == ("throughput", "float32", .5, ["2x8+3", "1x20+2"])
    assert set(found["ceilings"]) == {"rates", "missing", "bandwidth", "name"} and set(found["ceilings"]["rates"]) == {"float32", "bfloat16", "int8"}
    assert found["machine"]["cores"] == os.cpu_count() and found["asked"]["num_iters"] == 2 and found["asked"]["enable_prefix_caching"] is False
    told = found["results"]["2x8+3"]
    assert (told["requests"], told["tokens_in"], told["tokens_out"], told["steps"], told["n_iters"]) == (2, 16, 6, 3, 2)
    for name in ("seconds", "requests_per_second", "total_tokens_per_second", "output_tokens_per_second"):
        assert spread(told[name]), name
    assert [told["phases"][p]["steps"] for p in ("prefill", "decode")] == [1, 2]


def test_throughput_for_people(bench):
    status, out, _, _ = bench("throughput", "1x9+1", "--num-iters-warmup", "0")
    assert status == 0 and out.startswith("1x9+1: 1 request, 9 tokens in, 1 out, 1 steps; 3 runs, 0 before to warm up\n")
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["total", "output", "prefill"] and "of what the machine allows" in out
    assert "prefill" not in bench("throughput", "1x9+1", "--no-ceilings")[1]


def test_latency_as_json(bench, tmp_path):
    path = tmp_path/"latency.json"
    status, out, _, _ = bench("latency", "4x5+3", "--rate", "1000", "--num-iters", "2", "--output-json", str(path))
    found = json.loads(path.read_text())
    told = found["results"]["4x5+3"]
    assert status == 0 and (found["bench"], told["rate"], told["n_iters"]) == ("latency", 1000, 2)
    assert {k: told[k]["n"] for k in ("queue", "ttft", "itl", "e2e")} == dict(queue=8, ttft=8, itl=16, e2e=8)
    assert all(set(told[k]) == {"n", "mean", "p50", "p90", "p99"} for k in ("queue", "ttft", "itl", "e2e"))
    assert out.startswith("4x5+3: 4 requests, 1000 a second at random; 2 runs, 1 before to warm up\n")
    assert [line[:14].strip() for line in out.splitlines()[1:6]] == ["ms", "in the queue", "first token", "between tokens", "whole answer"]


def test_latency_of_answers_of_one_token(bench):
    out = bench("latency", "1x5+1", "--request-rate", "inf")[1]
    assert "all at once" in out and out.splitlines()[4].split()[-4:] == ["-"]*4


def test_a_recipe_in_parts(bench):
    assert '"3x4-6+2"' in bench("latency", "--num-prompts", "3", "--input-len", "4-6", "--output-len", "2", "--json", "-")[1]
    assert '"2x32+128"' in bench("latency", "--batch-size", "2", "--json", "-", "--num-iters-warmup", "0")[1]


def test_keywords_for_the_engine(bench):
    _, _, _, keywords = bench("throughput", "1x3+1", "--no-ceilings", "--max-num-seqs", "4", "--max-num-batched-tokens", "8", "--max-model-len",
                              "64", "--enforce-eager", "--attention-backend", "torch", "--option", "block-size=8", "--option", "scheduling_policy=priority",
                              "--option", "enable_prefix_caching=True")
    assert keywords == dict(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, enforce_eager=True, attention_backend="torch", block_size=8,
                            scheduling_policy="priority", enable_prefix_caching=True)
    assert bench("throughput", "1x3+1", "--no-ceilings")[3] == dict(enable_prefix_caching=False)


@pytest.mark.parametrize("args, says", [
    (["throughput", "mix33"], "mix32, one, prefill8"), (["throughput", "3x0+1"], "prompt lengths 0-0"), (["throughput", "mix32"], "outside the vocabulary"),
    (["throughput", "1x3+1", "--num-iters", "0"], "0 runs"), (["throughput", "1x3+1", "--num-iters-warmup", "-1"], "-1"),
    (["throughput", "1x3+1", "--input-len", "4"], "either 1x3+1, or --num-prompts"), (["throughput", "--input-len", "4.5"], "length '4.5'"),
    (["throughput", "--num-prompts", "-2"], "-2 requests"), (["latency", "1x250+10"], "at most 256"), (["latency", "1x3+1", "--rate", "0"], "above 0"),
    (["latency", "1x3+1", "--rate", "nan"], "above 0"), (["latency", "1x3+1", "--option", "speed=9"], "NAME one of"),
    (["latency", "1x3+1", "--option", "block_size"], "NAME=VALUE"), (["latency", "1x3+1", "--option", "model=x"], "NAME one of"),
    (["latency", "1x3+1", "--json", "no/such/folder/x.json"], "no/such/folder"), (["latency", "1x3+1", "--option", "block_size=0"], "block_size=0")], ids=str)
def test_what_cannot_be_measured(bench, args, says):
    status, out, err, _ = bench(*args)
    assert status == 2 and says in err and err.startswith("pagedlm: ") and err.count("\n") <= 2 and not out
