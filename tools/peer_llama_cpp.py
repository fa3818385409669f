"""llama.cpp, for tools/peers.py: peer_llama_cpp.py MODEL.gguf [BENCH]

Through its Python package; the package has no batching of its own, so requests are put into batches here. With
BENCH, the path of its llama-bench, that tool is run instead: 128 tokens after nothing, and a prompt of 1,024 tokens.
"""
import json
import subprocess

import llama_cpp as L
import numpy as np
from peer_worker import THREADS, serve

UNITS = dict(avx2="AVX2", fma="FMA", f16c="F16C", avx_vnni="AVX_VNNI", avx512f="AVX512", avx512_vnni="AVX512_VNNI",
             avx512_bf16="AVX512_BF16", asimd="NEON", asimddp="DOTPROD", i8mm="MATMUL_INT8", sve="SVE")
BATCH = 2048


def facts():
    said = L.llama_print_system_info().decode()
    on = {part.split(":")[-1].split("=")[0].strip() for part in said.split("|") if part.strip().endswith("= 1")}
    return dict(units={unit: name in on for unit, name in UNITS.items()}, kernels=said.strip())


class Sequences:
    "A context for so many sequences of such a length, used again for every run"
    def __init__(self, model, n, length):
        how = L.llama_context_default_params()
        how.n_ctx, how.n_batch, how.n_seq_max, how.kv_unified = n * length, BATCH, n, False
        how.n_threads = how.n_threads_batch = THREADS
        self.ctx = L.llama_init_from_model(model, how)
        self.vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
        self.batch = L.llama_batch_init(BATCH, 0, 1)

    def decode(
        self,
        items,  # (token, position, sequence, whether the next one is wanted) for each
        outs,   # by sequence, grows
    ):
        b = self.batch
        b.n_tokens = len(items)
        for i, (token, position, sequence, wanted) in enumerate(items):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, wanted
            b.seq_id[i][0] = sequence
        if L.llama_decode(self.ctx, b):
            raise RuntimeError("llama_decode failed")
        for i, (_, _, sequence, wanted) in enumerate(items):
            if wanted:
                row = np.ctypeslib.as_array(L.llama_get_logits_ith(self.ctx, i), shape=(self.vocab,))
                outs[sequence].append(int(row.argmax()))

    def answer(self, work):
        "Prompts first, in full batches, then one token for each per step"
        L.llama_memory_clear(L.llama_get_memory(self.ctx), True)
        outs, last = [[] for _ in work], [len(r["prompt"]) - 1 for r in work]
        items = [(t, j, s, j == last[s]) for s, r in enumerate(work) for j, t in enumerate(r["prompt"])]
        for i in range(0, len(items), BATCH):
            self.decode(items[i:i + BATCH], outs)
        while live := [s for s, r in enumerate(work) if len(outs[s]) < r["n"]]:
            self.decode([(outs[s][-1], last[s] + len(outs[s]), s, True) for s in live], outs)
        return outs


def bench(model, tool, name):
    "One repetition of its own tool: tokens per second"
    if name == "mix32":
        return dict(skip="llama-bench has no such load")
    size = dict(one=["-p", "0", "-n", "128"]).get(name, ["-p", "1024", "-n", "0"])
    command = [tool, "-m", model, "-t", str(THREADS), "-r", "1", "-o", "json", *size]
    row, = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return dict(rate=row["avg_ts"])


def load(path, tool=None):
    if tool:
        return facts(), lambda work, name: bench(path, tool, name)
    how = L.llama_model_default_params()
    how.n_gpu_layers = 0
    model, contexts = L.llama_model_load_from_file(path.encode(), how), {}

    def run(work, name):
        n = len(work)
        length = max(len(r["prompt"]) + r["n"] for r in work) // 256 * 256 + 256
        if (n, length) not in contexts:
            contexts[n, length] = Sequences(model, n, length)
        return contexts[n, length].answer(work)

    return facts(), run


if __name__ == "__main__":
    L.llama_backend_init()
    serve("llama-cpp-python", load)
