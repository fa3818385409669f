"The server under load, with the default model: minutes. `make long` runs it"
import asyncio
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("openai")
ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT/"tools"), str(ROOT/"tests")]

from peer_server import account, make_load, run_load
from test_server import empty, fuzz, pool_of, soak, tiny

from pagedlm import LLM, SamplingParams
from pagedlm.server import Server

SECONDS = float(os.environ.get("PAGEDLM_SOAK", 600))
REQUESTS = int(os.environ.get("PAGEDLM_LOAD", 500))


def resident():
    "Bytes of this process that are in memory"
    return int(Path("/proc/self/statm").read_text().split()[1])*os.sysconf("SC_PAGE_SIZE")


def test_a_load_is_answered_as_each_request_alone():
    llm, load = LLM(), make_load(REQUESTS)
    with Server(llm, "m", max_queue=500) as server:
        address = "127.0.0.1", int(server.url.rpartition(":")[2])
        asyncio.run(run_load(*address, "m", load[:64]))  # whatever is made once has been made
        empty(server)
        before = resident()
        heard, seconds, cpu = asyncio.run(run_load(*address, "m", load))
        empty(server)
        grown, pool = resident() - before, pool_of(server)
        assert pool.n_free == pool.n_blocks - 1
    told = account(load, heard, seconds, cpu)
    print("\n" + "\n".join(f"{k:26}{v:10.1f}" for k, v in told.items()), f"\n{'grown, MB':26}{grown/1e6:10.1f}")
    stayed = [(a, h.text) for a, h in zip(load, heard) if a.patience is None]
    assert len(stayed) > .7*REQUESTS and all(text is not None for _, text in stayed)
    assert grown < 64e6, f"{grown/1e6:.0f} MB more than before"  # its blocks are touched one after the other, once
    wrong = 0
    for a, text in stayed:
        params = SamplingParams(temperature=0, max_tokens=a.max_tokens, ignore_eos=True)
        wrong += llm.generate(a.prompt, params, use_tqdm=False)[0].outputs[0].text != text
    assert wrong == 0, f"{wrong} of {len(stayed)} answers differ from the same request alone"


@pytest.mark.parametrize("seed", [0])
def test_two_thousand_made_up_requests(seed):
    with Server(tiny(), "tiny") as server:
        seen = fuzz(server, 2000, seed)
        empty(server)
    assert len(seen) >= 1500 and 200 in seen and 400 in seen


def test_ten_minutes_of_everything():
    with Server(tiny(), "tiny", max_queue=8) as server:
        soak(server, 5, seed=1)
        before = resident()
        done = soak(server, SECONDS, seed=2)
        grown = resident() - before
    print("\n", done, f"{grown/1e6:.0f} MB more")
    assert grown < 100e6
    assert not server.engine.alive
