"Several ranks, one model: the same answers, whatever the schedule; each reads its share of any file; nobody outlives the others"
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from random import Random

import gguf_files
import pytest
import test_families as hf
import torch
from common import loaded, mutant, play, random_arrivals, random_world
from test_oracle import EOS, Real, random_params
from torch import distributed as dist

import pagedlm.parallel as parallel
from pagedlm import LLM, SamplingParams
from pagedlm.attention import Dense
from pagedlm.core import StructuredOutputsParams, cdiv
from pagedlm.model import tiny_config, tiny_model
from pagedlm.paged import load_backend
from pagedlm.parallel import HERE, RankRunner, Ranks, Shard, assemble, follow, load_share, share_model, share_of
from pagedlm.quant import load_packed
from pagedlm.tokenizer import ByteTokenizer
from pagedlm.weights import config_of, load_into, open_source

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = dict(llama=tiny_config(vocab_size=65), qwen3=tiny_config(vocab_size=64, qk_norm="head", tied=False),
              moe=tiny_config(vocab_size=64, n_experts=4, n_active=2, mlp_width=32))


# ---- the same answers

class InRanks(Real):
    "A `World` whose model is cut over ranks, which are threads"
    def __init__(self, model, n=2, **shape):
        self.n = n
        super().__init__(model, **shape)

    def share(self, rank, store):
        ranks = Ranks(rank, self.n).connect(store, host=HERE)
        return ranks, load_share((self.model.config, share_of(self.model, rank, self.n)), ranks, self.model.dtype)[0]

    def other(self, rank, store):
        follow(*self.share(rank, store), load_backend("torch"))  # whose scratch memory is its own

    def runner_of(self, scheduler):
        store, pool = dist.HashStore(), self.manager.pool
        self.threads = [threading.Thread(target=self.other, args=(rank, store), daemon=True) for rank in range(1, self.n)]
        for t in self.threads:
            t.start()
        self.ranks, share = self.share(0, store)
        sizes = pool.n_blocks, self.manager.block_size, scheduler.max_num_seqs, scheduler.limit
        runner = RankRunner(self.ranks, share, self.backend, *sizes)
        runner.cache.fill(float("nan"))
        return runner

    def close(self):
        self.ranks.say(None)
        for t in self.threads:
            t.join(10)
            assert not t.is_alive()


@pytest.mark.parametrize("name,seed", [("llama", 8), ("qwen3", 11), ("moe", 11)])  # in short games everything happens
def test_ranks_equal_naive(name, seed):
    model, rnd, happened = tiny_model(MODELS[name], dtype=torch.float64), Random(f"{name} {seed}"), set()
    for i in range(3):
        block_size = rnd.randint(1, 6)
        shape = dict(block_size=block_size, n_blocks=1 + cdiv(rnd.randint(8, 40), block_size))
        world = random_world(rnd, kind=partial(InRanks, model), **shape)
        arrivals = random_arrivals(rnd, world, vocab=range(64), eos_ids=EOS)
        play(world, rnd, [a | random_params(rnd) for a in arrivals], p_abort=.02, p_lose=.05, p_fail=.03)
        happened |= {name for name, _ in world.events}
        world.close()
    assert {"preempt", "share", "evict"} <= happened


# ---- each its share

def shares_of_file(path):
    "Each rank's model, filled from a file"
    source = open_source(path)
    config = config_of(source)
    for rank in range(2):
        model = share_model(config, Ranks(rank, 2))
        load_into(model, Shard(source, config, rank, 2))
        yield model.state_dict()


def check_shares(path):
    whole = loaded(path)
    for rank, held in enumerate(shares_of_file(path)):
        expected = share_of(whole, rank, 2)
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], expected[name]) for name in held)


def divides(config):
    return config.n_kv_heads % 2 == 0 and config.qk_norm != "width"


@pytest.mark.parametrize("case", [name for name in hf.CASES if divides(hf.ours_config(name))])
def test_shares_of_safetensors(case, tmp_path):
    check_shares(hf.saved(hf.theirs(*hf.CASES[case]), tmp_path))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3moe", "gpt2"])
def test_shares_of_gguf(arch, kind, tmp_path):
    check_shares(gguf_files.write(gguf_files.build(arch), arch, tmp_path/"a.gguf", kind))


