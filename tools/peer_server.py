"""Two servers under the same load, in turns: ours and vLLM's on this CPU, and what each does with it offline.

python tools/peer_server.py                        # both: bench/server/peers.json, minutes
python tools/peer_server.py --only pagedlm         # ours alone, nothing written
python tools/peer_server.py --requests 12 --parts vllm.server
python tools/peer_server.py --requests 500 --rounds 3

vLLM is the one that tools/peers.py has installed, and reads the checkpoint that was made for it there. Both greedy,
without prefix caching, at most 512 tokens in a step, each with the weights that it is best with. The client is one
asyncio loop on raw sockets in this process; its own CPU time is told, since it takes from the same cores.
What an engine does offline is measured right after what it does through its server, since a shared machine's speed
drifts by more than a server costs; numbers are medians of the rounds.
"""
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.request import urlopen

from peers import ENGINES, ROOT, machine, make_checkpoint, n_cores, start, where_things_are

WORDS = ("the of and a to in is you that it he was for on are as with his they at be this from have or by one had not "
         "but what all were when we there can an your which their said if do will each about how up out them then she "
         "many some so these would other into has more her two like him see time could no make than first been its who").split()


class Ask(NamedTuple):
    "A request of the load, and how its client behaves"
    prompt:str
    max_tokens:int
    patience:int = None # hangs up after so many events; None: stays


class Heard(NamedTuple):
    "What a client heard, and when, in seconds"
    text:str            # None: it hung up, or was refused
    sent:float
    times:list          # of each event with text
    status:int


