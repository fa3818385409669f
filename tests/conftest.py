"The default model, loaded once for all tests that want it: by us, and by transformers"
import os
import signal
from functools import cache
from unittest.mock import patch

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("TRITON_INTERPRET", "1")  # before anybody imports Triton: a process has one mode for good


@pytest.fixture(scope="session", autouse=True)
def poison():
    "What torch.empty returns is NaN: memory that still holds an earlier, right answer would hide that nobody wrote it"
    import torch
    torch.use_deterministic_algorithms(True)


@pytest.fixture(scope="session")
def default_pair():
    "Our (model, tokenizer) of the default model, float32"
    from pagedlm.weights import default_model, load_model
    return load_model(default_model(), dtype="float32")


@pytest.fixture(scope="session")
def quick_gguf():
    "transformers parses a GGUF anew for each of its questions, and asks for one table once per module: answer once"
    import gguf
    table, reader = cache(gguf.get_tensor_name_map), cache(gguf.GGUFReader)
    with patch.object(gguf, "get_tensor_name_map", table), patch.object(gguf, "GGUFReader", reader):
        yield


@pytest.fixture(scope="session")
def default_reference(quick_gguf):
    "transformers' model from the same file, which it reads and unpacks with its own code, float32"
    import torch
    from transformers import AutoModelForCausalLM

    from pagedlm.weights import default_model
    path = default_model()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def one_thread():
    "For many small tensors: threads would wait for each other"
    import torch
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)