def test_a_vocabulary_that_does_not_divide():
    "Four rows over three ranks: two, two, and nothing but zeros"
    model = tiny_model(tiny_config(vocab_size=4, n_heads=6, n_kv_heads=3, mlp_width=96))
    shares = [share_of(model, rank, 3)["embed.weight"] for rank in range(3)]
    assert torch.equal(torch.cat(shares[:2]), model.embed.weight) and shares[2].shape == (2, 64) and not shares[2].any()


# ---- who tests the tests?

BUGS = {  # what is wrong: (a piece of the source, what to put there)
    "a bias is added by every rank": ("torch.zeros_like(x) if self.rank else x", "x"),
    "a stack is cut in the middle": ("self._shape(name, 0, sizes), sizes)", "self._shape(name, 0, sizes), [sum(sizes)])"),
    "all have the first columns": ("x[:, self.rank*n:(self.rank + 1)*n]", "x[:, :n]"),
    "an id elsewhere is the first one here": (".masked_fill(elsewhere[:, None], 0)", ""),
    "ids begin at 0 everywhere": ("ranks.rank*V, V, own", "0, V, own"),
    "the MLP is not summed": ("for part in (b.attn, b.mlp)", "for part in (b.attn,)"),
}


def off(module, model, ids):
    def one(ranks):
        own, _ = module.load_share((model.config, module.share_of(model, ranks.rank, 2)), ranks, model.dtype)
        return own(ids, Dense())
    with torch.inference_mode():
        return max((x - model(ids, Dense())).abs().max().item() for x in module.as_threads(2, torch.inference_mode()(one)))


def test_a_wrong_cut_is_noticed(tmp_path):
    model = tiny_model(tiny_config(qkv_bias=True, out_bias=True, mlp_bias=True), dtype=torch.float64)
    ids = torch.arange(0, 250, 9)
    assert off(parallel, model, ids) < 1e-12
    for i, (bug, change) in enumerate(BUGS.items()):
        assert off(mutant(parallel, *change, tmp_path/f"parallel{i}.py"), model, ids) > 1e-3, bug


# ---- what cannot be

@pytest.mark.parametrize("changes,words", [
    (dict(tensor_parallel_size=2), "tensor_parallel_size=2, but this model has 9 heads, 3 KV heads: it can be 1, 3"),
    (dict(tensor_parallel_size=0), "tensor_parallel_size=0, but it must be a whole number of at least 1"),
    (dict(tensor_parallel_size="2"), "tensor_parallel_size='2', but it must be"),
    (dict(tensor_parallel_size=3, quantization="int8"), "quantization='int8' with tensor_parallel_size=3, but packed weights are not cut"),
    (dict(tensor_parallel_size=2, model=tiny_model()), "brings no tokenizer"),
    (dict(tensor_parallel_size=2, model=tiny_model(tiny_config(n_kv_heads=1)), tokenizer=ByteTokenizer()), "2, but this model has 1 KV heads: it can be 1")])
def test_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        LLM(**changes)


def test_packed_weights_are_refused(tmp_path):
    source = open_source(gguf_files.write(gguf_files.build("llama"), "llama", tmp_path/"a.gguf", "Q8_0"))
    source.tokenizer = lambda: None
    with pytest.raises(ValueError, match="tensor_parallel_size=2, but packed weights are not cut"):
        assemble(2, load_packed(source)[0], load_backend("torch"))


def test_launched_by_somebody_else(monkeypatch):
    for name, x in dict(RANK=1, WORLD_SIZE=3, MASTER_ADDR="localhost", MASTER_PORT=1).items():
        monkeypatch.setenv(name, str(x))
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2, but 3 processes were launched \(WORLD_SIZE\)"):
        LLM(tiny_model(), ByteTokenizer(), tensor_parallel_size=2)


# ---- processes

def alive(pid):
    "Does it run? A process that has ended may wait for its parent to take note"
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true, seconds=15):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(.05)


PROMPTS = [f"{i} is a number" for i in range(6)]


def said(llm, **kw):
    params = SamplingParams(**dict(temperature=0, max_tokens=12) | kw)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs and [[*p] for p in o.outputs[0].logprobs],
             o.prompt_logprobs and [p and [*p] for p in o.prompt_logprobs]) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


