"""Run tests/vllm_script.py under vLLM, unmodified, on the default model in float32, and keep what it told in
tests/data/vllm_answers.json: what tests/test_vllm_script.py compares pagedlm with.

python tools/peers.py install vllm    # once: minutes, and about a gigabyte
python tools/vllm_answers.py          # five minutes
"""
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from peers import ROOT, parse, reference, where_things_are

SCRIPT, ANSWERS = ROOT / "tests/vllm_script.py", ROOT / "tests/data/vllm_answers.json"
TOLERANCE = 2e-3  # of log-probabilities, between two engines in float32
NAMES = """
import inspect, json
from dataclasses import fields
from vllm import LLM, CompletionOutput, EngineArgs, RequestOutput, SamplingParams
from vllm.logprobs import Logprob
def arguments(f): return [n for n in inspect.signature(f).parameters if n not in ("self", "kwargs")]
print("NAMES " + json.dumps({
    "LLM": sorted({*arguments(LLM), *(f.name for f in fields(EngineArgs))}),
    "methods": [n for n, f in inspect.getmembers(LLM, inspect.isfunction) if n[0] != "_"],
    "SamplingParams": [n for n in SamplingParams.__struct_fields__ if n[0] != "_"],
    "RequestOutput": arguments(RequestOutput), "CompletionOutput": [f.name for f in fields(CompletionOutput)],
    "Logprob": [f.name for f in fields(Logprob)]}))
"""


def make_checkpoint(places, folder):
    "The GGUF's weights in float32, not rounded to anything, and our tokenizer: it cuts digits as the file says"
    if (folder / "config.json").exists():
        return
    from transformers import AutoTokenizer

    from pagedlm.weights import open_source
    model = reference(places)
    vars(model.config).pop("quantization_config", None)
    path = Path(places.gguf)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    open_source(path).tokenizer().inner.save(str(folder / "tokenizer.json"))
    model.save_pretrained(folder)


def ask(python, word, *command):
    "What vLLM's Python printed after `word`"
    home = Path(python).parent.parent
    env = os.environ | dict(
        LD_PRELOAD=str(home / "lib/libiomp5.so"), VLLM_CPU_KVCACHE_SPACE="2", HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR", DO_NOT_TRACK="1",
        VLLM_CACHE_ROOT=str(home.parent / "vllm-cache"))
    done = subprocess.run([python, *command], env=env, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(word + " "))
    return json.loads(line[len(word):])


def main():
    places = where_things_are(parse([]))
    folder, python = places.home / "checkpoint-float32", places.home / "vllm/bin/python"
    make_checkpoint(places, folder)
    version = subprocess.run([python, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"],
                             stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    told = dict(tolerance=TOLERANCE, engine=f"vLLM {version} (`vllm-cpu`)", platform=f"{platform.system()} {platform.machine()}", dtype="float32",
                names=ask(str(python), "NAMES", "-c", NAMES), **ask(str(python), "ANSWERS", str(SCRIPT), str(folder)))
    ANSWERS.parent.mkdir(exist_ok=True)
    cases = ",\n".join(f"{json.dumps(name)}: {json.dumps(x, ensure_ascii=False)}" for name, x in told.pop("cases").items())
    ANSWERS.write_text(json.dumps(told)[:-1] + f', "cases": {{\n{cases}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
