"Gemma 3 270M from the package index: its vocabulary, logits and greedy answers as transformers reads the same file"
import pytest
import torch

from pagedlm.attention import Dense
from pagedlm.core import SamplingParams
from pagedlm.hub import fetch, find_model
from pagedlm.llm import LLM
from pagedlm.weights import load_model, open_source

TEXTS = ["The capital of France is", "Water boils at 100 degrees, and ice melts at", "def fibonacci(n):\n    if n < 2:\n        return"]
LONG = " ".join(f"In {year} the number of ships was {year*7 % 83}, and the harbour was {'full' if year % 3 else 'empty'}." for year in range(1700, 1730))


@pytest.fixture(scope="module")
def path():
    return fetch("gemma-3-270m")


@pytest.fixture(scope="module")
def reference(path, quick_gguf):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@torch.inference_mode()
def test_logits(path, reference):
    "Longer than its window of 512 tokens"
    model, tokenizer = load_model(path, "float32")
    ids = torch.tensor(tokenizer.encode(LONG))
    assert len(ids) > 600 and find_model("Gemma-3-270M") == path
    ours, theirs = model.logits(model(ids, Dense())), reference(ids[None]).logits[0]
    assert (ours - theirs).abs().max() < 2e-3


def test_greedy_prefixes(path, reference):
    "Through the engine, in chunks, in float32"
    llm = LLM(path, dtype="float32", enforce_eager=True, max_num_batched_tokens=64, max_model_len=1024)
    prompts = [*TEXTS, LONG]
    outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    for o in outs:
        ids = torch.tensor([o.prompt_token_ids])
        theirs = reference.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1]:].tolist()
        assert o.outputs[0].token_ids == theirs[:len(o.outputs[0].token_ids)]


def test_sense(path):
    "As a user has it: packed as far as there are kernels, the rest in bfloat16"
    llm = LLM("gemma-3-270m", max_model_len=1024)
    texts = [o.outputs[0].text for o in llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)]
    assert texts[1].startswith(" 0 degrees") and "capital" in texts[0], texts
    right, backwards = llm.perplexity([LONG[:150], " ".join(LONG[:150].split()[::-1])])
    assert right < backwards/3


def test_vocabulary(path):
    from test_gguf import HARD
    tokenizer = open_source(path).tokenizer()
    assert tokenizer.vocab_size == 262144 and tokenizer.bos_id == 2
    assert {tokenizer.token(i) for i in tokenizer.eos_ids} == {"<eos>", "<end_of_turn>"}
    for text in HARD:
        ids = tokenizer.encode(text)
        assert ids[0] == 2 and tokenizer.decode(ids[1:]) == text.replace("▁", " ") or "<" in text
