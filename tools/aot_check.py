"""Compile the package's kernels for GPUs that are not here; fail where machine code is not what it must be.

python tools/aot_check.py                   # the default table: the shapes of `config.EXAMPLES`
python tools/aot_check.py --all             # all that the package can launch: every knob, for every head size
python tools/aot_check.py --target sm_90 --kernel attend --jobs 1 --json build/aot.json
python tools/aot_check.py --list            # what would be compiled
python tools/aot_check.py --self-test       # does it see what is broken?

What the package decides is not written down here again. One layer's step runs through the real back-end, on
tensors without memory and a GPU of which only the name is there; its launches are noted instead of made, and
Triton's own JIT compiles them for the arguments that they had. It fails on

- a compile error, or a compiler that dies;
- more shared memory than a program of the target may have;
- vector registers that spill, for bfloat16 and float16 of the default table;
- attention in these types without a matrix instruction; for many tokens and heads of up to 256 it must be the
  best that the target has (wgmma on sm_90);
- keys and values that do not come as 16-byte asynchronous copies, on gfx942 as loads as wide as that;
- a kernel of the package that no configuration launches.
"""
import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from multiprocessing import connection, get_context
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # Triton is imported in one mode for good: here, to compile
os.environ["TRITON_ALWAYS_COMPILE"] = "1" # what was compiled yesterday proves nothing today
warnings.filterwarnings("ignore", message=".*TRITON_DEFAULT_FP_FUSION")
if sys.platform != "linux":
    sys.exit(print("Triton exists for Linux only: no kernel is compiled here"))

import torch
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget

import pagedlm
from pagedlm import fused, kernels
from pagedlm.attention import AttnSpec
from pagedlm.config import EXAMPLES
from pagedlm.core import cdiv
from pagedlm.kernels import Launch, TritonBackend
from pagedlm.paged import AttnMeta


class Target(NamedTuple):
    "A kind of GPU"
    gpu:GPUTarget
    shared:int   # KiB that one program may have
    matrix:str   # instruction of its matrix unit

TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163, "mma.sync"),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227, "wgmma"),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227, "tcgen05.mma"),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 99, "mma.sync"),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64, "v_mfma")}
N_PROCESSORS = 132  # of the GPU that is not here: planning asks, machine code does not depend on it
LIMIT = 300         # seconds for one kernel
TOOLS = Path(triton.__file__).parent/"backends"/"nvidia"/"bin"
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "e4m3",
         torch.float8_e5m2: "e5m2"}
BF16, FP16, FP32, E4M3, E5M2 = NAMES


# ---- what the package launches

class Job(NamedTuple):
    "One kernel to compile for one target"
    kernel:str         # and whether requests have few or many new tokens
    config:str         # in words
    target:str
    fn:object = None   # with the arguments of a launch
    args:tuple = ()
    how:dict = {}
    strict:bool = False # may not spill
    skip:str = None    # why it is not compiled


class Noted:
    "Stands where a kernel stood and writes down its launches"
    def __init__(self, fn, calls): self.fn, self.calls = fn, calls
    def __getitem__(self, grid): return lambda *args, **how: self.calls.append((self.fn, args, how))


@cache
def package_kernels():
    "All kernels that launchers of the package call: [(module, name, kernel)]"
    texts = {path.stem: path.read_text() for path in sorted(Path(pagedlm.__file__).parent.glob("*.py"))}
    modules = [import_module(f"pagedlm.{name}") for name, text in texts.items() if "@triton.jit" in text]
    return [(m, name, fn) for m in modules for name, fn in vars(m).items() if name.endswith("_kernel")]


@contextmanager
def pretend(target):
    "The package on a GPU that it would call by that name; gives the list that its launches go to"
    calls = []
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "is_available", lambda: True))
        stack.enter_context(patch.object(kernels, "gpu_of", lambda device: (target, N_PROCESSORS)))
        for module, name, fn in package_kernels():
            stack.enter_context(patch.object(module, name, Noted(fn, calls)))
        yield calls


