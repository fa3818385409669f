"The server under load, with the default model, and among faults: minutes. `make long` runs it"
import asyncio
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("openai")
ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT/"tools"), str(ROOT/"tests")]

from peer_server import account, make_load, record, run_load, table
from soak import soak
from test_server import empty, fuzz, pool_of, tiny

from pagedlm import LLM, SamplingParams
from pagedlm.server import Server

SECONDS = float(os.environ.get("PAGEDLM_SOAK", 600))
REQUESTS = int(os.environ.get("PAGEDLM_LOAD", 500))
AT_ONCE = 64


def resident():
    "Bytes of this process that are in memory"
    return int(Path("/proc/self/statm").read_text().split()[1])*os.sysconf("SC_PAGE_SIZE")


def differ(llm, asked):
    "How many answers differ from what the model says to each request alone"
    wrong = 0
    for a, text in asked:
        params = SamplingParams(temperature=0, max_tokens=a.max_tokens, ignore_eos=True)
        wrong += llm.generate(a.prompt, params, use_tqdm=False)[0].outputs[0].text != text
    return wrong


def test_a_load_is_answered_as_each_request_alone():
    llm, load = LLM(), make_load(REQUESTS)
    llm.engine.run.cache.fill(float("nan"))  # all of its memory is there from now on; and nobody reads what nobody wrote
    with Server(llm, "m", max_queue=500) as server:
        address = "127.0.0.1", int(server.url.rpartition(":")[2])
        asyncio.run(run_load(*address, "m", load[:AT_ONCE]))  # whatever is made once has been made
        empty(server)
        before = resident()
        heard, seconds, cpu = asyncio.run(run_load(*address, "m", load, AT_ONCE))
        empty(server)
        grown, pool = resident() - before, pool_of(server)
    stayed = [(a, h.text) for a, h in zip(load, heard) if a.patience is None]
    told = account(load, heard, seconds, cpu) | dict(
        wrong=differ(llm, stayed), leaked=pool.n_blocks - 1 - pool.n_free, grown_mb=grown/1e6)
    print("\n" + table({"pagedlm": told}))
    assert len(stayed) > .7*REQUESTS and all(text is not None for _, text in stayed)
    assert told["leaked"] == 0 and told["wrong"] == 0
    assert grown < 64e6
    if REQUESTS == 500:  # the whole of it: the site shows this table
        record("load", {"pagedlm": told}, f"{AT_ONCE} at a time; every answer was compared with that to the same request alone.")


def test_two_thousand_made_up_requests():
    with Server(tiny(), "tiny") as server:
        seen = fuzz(server, 2000)
        empty(server)
    print("\n", {status: seen.count(status) for status in sorted(set(seen))})
    assert len(seen) >= 2000 and {200, 400} <= set(seen)


def test_ten_minutes_of_everything():
    done, grown = soak(SECONDS, pace=.03)
    print("\n", done, f"{grown/1e6:.0f} MB more")
    assert min(done[kind] for kind in ("good", "leaves", "half_a_body", "oversized", "no_utf8", "template_raises", "no_grammar", "bad_request")) > SECONDS/60
