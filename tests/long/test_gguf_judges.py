"Tiny GGUFs of every family as transformers reads them, and as llama.cpp does where a build of it is there; its vocabularies"
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Inner

sys.path.insert(0, str(Path(__file__).parents[1]))
from gguf_files import CASES, IDS, build, logits, write

from pagedlm.attention import Dense
from pagedlm.hub import cache_dir
from pagedlm.model import Transformer
from pagedlm.vocab import tokenizer_json
from pagedlm.weights import GGUFFile, config_of, load_into, open_source

PEER = cache_dir()/"peers"/"llama.cpp"
READ_BY_TRANSFORMERS = { # and what it does not read in such a file, and takes to be so
    "llama": {}, "mistral": {}, "qwen2": {}, "gemma3": {}, "qwen3": dict(head_dim=128), "qwen3moe": dict(moe_intermediate_size=768),
    "gemma2": dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0), "gpt2": dict(n_positions=1024)}


def ours(path):
    source = open_source(path)
    model = Transformer(config_of(source), dtype=torch.float32)
    load_into(model, source)
    with torch.inference_mode():
        return model.logits(model(IDS, Dense()))


def no_tokens(w):
    w.add_tokenizer_model("no_vocab")
    if w.arch not in ("llama", "smollm3"):  # of which every file says it
        w.add_vocab_size(300)


def tokens(w):
    "transformers counts them"
    w.add_token_list([f"t{i}" for i in range(300)])


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_as_transformers_reads_it(tmp_path, name):
    from transformers import AutoModelForCausalLM
    path = write(build(name, **READ_BY_TRANSFORMERS[name]), name, tmp_path/"m.gguf", vocabulary=tokens)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    if CASES[name].arch.startswith("gemma"):  # it leaves the scale of the scores at its default
        for layer in theirs.model.layers:
            layer.self_attn.scaling = theirs.config.head_dim**-.5
    assert (ours(path) - logits(theirs)).abs().max() < 1e-4


JUDGE = """
import sys, ctypes, numpy as np, llama_cpp as L
path, ids, n_vocab, out = sys.argv[1], [int(i) for i in sys.argv[2].split(",")], int(sys.argv[3]), sys.argv[4]
L.llama_backend_init()
model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
p = L.llama_context_default_params()
p.n_ctx, p.n_batch, p.n_ubatch, p.n_threads, p.type_k, p.type_v = 128, 64, 64, 1, 0, 0
ctx = L.llama_init_from_model(model, p)
batch = L.llama_batch_init(len(ids), 0, 1)
batch.n_tokens = len(ids)
for i, t in enumerate(ids):
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = t, i, 1, True
    batch.seq_id[i][0] = 0
assert L.llama_decode(ctx, batch) == 0
np.save(out, np.stack([np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, i), (n_vocab,)).copy() for i in range(len(ids))]))
"""


@pytest.mark.skipif(not (PEER/"ready").exists(), reason="no llama.cpp here")
@pytest.mark.parametrize("name", CASES)
def test_as_llama_cpp_reads_it(tmp_path, name):
    path = write(build(name), name, tmp_path/"m.gguf", vocabulary=no_tokens)
    done = subprocess.run([PEER/"bin"/"python", "-c", JUDGE, path, ",".join(map(str, IDS.tolist())), "300", tmp_path/"out.npy"],
                          capture_output=True, text=True, timeout=200,
                          env=os.environ | dict(LLAMA_CPP_LIB_PATH=str(PEER/"build"/"bin")))
    assert not done.returncode, done.stderr[-2000:]
    theirs, mine = torch.from_numpy(np.load(tmp_path/"out.npy")), ours(path)
    assert (mine - theirs).abs().max() < 5e-3*theirs.abs().max()


VOCABS = PEER/"src"/"vendor"/"llama.cpp"/"models"


@pytest.mark.skipif(not VOCABS.exists(), reason="no source of llama.cpp here")
@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm", "qwen2", "starcoder", "refact", "command-r", "deepseek-coder", "phi-3"])
def test_vocabularies_of_llama_cpp(name):
    "Its own test: hard strings, and the ids that the original tokenizers give"
    file = GGUFFile(VOCABS/f"ggml-vocab-{name}.gguf")
    front = "tokenizer.ggml."
    said = {key.removeprefix(front): x for key, x in file.fields.items() if key.startswith(front)}
    back = Inner.from_str(json.dumps(tokenizer_json(said)))
    texts = (VOCABS/f"ggml-vocab-{name}.gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    want = (VOCABS/f"ggml-vocab-{name}.gguf.out").read_text().split("\n")
    wrong = [(t, back.encode(t, add_special_tokens=False).ids, [int(i) for i in ids.split()]) for t, ids in zip(texts, want)
             if back.encode(t, add_special_tokens=False).ids != [int(i) for i in ids.split()]]
    assert len(texts) > 40 and not wrong, wrong[:3]
