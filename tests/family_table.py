"What was checked of each family, by doing it again: rows of the table in nbs/checked.ipynb"
import tempfile
import warnings
from pathlib import Path

import torch
import gguf_files as gguf
import test_families as hf
from transformers.utils import logging

from pagedlm.attention import Dense
from pagedlm.families import families
from pagedlm.quant import load_packed
from pagedlm.weights import open_source


def safetensors(name, folder):
    "Largest distance of a logit to transformers', over all its cases: whole, and in chunks through both back-ends"
    def one(i, case):
        reference = hf.theirs(*hf.CASES[case])
        return hf.check(hf.ours(hf.saved(reference, folder/f"{name}{i}")), reference)
    return max(one(i, case) for i, case in enumerate(hf.CASES) if case.split()[0] == name)


def distance(model, want):
    with torch.inference_mode():
        return model.logits(model(gguf.IDS, Dense())) - want


def from_gguf(name, folder):
    "The same for files written as llama.cpp's converter writes them; and, packed, the relative distance of all logits"
    arch = {"qwen3_moe": "qwen3moe"}.get(name, name)
    if arch not in gguf.CASES:
        return None, None
    model = gguf.build(arch)
    plain = distance(hf.ours(gguf.write(model, arch, folder/f"{arch}.gguf")), gguf.logits(model)).abs().max().item()
    source = open_source(gguf.write(model, arch, folder/f"{arch}-q8.gguf", "Q8_0"))
    source.tokenizer = lambda: None
    packed, _ = load_packed(source)
    want = gguf.logits(gguf.rounded(gguf.build(arch), "Q8_0"))
    return plain, (distance(packed, want).norm()/want.norm()).item()


def window(name):
    "What becomes of keys and values behind a window, if its cases have one"
    windows = [hf.ours_config(case).windows for case in hf.CASES if case.split()[0] == name]
    if not any(windows): return "none"
    return "goes back to the pool" if any(w and None not in w for w in windows) else "masked: some layers see all"


def rows():
    "family -> (safetensors, GGUF, packed, window)"
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        return {name: (safetensors(name, Path(folder)), *from_gguf(name, Path(folder)), window(name)) for name in families}