def tensor(*shape, dtype=torch.int32):
    "One that has everything but memory"
    return torch.empty(shape, dtype=dtype, device="meta")


class Case(NamedTuple):
    "What a layer's attention is made of"
    config:object         # a `ModelConfig`: heads and head size
    dtype:torch.dtype = BF16
    kv:torch.dtype = None # of keys and values in the cache; None: the same
    B:int = 16            # tokens per block
    window:int = None
    softcap:float = None
    sinks:bool = False
    norm:bool = False     # of query and key heads
    pairs:bool = False    # neighbouring channels turn together
    rot:int = None        # channels that turn; None: all
    positions:torch.dtype = torch.int64

    def words(self, kernel, how):
        "What matters of it to one of its kernels"
        c = self.config
        said = [f"D{c.head_dim}", f"G{c.n_heads//c.n_kv_heads}"*(kernel != "store"), NAMES[self.dtype]]
        if kernel == "merge": return " ".join([*said, "{BM} rows".format(**how)])
        said += [f"kv-{NAMES.get(self.kv)}"*bool(self.kv), f"B{self.B}"*(self.B != 16)]
        knobs = "norm pairs rot".split() if kernel == "store" else "window softcap sinks".split()
        said += [name for name in knobs if getattr(self, name)]
        if kernel == "attend": said += ["{BM}x{TILE} {num_warps}w {num_stages}s".format(**how)]
        elif self.positions == torch.int32: said += ["int32"]
        return " ".join(x for x in said if x)


