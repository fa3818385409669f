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
    for args in ([], ["generate"], ["demo"]):
        done = pagedlm(*args, "--help")
        assert done.returncode == 0 and "usage: pagedlm" in done.stdout and not done.stderr


def test_demo_answers_three_questions_and_shows_what_happened():
    done = pagedlm("demo")
    assert done.returncode == 0, done.stderr
    for words in ("Paris", "> Name three fruits.", "step ", "request 2", "prefix cache", "fullest", "tokens/s"):
        assert words in done.stdout, words
    assert max(map(len, done.stdout.splitlines()[-20:])) <= 100


def test_several_prompts_as_json():
    done = pagedlm("generate", "--json", "--max-tokens", "4", "The capital of France is", "Water boils at")
    assert done.returncode == 0, done.stderr
    *answers, account = map(json.loads, done.stdout.splitlines())
    assert sorted(a["number"] for a in answers) == [0, 1]
    assert all(a["finished"] and len(a["outputs"][0]["token_ids"]) == 4 for a in answers)
    assert "Paris" in next(a for a in answers if a["number"] == 0)["outputs"][0]["text"]
    a = account["account"]
    assert (a["requests"], a["tokens_out"], a["steps"]) == (2, 8, 4) and a["tokens_in"] == a["prefill_tokens"] > 0


@pytest.mark.parametrize("args, says", [
    (["generate", "x", "--temperature", "-1"], "temperature"), (["generate", "x", "--max-tokens", "0"], "max_tokens"),
    (["generate", "x", "--model", "not/there"], "not/there"), (["generate", ""], "0 tokens"),
    (["generate", "x", "--dtype", "float8"], "float8"), (["generate", "x", "--device", "abacus"], "abacus")], ids=str)
def test_errors_are_one_line_and_a_status(args, says):
    done = pagedlm(*args)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr and not done.stdout.strip()


def test_usage_errors():
    for args in ([], ["generate"], ["conjure"], ["generate", "x", "--no-such-option"]):
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
