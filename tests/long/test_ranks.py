"The default model over three ranks; ranks, and rank 0, that are killed under load; Ctrl-C at any moment; torchrun with a rank that dies"
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_parallel import SCRIPT, alive, wait_until

from pagedlm import LLM, SamplingParams
from pagedlm.model import tiny_config, tiny_model
from pagedlm.tokenizer import ByteTokenizer

PROMPTS = ["The capital of France is", "Once upon a time", "2 + 2 =", "Water boils at", "def fibonacci(n):", "The three primary colours are",
           "In the year 1969,", "A short poem about the sea:\n", "The quick brown fox", "To be or not to be,"]


def test_default_model_over_three_ranks():
    "Nine heads and three KV heads, float32: token for token, with chunks and a pool that is too small for all"
    params, said = SamplingParams(temperature=0, max_tokens=16), []
    for n in 1, 3:
        llm = LLM(dtype="float32", enforce_eager=True, tensor_parallel_size=n, max_num_batched_tokens=24, max_num_seqs=8, num_gpu_blocks_override=14)
        with llm.trace() as t:
            said.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)])
        assert any(name == "preempt" for _, name, _ in t.events)
        llm.shutdown()
    assert said[0] == said[1]


def three(**kw):
    return LLM(tiny_model(tiny_config(n_heads=6, n_kv_heads=3, mlp_width=96)), ByteTokenizer(), tensor_parallel_size=3, **kw)


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_is_killed_under_load(seed):
    "Whichever it is, and whenever: it is named, within seconds, and all are gone"
    rnd, llm = Random(seed), three(max_num_batched_tokens=64)
    processes = llm.engine.run.crew.processes
    rank = rnd.choice([1, 2])
    threading.Timer(rnd.uniform(.05, 1), processes[rank].kill).start()
    with pytest.raises(RuntimeError, match=rf"rank {rank} \(process {processes[rank].pid}\) has ended, killed by SIGKILL"):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            llm.generate(PROMPTS*6, SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)
    wait_until(lambda: not any(alive(p.pid) for p in processes.values()))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_rank_0_is_killed_under_load(tmp_path, how):
    script = SCRIPT + """print(llm.engine.run.crew.processes[1].pid, flush=True)
while True: llm.generate(["A", "B"]*8, SamplingParams(max_tokens=60), use_tqdm=False)"""
    (tmp_path/"script.py").write_text(script)
    with subprocess.Popen([sys.executable, tmp_path/"script.py"], stdout=subprocess.PIPE, text=True) as p:
        p.stdout.readline()
        pid = p.stdout.readline().strip()
        time.sleep(.5)
        assert alive(pid)
        p.send_signal(how)
    wait_until(lambda: not alive(pid))


def test_ctrl_c_at_any_moment():
    "Thirty times, and the answers after each are the same"
    rnd, llm = Random(0), three(max_num_batched_tokens=64)

    def said():
        return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)]
    expected = said()
    for _ in range(30):
        threading.Timer(rnd.uniform(.01, .3), os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                llm.generate(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
        assert said() == expected
    llm.shutdown()


def test_torchrun_when_a_rank_dies(tmp_path):
    "Whoever started them ends all, and fails"
    script = """
import os, threading
if os.environ["RANK"] == "1": threading.Timer(12, os._exit, [7]).start()
""" + SCRIPT + """
while True: llm.generate(["A", "B"]*8, SamplingParams(max_tokens=60), use_tqdm=False)"""
    (tmp_path/"script.py").write_text(script)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run([*run, tmp_path/"script.py"], capture_output=True, text=True, timeout=200)
    assert done.returncode and len(done.stdout.splitlines()) == 1


def test_bfloat16():
    "Sums are rounded, too: most answers agree"
    said = []
    for n in 1, 3:
        llm = LLM(dtype="bfloat16", enforce_eager=True, tensor_parallel_size=n)
        said.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)])
        llm.shutdown()
    same = sum(a == b for x, y in zip(*said) for a, b in zip(x, y))
    assert same > .6*sum(len(x) for x in said[0]) and torch.get_num_threads() > 0
