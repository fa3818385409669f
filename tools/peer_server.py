"""Two servers under the same load, in turns: ours and vLLM's on this CPU.

python tools/peer_server.py                    # both, three rounds each, a table at the end
python tools/peer_server.py --only pagedlm     # ours alone
python tools/peer_server.py --requests 100 --at-once 16 --rounds 1

vLLM is the one that tools/peers.py has installed, and reads the same checkpoint that was written for it there. Both
serve bfloat16 or what each is fastest with (--dtype), greedy, without prefix caching. The client is one asyncio
loop on raw sockets in this process; its own CPU time is told, since it takes from the same cores.
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
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

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
    "The numbers of a run; times in milliseconds"
    whole = [(a, h) for a, h in zip(load, heard) if h.text is not None]
    first = [1e3*(h.times[0] - h.sent) for _, h in whole]
    gaps = [1e3*(b - a) for _, h in whole for a, b in zip(h.times, h.times[1:])]
    n_out = sum(a.max_tokens for a, _ in whole)
    return dict(requests=len(load), complete=len(whole), seconds=seconds, output_tokens_per_second=n_out/seconds, client_cpu_seconds=cpu,
                ttft_p50=percentile(first, 50), ttft_p99=percentile(first, 99), itl_p50=percentile(gaps, 50), itl_p99=percentile(gaps, 99))


# ---- the two servers

CACHE = Path(os.environ.get("PAGEDLM_CACHE") or Path.home()/".cache"/"pagedlm")/"peers"


def ours(port, model, dtype):
    command = "from pagedlm.cli import main; raise SystemExit(main())"
    return [sys.executable, "-c", command, "serve", "--port", str(port), "--max-queue", "1000", "--served-model-name", "m",
            *(["--model", str(model)] if model else []), *(["--dtype", dtype] if dtype else []), "--option", "enable_prefix_caching=False"], {}


def vllms(port, model, dtype):
    env = dict(VLLM_CPU_KVCACHE_SPACE="2", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING", VLLM_CPU_OMP_THREADS_BIND="nobind",
               VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_CACHE_ROOT=str(CACHE/"vllm-cache"))
    return [str(CACHE/"vllm"/"bin"/"python"), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
            "--model", str(model or CACHE/"checkpoint"), "--served-model-name", "m", "--dtype", dtype or "bfloat16",
            "--max-model-len", "2048", "--no-enable-prefix-caching", "--max-num-batched-tokens", "512"], env


def one_round(command, env, load, at_once, port):
    "Start a server, warm it up, put the load on it, end it"
    log = open(CACHE/"logs"/"server.log", "ab") if (CACHE/"logs").is_dir() else subprocess.DEVNULL
    child = subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 300
        while True:
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                if child.poll() is not None or time.monotonic() > end: raise SystemExit(f"{command[0]} did not start") from None
                time.sleep(.5)
        asyncio.run(run_load("127.0.0.1", port, "m", [a._replace(patience=None) for a in load[:8]], 8))
        return account(load, *asyncio.run(run_load("127.0.0.1", port, "m", load, at_once)))
    finally:
        child.send_signal(signal.SIGTERM)
        try: child.wait(60)
        except subprocess.TimeoutExpired: child.kill()


def main():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--requests", type=int, default=200)
    add("--at-once", type=int, default=64)
    add("--rounds", type=int, default=3)
    add("--port", type=int, default=18123)
    add("--model", help="a folder that both read (ours: the default model; vLLM: the checkpoint of tools/peers.py)")
    add("--dtype", help="of both (each its own best)")
    add("--only", choices=["pagedlm", "vllm"])
    args = parser.parse_args()
    load, found = make_load(args.requests), {}
    for i in range(args.rounds):
        for name, make in dict(pagedlm=ours, vllm=vllms).items():
            if args.only in (None, name):
                told = one_round(*make(args.port + i, args.model, args.dtype), load, args.at_once, args.port + i)
                found.setdefault(name, []).append(told)
                print(name, json.dumps({k: round(v, 1) for k, v in told.items()}), flush=True)
    print(f"\n{'median of rounds':26}" + "".join(f"{n:>12}" for n in found))
    for k in found[next(iter(found))][0]:
        print(f"{k:26}" + "".join(f"{percentile([t[k] for t in rounds], 50):12.1f}" for rounds in found.values()))


if __name__ == "__main__":
    main()