def attention(case, target, n, launches={}):
    "What a layer launches for two requests of n new tokens and a long context: [(kernel, arguments, how)]"
    c, dtype, width = case.config, case.dtype, 2048
    H, Hk, D = c.n_heads, c.n_kv_heads, c.head_dim
    weight = tensor(D, dtype=dtype) if case.norm else None
    spec = AttnSpec(H, Hk, D, D**-.5, tensor(c.max_len, case.rot or D, dtype=FP32), case.window, case.softcap,
                    tensor(H, dtype=dtype) if case.sinks else None, weight, weight, interleaved=case.pairs)
    lens, positions = ([n, n], [width*case.B]*2), tensor(2*n, dtype=case.positions)
    meta = AttnMeta(tensor(2, width), tensor(2), tensor(3), tensor(2*n), positions, *lens)
    with pretend(target) as calls:
        backend = TritonBackend(case.kv, launches=launches)
        cache = backend.new_cache(c, 2**20//case.B, case.B, dtype, "meta") # large, as on a GPU: the JIT asks
        q = backend.store(spec, 0, cache, tensor(2*n, (H + 2*Hk)*D, dtype=dtype), meta)
        backend.attend(spec, 0, q, cache, meta)
    return calls


class Rest(NamedTuple):
    "What the rest of a layer, and sampling, are made of"
    C:int              # width
    F:int              # of the MLP
    V:int              # vocabulary
    dtype:torch.dtype = BF16
    R:int = 64         # rows to sample
    act:str = "silu"

    def words(self, kernel, how):
        "What matters of it to one of its kernels"
        said = {"add_rmsnorm": [f"C{self.C}", "add"*how.get("ADD", False)], "act_mul": [f"F{self.F}", self.act]}
        return " ".join(x for x in said.get(kernel, [f"V{self.V}", f"R{self.R}"]) + [NAMES[self.dtype]] if x)


def rest(case, target):
    "What norms, activation and sampling launch"
    (C, F, V, dtype, R, act), T, said = case, 512, (FP32, torch.int32, FP32, FP32, torch.int64, torch.int64)
    with pretend(target) as calls:
        x, w = tensor(T, C, dtype=dtype), tensor(C, dtype=dtype)
        fused.add_rmsnorm(x, x, w, 1e-5)
        fused.add_rmsnorm(x, None, w, 1e-5)
        fused.act_mul(tensor(T, 2*F, dtype=dtype), act)
        fused.sample(tensor(R, V, dtype=dtype), *(tensor(R, dtype=kind) for kind in said))
    return calls


# ---- which configurations

def default_cases():
    "The models of the lessons, large heads, 8-bit keys and values: [(what, which kernels of it; (): all)]"
    small, model = EXAMPLES["SmolLM2-135M"], EXAMPLES["Llama-3-8B"]
    return [(Case(model), ()), (Case(model, FP16), ("attend",)), (Case(small), ("attend", "store")),
            (Case(replace(model, head_dim=256)), ("attend",)), (Case(model, kv=E4M3), ("attend few", "store")),
            (Rest(model.width, model.mlp_width, model.vocab_size), ())]


def more_cases():
    "Every value of every knob for every head size and type, all knobs together, and the shapes of all examples"
    def shape(D, G): return replace(EXAMPLES["Llama-3-8B"], head_dim=D, n_heads=8*G)
    cases, knobs = [], dict(window=128, softcap=50., sinks=True)
    for D in sorted({64, 80, 128, 256, *(size for _, size, _ in kernels.LAUNCHES if size)}):
        base = Case(shape(D, 4))
        for dtype in (BF16, FP16, FP32):
            cases += [base._replace(dtype=dtype), base._replace(dtype=dtype, **knobs)]
            for norm, pairs, rot in ((1, 0, None), (0, 1, None), (1, 1, D//2), (0, 0, D//2)):
                cases.append(base._replace(dtype=dtype, norm=bool(norm), pairs=bool(pairs), rot=rot))
        cases += [base._replace(config=shape(D, G)) for G in (1, 3, 8)]
        cases += [base._replace(B=B) for B in (1, 64)]
        cases += [base._replace(**{name: value}) for name, value in knobs.items()]
        cases += [base._replace(kv=kv) for kv in (E4M3, E5M2)] + [base._replace(kv=E4M3, **knobs)]
        cases += [base._replace(positions=torch.int32)]
    rests = [Rest(768, 3072, 50257)] # an odd vocabulary: nothing of it is a multiple of 16
    for model in EXAMPLES.values():
        cases.append(Case(model))
        rests += [Rest(model.width, model.mlp_width, model.vocab_size, dtype, R, act)
                  for dtype in (BF16, FP16, FP32) for R, act in ((1, "gelu_tanh"), (256, "silu"))]
    return [(case, ()) for case in cases + rests]


def key_of(fn, args, how, target):
    "Launches with the same are the same machine code, as the JIT sees it"
    def of(x):
        if isinstance(x, torch.Tensor): return x.dtype, x.untyped_storage().size() < 2**31
        return (x == 1, x % 16 == 0, x < 2**31) if type(x) is int else type(x)
    return target, fn, *map(of, args), *sorted(how.items())


def launches_of(case, target):
    "All launches of a configuration: [(name, kernel, arguments, how)]"
    kinds = dict(many=512, few=1) if isinstance(case, Case) else {"": 0}
    for kind, n in kinds.items():
        for fn, args, how in attention(case, target, n) if kind else rest(case, target):
            name = fn.__name__.removesuffix("_kernel")
            yield f"{name} {kind}" if name in ("attend", "merge") else name, fn, args, how


def jobs_of(cases, targets, strict):
    "The launches of all configurations, each machine code once"
    jobs = {}
    for case, wanted in cases:
        for target in targets:
            if target == "sm_80" and getattr(case, "kv", None) == E4M3: # the package must refuse it
                name = ", ".join(wanted) or "all"
                jobs[target, case] = Job(name, case.words("attention", {}), target, skip=refusal(case, target))
                continue
            for name, fn, args, how in launches_of(case, target):
                if not name.startswith(tuple(wanted) or ""): continue
                words = case.words(name.split()[0], how)
                job = Job(name, words, target, fn, args, how, strict and case.dtype.itemsize == 2)
                jobs.setdefault(key_of(fn, args, how, target), job)
    return jobs


def table_of(targets, everything=False):
    "All jobs, the slowest first, so that no core waits for the last"
    jobs = jobs_of(default_cases(), targets, strict=True)
    if everything: jobs = jobs_of(more_cases(), targets, strict=False) | jobs
    slow = "attend many", "attend few"
    return sorted(jobs.values(), key=lambda job: slow.index(job.kernel) if job.kernel in slow else len(slow))


def refusal(case, target):
    "What the package says to a configuration that it must refuse"
    try: attention(case, target, 1)
    except ValueError as e: return str(e)
    raise AssertionError(f"the package takes {case.kv} on {target}, which has no such numbers")


def left_out(jobs):
    "Kernels of the package that no job compiles"
    done = {job.fn for job in jobs}
    return [f"{module.__name__}.{name}" for module, name, fn in package_kernels() if fn not in done]


# ---- what the compiler makes of a job

class Elsewhere:
    "To Triton, a driver; all it knows is which GPU it would drive"
    def __init__(self, target): self.target = target
    def get_current_device(self): return self.target
    def get_current_stream(self, device): return 0
    def get_current_target(self): return TARGETS[self.target].gpu


def measure(job):
    "Compile it and read the machine code: a dict of findings"
    def seconds():
        return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    start = seconds()
    triton.runtime.driver.set_active(Elsewhere(job.target))
    try:
        kernel = job.fn.run(*job.args, grid=(1,), warmup=True, **job.how) # all of a launch but the launch
        found = read_amd(kernel.asm["amdgcn"]) if "amdgcn" in kernel.asm else read_nvidia(kernel.asm)
    except Exception as e:
        return dict(error=f"{type(e).__name__}: {e}", seconds=seconds() - start)
    if job.kernel.startswith("attend"):
        found["threads"] = kernel.metadata.num_warps*TARGETS[job.target].gpu.warp_size
        found["keys"], found["key_bytes"] = key_loads(kernel.asm["ttgir"]), job.args[1].dtype.itemsize
    return dict(found, shared=kernel.metadata.shared, seconds=seconds() - start)


def read_nvidia(asm):
    "Registers, spills and instructions, from a cubin and the PTX it was made from"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(asm["cubin"])
        f.flush()
        def ask(tool, *how):
            return subprocess.run([TOOLS/tool, *how, f.name], capture_output=True, text=True, check=True).stdout
        said = re.findall(r"\b(REG|STACK|LOCAL):(\d+)", ask("cuobjdump", "-res-usage"))
        use = {name: int(n) for name, n in said}
        spills = 0
        if use["STACK"] or use["LOCAL"]: # disassembling takes half a second
            spills = len(re.findall(r"\b(?:STL|LDL)\b", ask("nvdisasm")))
    ptx = asm["ptx"]
    matrix = re.findall(r"wgmma(?=\.mma_async)|tcgen05\.mma\b|mma\.sync\.aligned\.m\w+", ptx)
    matrix = Counter(name.replace(".aligned", "") for name in matrix)
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global\S*\s*\[[^]]*\],\s*\[[^]]*\],\s*(\w+)", ptx)
    loads = Counter(int(size, 0) for size in sizes)
    return dict(registers=use["REG"], spills=spills, matrix=matrix, loads=loads)


def read_amd(asm):
    "The same from AMD's assembly, where loads are asynchronous anyway and only their width counts"
    use = {name: int(n) for name, n in re.findall(r"\.([av]gpr_count|[sv]gpr_spill_count):\s+(\d+)", asm)}
    sizes = dict(byte=1, short=2, dword=4, dwordx2=8, dwordx3=12, dwordx4=16)
    found = re.findall(r"\b(?:global|buffer|flat)_load_(?:[us]|d16_)?(byte|short|dword(?:x\d)?)", asm)
    loads = Counter(sizes[name] for name in found)
    matrix = Counter(re.findall(r"\bv_mfma_\w+", asm))
    return dict(registers=use["vgpr_count"], accumulators=use["agpr_count"], spills=use["vgpr_spill_count"],
                scalar_spills=use["sgpr_spill_count"], matrix=matrix, loads=loads)


LOAD = re.compile(r"\b(tt\.load|ttg\.async_copy_global_to_local|amdg\w*\.buffer_load\w*)\b[^\n]*?"
                  r"tensor<(\d+)x(\d+)x(?:!tt\.ptr<)?[a-z]+(\d+)")

def key_loads(ttgir):
    "Triton's own form of the kernel has a line per load: [(asynchronous?, bytes)] of those of keys and values"
    loads = [(how.startswith("ttg"), int(n)*int(d)*int(bits)//8) for how, n, d, bits in LOAD.findall(ttgir)]
    queries = next((x for x in loads if not x[0]), None) # the first, and the only one that may be plain
    if queries: loads.remove(queries)
    return loads


# ---- the verdict

def faults(job, found):
    "Why a job fails, in words"
    if job.skip: return
    if "error" in found:
        yield found["error"]
        return
    target, half = TARGETS[job.target], job.args and job.args[0].dtype.itemsize == 2
    if found["shared"] > target.shared*1024:
        limit = target.shared*1024
        yield f"{found['shared']} bytes of shared memory, but {job.target} has {limit} for a program"
    if found["spills"] and job.strict:
        yield f"{found['spills']} spills of vector registers"
    if job.kernel.startswith("attend"):
        best = target.matrix if job.kernel == "attend many" and job.how["D"] <= 256 else "" # it wants 64 rows
        if half and not any(name.startswith(best) for name in found["matrix"]):
            yield f"no {best or 'matrix instruction'}, only {', '.join(found['matrix']) or 'plain arithmetic'}"
        yield from narrow(job, found)


def narrow(job, found):
    "What is wrong with how keys and values come, in words"
    pieces, loads, threads = found["keys"], Counter(found["loads"]), found["threads"]
    if len(pieces) < 4:
        yield f"{len(pieces)} loads of keys and values were found, but two loops have two each"
        return
    if TARGETS[job.target].gpu.backend == "cuda":
        kind, plain = "asynchronous copies", sum(not is_async for is_async, _ in pieces)
        width = 16 if found["key_bytes"] > 1 else 8 # mma.sync's layout of 8-bit numbers has runs of 8
    else: # loads are asynchronous anyway; in small tiles a thread's share may be less than 16 bytes
        kind, plain, width = "loads", 0, min(16, *(size//threads for _, size in pieces))
    want = sum(max(1, size//threads//16) for _, size in pieces)
    have = sum(n for bytes_each, n in loads.items() if bytes_each >= width)
    if have < want or plain:
        said = f"keys and values do not come as {width}-byte {kind}: of at least {want} there are {have}"
        yield said + f", and {plain} of {len(pieces)} go through registers"*bool(plain)


# ---- all jobs, on several cores

def serve(pipe, jobs):
    "Compile what is asked for, by number"
    while (i := pipe.recv()) is not None: pipe.send(measure(jobs[i]))


def findings(jobs, n):
    "What `measure` says of each job, in order, from n processes; one that dies or hangs costs no other job"
    context, todo, done, busy = get_context("fork"), list(range(len(jobs)))[::-1], {}, {}
    def give(pipe, process):
        if todo: busy[pipe] = process, todo.pop(), time.monotonic()
        pipe.send(busy[pipe][1] if pipe in busy else None)

    def hire():
        pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, jobs), daemon=True)
        process.start()
        theirs.close()
        give(pipe, process)

    for _ in range(min(n, len(jobs))): hire()
    at = 0
    while at < len(jobs):
        ready = connection.wait(busy, timeout=1)
        overdue = time.monotonic() - LIMIT
        late = [pipe for pipe, (_, _, since) in busy.items() if since < overdue and pipe not in ready]
        for pipe in ready + late:
            process, i, _ = busy.pop(pipe)
            try:
                if pipe in late: process.kill()
                done[i] = pipe.recv()
                give(pipe, process)
            except EOFError:
                process.join()
                code = process.exitcode
                how = f"took more than {LIMIT} s" if pipe in late else "died: " + (
                    signal.Signals(-code).name if code < 0 else f"exit code {code}")
                done[i] = dict(error=f"the compiler {how}", seconds=0.)
                if todo: hire()
        while at in done:
            yield done[at]
            at += 1


def row(job, found, bad):
    "A line of the table"
    if job.skip: return f"{job.kernel:11} {job.config:45} {job.target:7} skipped: {job.skip}"
    if "error" in found: cells = [""]*5
    else:
        registers, spills = str(found["registers"]), str(found["spills"])
        if "accumulators" in found:
            registers += f"+{found['accumulators']}a"*(found["accumulators"] > 0)
            spills += f"+{found['scalar_spills']}s"*(found["scalar_spills"] > 0)
        matrix = " ".join(f"{n} {name}" for name, n in found["matrix"].items())
        loads = " ".join(f"{n}x{width}" for width, n in sorted(found["loads"].items(), reverse=True))
        cells = [registers, found["shared"], spills, matrix, loads]
    verdict = "FAILED" if bad else "ok" if not found.get("spills") else "spills"
    return COLUMNS.format(job.kernel, job.config, job.target, *cells, f"{found['seconds']:.1f}", verdict)

COLUMNS = "{:11} {:45} {:7} {:>9} {:>7} {:>7}  {:30} {:16} {:>5}  {}"
HEAD = COLUMNS.format("kernel", "configuration", "target", "registers", "shared", "spills",
                      "matrix instructions", "loads: n x bytes", "CPU s", "").rstrip()


def check(jobs, n):
    "Compile and judge all jobs, and print the table: [(job, findings, faults)]"
    print(HEAD, flush=True)
    told, found = [], findings([job for job in jobs if not job.skip], n)
    for job in jobs:
        made = {} if job.skip else next(found)
        bad = list(faults(job, made))
        told.append((job, made, bad))
        print(row(job, made, bad), flush=True)
    for job, _, bad in told:
        for text in bad:
            print(f"\nFAILED {job.kernel} ({job.config}) on {job.target}: {text}")
    return told


def save(path, told):
    "The table as JSON"
    def line(job, found, bad):
        state = "skipped" if job.skip else "failed" if bad else "ok"
        said = dict(kernel=job.kernel, configuration=job.config, target=job.target, state=state, skip=job.skip)
        return dict(said, faults=bad, **{k: v for k, v in found.items() if k != "keys"})
    path.parent.mkdir(parents=True, exist_ok=True)
    table = [line(*x) for x in told]
    path.write_text(json.dumps(dict(triton=triton.__version__, torch=torch.__version__, table=table), indent=1))


# ---- does it see what is broken?

@triton.jit
def crooked(x_ptr): tl.store(x_ptr + tl.arange(0, 80), 0) # not a power of two


class Acts:
    "Stands for a kernel and does something else when it is compiled"
    def __init__(self, run): self.run = run


def broken():
    "[(what must be said, job)]"
    small, large = EXAMPLES["SmolLM2-135M"], EXAMPLES["Llama-3-8B"]
    def attend(what, target, kind, launch=None, odd=False, config=small, **more):
        launches = {kind: launch} if launch else {}
        calls = attention(Case(config), target, 512 if kind == "many" else 1, launches)
        fn, args, how = next(call for call in calls if call[0] is kernels.attend_kernel)
        args = [x + 1 if odd and name in ("sb", "sh", "st") else x for name, x in zip(fn.arg_names, args)]
        return Job(f"attend {kind}", what, target, fn, args, {**how, **more}, strict=True)

    def other(what, fn, *args): return Job("other", what, "sm_90", fn, args)
    return [
        (None, attend("nothing is wrong", "sm_90", "few")),
        ("16-byte asynchronous copies", attend("strides of no multiple of 16", "sm_90", "few", odd=True)),
        ("16-byte loads", attend("the same on AMD", "gfx942", "few", config=large, odd=True)),
        ("go through registers", attend("no loads in advance", "sm_80", "few", Launch(16, 32, 4, 1))),
        ("but sm_120 has 101376", attend("a large tile", "sm_120", "few", Launch(16, 256, 8), config=large)),
        ("no wgmma, only mma.sync.m16n8k16", attend("rows too few for wgmma", "sm_90", "many", Launch(32, 32))),
        ("spills of vector registers", attend("registers too few", "sm_90", "few", maxnreg=32)),
        ("must be a power of 2", other("a kernel that is none", crooked, tensor(80))),
        ("died: SIGKILL", other("it dies", Acts(lambda **_: os.kill(os.getpid(), signal.SIGKILL)))),
        ("took more than 1 s", other("it hangs", Acts(lambda **_: time.sleep(1000))))]


def self_test(n):
    "Each of `broken` fails, and for what is wrong with it: exit code"
    words, jobs = zip(*broken())
    told = check(jobs[:-1], n)
    with patch(f"{__name__}.LIMIT", 1): told += check(jobs[-1:], 1)
    missed = [job.config for said, (job, _, bad) in zip(words, told)
              if (any(said in text for text in bad) if said else not bad) is False]
    others = jobs_of([(Rest(64, 64, 256), ())], ["sm_90"], strict=True).values()
    if "pagedlm.kernels.attend_kernel" not in left_out(others): missed.append("a kernel that nothing launches")
    print(f"\nMISSED: {', '.join(missed)}" if missed else f"\nall {len(jobs)} seen")
    return int(bool(missed))


def arguments(given):
    "Of the command line"
    parser, cores = argparse.ArgumentParser(description=__doc__.splitlines()[0]), len(os.sched_getaffinity(0))
    parser.add_argument("--all", action="store_true", help="every configuration that the package can launch")
    parser.add_argument("--target", action="append", choices=TARGETS, help="this target; may be repeated")
    parser.add_argument("--kernel", default="", help="kernels with this in their name: attend, 'attend few'…")
    parser.add_argument("--jobs", type=int, default=cores, help="processes; default: one per core")
    parser.add_argument("--json", type=Path, help="write the table to this file as well")
    parser.add_argument("--list", action="store_true", help="only say what would be compiled")
    parser.add_argument("--self-test", action="store_true", help="compile what is broken, and see it found out")
    return parser, parser.parse_args(given)


def main(given=None):
    "Returns the exit code"
    parser, args = arguments(given)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        if args.self_test: return self_test(args.jobs)
        jobs = table_of(args.target or TARGETS, args.all)
        lost = left_out(jobs)
        jobs = [job for job in jobs if args.kernel in job.kernel]
        if not jobs: parser.error(f"no kernel has {args.kernel!r} in its name")
        if args.list:
            for job in jobs:
                said = f"skipped: {job.skip}" if job.skip else ""
                print(f"{job.kernel:11} {job.config:45} {job.target:7} {said}".rstrip())
        told = [] if args.list else check(jobs, args.jobs)
    for name in lost: print(f"\nFAILED {name}: no configuration in tools/aot_check.py launches it")
    if args.json: save(args.json, told)
    n_bad, n_skip = sum(bool(bad) for _, _, bad in told), sum(bool(job.skip) for job in jobs)
    if told:
        n_spill = sum(bool(found.get("spills")) and not bad for _, found, bad in told)
        if n_spill: print(f"\n{n_spill} outside the default table spill, which is slow but not wrong")
        cpu = sum(found.get("seconds", 0) for _, found, _ in told)
        print(f"\n{len(jobs) - n_skip} compiled, {n_bad} of them failed, {n_skip} skipped; "
              f"{time.monotonic() - start:.0f} s, {cpu:.0f} s of CPU; "
              f"Triton {triton.__version__}, PyTorch {torch.__version__}")
    return int(bool(n_bad or lost))


if __name__ == "__main__":
    sys.exit(main())