def make_load(n, seed=0, hang_up=.2, words=(8, 160), tokens=(8, 64)):
    "Mixed lengths, and some clients who will not stay"
    rnd, load = random.Random(seed), []
    for i in range(n):
        prompt = f"Text {i}: " + " ".join(rnd.choices(WORDS, k=rnd.randint(*words)))
        most = rnd.randint(*tokens)
        load.append(Ask(prompt, most, rnd.randint(0, most//2) if rnd.random() < hang_up else None))
    return load


async def ask(host, port, model, a, key=None):
    "One streamed completion over a socket of its own, read line by line"
    body = json.dumps(dict(model=model, prompt=a.prompt, max_tokens=a.max_tokens, temperature=0, ignore_eos=True, stream=True)).encode()
    reader, writer = await asyncio.open_connection(host, port)
    pieces, times, sent = [], [], time.perf_counter()
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        if a.patience == 0: # gone before anything came
            await writer.drain()
            await asyncio.sleep(.01)
            return Heard(None, sent, times, 0)
        status = int((await reader.readline()).split()[1])
        while line := await reader.readline():
            if not line.startswith(b"data: {"): continue
            times.append(time.perf_counter())
            pieces.append(line)
            if a.patience and len(pieces) >= a.patience: return Heard(None, sent, times, status)
        said = [json.loads(p[6:]) for p in pieces]
        wrong = [s for s in said if "error" in s]
        text = None if wrong or status != 200 else "".join(s["choices"][0]["text"] for s in said if s["choices"])
        return Heard(text, sent, times, status)
    finally:
        writer.close()


async def run_load(host, port, model, load, at_once=64):
    "All of it, so many at a time: what each client heard, the seconds it took, the client's own CPU seconds"
    seats, start, cpu = asyncio.Semaphore(at_once), time.perf_counter(), time.thread_time()
    async def one(a):
        async with seats: return await ask(host, port, model, a)
    heard = await asyncio.gather(*map(one, load))
    return heard, time.perf_counter() - start, time.thread_time() - cpu


def percentile(xs, p):
    xs = sorted(xs)
    return xs[min(len(xs) - 1, int(len(xs)*p/100))] if xs else float("nan")


def account(load, heard, seconds, cpu):
    "The numbers of a run; times in milliseconds, of those who stayed; tokens of those who left count as far as they heard"
    whole = [h for h in heard if h.text is not None]
    first = [1e3*(h.times[0] - h.sent) for h in whole]
    gaps = [1e3*(b - a) for h in whole for a, b in zip(h.times, h.times[1:])]
    n_out = sum(a.max_tokens if h.text is not None else len(h.times) for a, h in zip(load, heard))
    return dict(requests=len(load), complete=len(whole), left=sum(a.patience is not None for a in load), seconds=seconds,
                tokens_per_second=n_out/seconds, ttft_p50=percentile(first, 50), ttft_p99=percentile(first, 99),
                itl_p50=percentile(gaps, 50), itl_p99=percentile(gaps, 99), client_cpu_seconds=cpu)


ROWS = dict(requests="requests", complete="answered in full", left="clients who hang up midway", seconds="seconds",
            tokens_per_second="output tokens/s, through the server", offline="output tokens/s, offline",
            share="server / offline", ttft_p50="time to first token, ms, median", ttft_p99="… 99th percentile",
            itl_p50="time between tokens, ms, median", itl_p99="… 99th percentile",
            client_cpu_seconds="the client's own CPU seconds", wrong="answers that differ from the same request alone",
            leaked="blocks leaked", grown_mb="memory grown, MB")


def table(columns):
    "Markdown: a row for each number, a column for each server"
    def cell(key, x): return "–" if x is None else f"{x:.0%}" if key == "share" else f"{x:,.1f}" if isinstance(x, float) else f"{x:,}"
    rows = [[words, *(cell(key, told.get(key)) for told in columns.values())] for key, words in ROWS.items()
            if any(key in told for told in columns.values())]
    lines = [["", *columns], ["---", *["--:"]*len(columns)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def record(name, columns, says):
    "Write bench/server/NAME.json, with the table that the site shows"
    m, date = machine(), datetime.now(timezone.utc).strftime("%Y-%m-%d")
    stamp = f"{date}: {m['cpu']}, {m['cores']} cores, {m['system']}. {says}"
    path = ROOT/"bench"/"server"/f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    told = dict(date=date, machine=m, columns=columns, markdown=f"{table(columns)}\n\n{stamp}\n")
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return told


# ---- the two servers

OURS = "from pagedlm.cli import main; raise SystemExit(main())"
SERVERS = dict(  # name in tools/peers.py: (its label, command after the Python)
    pagedlm=("pagedlm", ["-c", OURS, "serve", "--max-queue", "1000", "--option", "enable_prefix_caching=False"]),
    vllm=("vLLM", ["-m", "vllm.entrypoints.openai.api_server", "--model", "{checkpoint}", "--dtype", "bfloat16", "--host", "127.0.0.1",
                   "--max-model-len", "2048", "--no-enable-prefix-caching", "--max-num-batched-tokens", "512"]))
VLLM_ENV = dict(VLLM_CPU_KVCACHE_SPACE="2", VLLM_LOGGING_LEVEL="WARNING", VLLM_CPU_OMP_THREADS_BIND="nobind",
                VLLM_CACHE_ROOT="{home}/vllm-cache", TORCHINDUCTOR_CACHE_DIR="{home}/inductor-cache")


def through_server(engine, places, load, at_once, port):
    "Start a server, warm it up, put the load on it, end it"
    command = [places.python(engine), *map(places.fill, SERVERS[engine.name][1]), "--port", str(port), "--served-model-name", "m"]
    own = {k: places.fill(v) for k, v in {**engine.env, **(VLLM_ENV if engine.where else {})}.items()}
    env = {**os.environ, **own, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": str(n_cores())}
    (places.home/"logs").mkdir(parents=True, exist_ok=True)
    with open(places.home/"logs"/f"server-{engine.name}.txt", "wb") as log:
        child = subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0)
        try:
            wait_until_it_listens(child, port, log.name)
            asyncio.run(run_load("127.0.0.1", port, "m", [a._replace(patience=None) for a in load[:8]], 8))
            return account(load, *asyncio.run(run_load("127.0.0.1", port, "m", load, at_once)))
        finally:
            end(child)


def wait_until_it_listens(child, port, log, seconds=400):
    limit = time.monotonic() + seconds
    while True:
        try:
            return urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except OSError:
            if child.poll() is not None or time.monotonic() > limit:
                raise SystemExit(f"the server did not start; see {log}") from None
            time.sleep(.5)


def end(child):
    "And whatever it started"
    child.terminate()
    try:
        child.wait(60)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def offline(engine, places, load, ids):
    "Output tokens per second of `LLM.generate` with the same prompts; who hangs up wants no more than it heard"
    work = [dict(prompt=p, n=a.max_tokens if a.patience is None else max(1, a.patience)) for p, a in zip(ids, load)]
    worker = start(engine, places, n_cores())
    try:
        with TemporaryDirectory() as folder:
            path = Path(folder)/"load.json"
            path.write_text(json.dumps(work), encoding="utf-8")
            worker.ask("warm", path)
            return sum(w["n"] for w in work)/worker.ask("run", path)["seconds"]
    finally:
        worker.close()


def verdict(ours, theirs):
    "The three things that are to be shown"
    return {"times its throughput, at least 1.5": (x := ours["tokens_per_second"]/theirs["tokens_per_second"], x >= 1.5),
            "times its median time to first token, less than 1": (x := ours["ttft_p50"]/theirs["ttft_p50"], x < 1),
            "times its server/offline ratio, at least 1": (x := ours["share"]/theirs["share"], x >= 1)}


def main():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--requests", type=int, default=100)
    add("--at-once", type=int, default=64)
    add("--rounds", type=int, default=1)
    add("--port", type=int, default=18123)
    add("--only", choices=list(SERVERS))
    add("--parts", help="some of pagedlm.server, pagedlm.offline, vllm.server, vllm.offline, separated by commas")
    add("--home", type=Path, help="where the engines live; else $PAGEDLM_PEERS, or pagedlm's cache")
    how = parser.parse_args()
    places = where_things_are(how)
    make_checkpoint(places)
    from pagedlm.weights import open_source
    load, tokenizer = make_load(how.requests), open_source(places.gguf).tokenizer()
    ids, rounds = [tokenizer.encode(a.prompt) for a in load], {}
    every = [f"{name}.{part}" for name in SERVERS if how.only in (None, name) for part in ("server", "offline")]
    for i, part in enumerate((how.parts.split(",") if how.parts else every)*how.rounds):
        name, _, what = part.partition(".")
        engine, turns, begin = next(e for e in ENGINES if e.name == name), rounds.setdefault(name, []), time.perf_counter()
        if not turns or ("seconds" if what == "server" else "offline") in turns[-1]:
            turns.append({})
        told = turns[-1]
        if what == "server":
            told.update(through_server(engine, places, load, how.at_once, how.port + i))
        else:
            told["offline"] = offline(engine, places, load, ids)
        if {"seconds", "offline"} <= told.keys():
            told["share"] = told["tokens_per_second"]/told["offline"]
        print(f"{part}: {time.perf_counter() - begin:.0f} s, {json.dumps({k: round(v, 3) for k, v in told.items()})}", flush=True)
    found = {name: {k: median(told[k] for told in turns) for k in turns[0]} for name, turns in rounds.items()}
    columns = {SERVERS[name][0]: told for name, told in found.items()}
    if not all("share" in found.get(name, ()) for name in SERVERS):
        return print(table(columns))
    shown = verdict(found["pagedlm"], found["vllm"])
    words = "; ".join(f"**{x:.2f}** {what}{'' if right else ' (missed)'}" for what, (x, right) in shown.items())
    shares = "; ".join(SERVERS[name][0] + " " + ", ".join(f"{told['share']:.3f}" for told in turns)
                       for name, turns in rounds.items())
    says = f"{how.at_once} at a time, medians of {how.rounds} rounds. pagedlm has {words}. Server/offline, round by round: {shares}."
    print(record("peers", columns, says)["markdown"])
    return int(not all(right for _, right in shown.values()))


if __name__ == "__main__":
    sys.exit(main())