WISHES = [dict(), dict(temperature=1, top_p=.9, top_k=40, seed=1), dict(repetition_penalty=1.4, frequency_penalty=.3),
          dict(logprobs=3, prompt_logprobs=2), dict(bad_words=["a", "b"], logit_bias={40: 4.}, min_tokens=3), dict(allowed_token_ids=[40, 41, 42])]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="signals as Unix has them")
def test_two_processes():
    "Answers, wishes, vectors; Ctrl-C in the middle; a rank that is killed; nothing left over"
    model = tiny_model(dtype=torch.float64)
    one, two = (LLM(model, ByteTokenizer(), enforce_eager=True, max_num_batched_tokens=32, tensor_parallel_size=n) for n in (1, 2))
    worker = two.engine.run.crew.processes[1]
    for kw in WISHES:
        assert said(one, **kw) == said(two, **kw), kw
    try:
        assert said(one, structured_outputs=StructuredOutputsParams(regex="(yes|no)+")) == said(two, structured_outputs=StructuredOutputsParams(regex="(yes|no)+"))
    except ValueError as e:
        assert "llguidance is not installed" in str(e)
    vectors = [llm.embed("a text", use_tqdm=False)[0].outputs.embedding for llm in (one, two)]
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-9)

    def raises(logits, *how):
        raise ZeroDivisionError
    chooser, right = two.engine.run.chooser, two.engine.run.chooser.sampler
    chooser.sampler = raises
    with pytest.raises(ZeroDivisionError):
        said(two)
    chooser.sampler = right

    for seconds in .05, .2, .4:
        threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                said(two, max_tokens=100)
    assert said(one) == said(two) and worker.poll() is None

    worker.kill()
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"rank 1 \(process {worker.pid}\) has ended, killed by SIGKILL"):
            said(two)
    assert time.monotonic() - start < 10 and worker.poll() == -signal.SIGKILL


def test_closing_leaves_nothing(tmp_path, monkeypatch):
    "An `LLM` that does not come about, and one that nobody holds any more"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made, popen = [], parallel._python
    monkeypatch.setattr(parallel, "_python", lambda *a, **kw: made.append(popen(*a, **kw)) or made[-1])
    how = dict(model=tiny_model(), tokenizer=ByteTokenizer(), tensor_parallel_size=2)
    with pytest.raises(ValueError, match="max_model_len=9999"):
        LLM(**how, max_model_len=9999)
    assert made[-1].poll() == 0
    llm = LLM(**how, async_scheduling=True)
    assert said(llm) == said(LLM(*[how[k] for k in ("model", "tokenizer")], enforce_eager=True)) and made[-1].poll() is None
    del llm
    gc.collect()
    assert made[-1].poll() == 0 and len(made) == 2 and not list(tmp_path.iterdir())


SCRIPT = """
import os, signal, sys, torch
from pagedlm import LLM, SamplingParams
from pagedlm.model import tiny_model
from pagedlm.tokenizer import ByteTokenizer
llm = LLM(tiny_model(), ByteTokenizer(), tensor_parallel_size=2)
print(*llm.generate("A", SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)[0].outputs[0].token_ids, flush=True)
"""  # as anybody would write it: nothing guards its main part


def answer():
    llm = LLM(tiny_model(), ByteTokenizer(), enforce_eager=True)
    return llm.generate("A", SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)[0].outputs[0].token_ids


def test_no_orphans(tmp_path):
    "A script whose process is killed takes the other rank along"
    script = SCRIPT + "print(llm.engine.run.crew.processes[1].pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path/"script.py").write_text(script)
    done = subprocess.run([sys.executable, tmp_path/"script.py"], capture_output=True, text=True, timeout=100)
    ids, pid = done.stdout.splitlines()
    assert [*map(int, ids.split())] == answer() and done.returncode == -signal.SIGKILL
    wait_until(lambda: not alive(pid))


def test_torchrun(tmp_path):
    "The same script, started twice by somebody else: rank 0 answers, rank 1 follows and leaves"
    (tmp_path/"script.py").write_text(SCRIPT + """
llm.shutdown()
try: llm.generate("A", use_tqdm=False)
except RuntimeError as e: print(e, flush=True)
""")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d",
                           "--rdzv-endpoint", "localhost:0", tmp_path/"script.py"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [" ".join(map(str, answer())), "this engine was shut down"]
