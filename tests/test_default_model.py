"The default model is transformers' model of the same file: vocabulary, logits, start without transformers"
import numpy as np
import pytest
import torch
from common import said_by
from gguf import GGUFReader
from tokenizers import pre_tokenizers as pt

from pagedlm.attention import Dense
from pagedlm.weights import GGUFFile, default_model

TEXT = """The kitchen garden behind the old house had been left alone for years. Nettles grew where the beans had
stood, and the path was lost under moss. When Clara came back in spring, she began at the gate with a spade.

    def beds(garden, skip=()):
        "Beds still to be dug, largest first"
        return sorted((b for b in garden if b.name not in skip), key=lambda b: -b.area)

| month | work                  |
|------:|-----------------------|
| May   | paths, compost        |
| June  | beans & peas (again!) |

“Il faut cultiver notre jardin”, disait-il; 庭を耕さなければならない。 She worked slowly, one bed at a time, and by the
end of May the garden had a path again. In June she planted beans, because there had always been beans. In July the
neighbours stopped at the gate to look. By September there was more than she could eat, so she filled the basket every
morning and carried it from door to door, and nobody on the lane had to buy beans that autumn, or peas, or the small
sour apples from the wall. In October she put the spade back into the shed, and counted: eleven jars, two sacks, one
letter of thanks, no nettles at all. Then she sat down and wrote to her brother."""
VARIED = [TEXT, "", " ", "a\n\n\nb\t\tc  d", "naïve café 🙂‍↕️ \u200b𝔘", "<|im_start|>user\nHi<|im_end|>\n", "year 1984, 3.14"]
DIGITS = "a\n\n1. b\n\n2. c  3   45 x²½Ⅳ٣"


@torch.inference_mode()
def test_logits(default_pair, default_reference):
    model, tokenizer = default_pair
    ids = torch.tensor(tokenizer.encode(TEXT)[:300])
    assert len(ids) == 300
    ours, theirs = model.logits(model(ids, Dense())), default_reference(ids[None]).logits[0]
    assert (ours - theirs).abs().max() < 1e-3


def test_config(default_pair, default_reference):
    config, theirs = default_pair[0].config, default_reference.config
    assert (config.head_dim, config.max_len) == (theirs.head_dim, theirs.max_position_embeddings)
    assert config.tied is theirs.tie_word_embeddings is True
    assert (config.norm_eps, config.rope_theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])


@pytest.mark.usefixtures("quick_gguf")
def test_vocabulary(default_pair):
    "The same ids as transformers' conversion, once that cuts digits apart as `tokenizer.ggml.pre` says"
    from transformers import AutoTokenizer
    tokenizer, path = default_pair[1], default_model()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert [tokenizer.encode(t) for t in VARIED] == [theirs(t).input_ids for t in VARIED]
    assert tokenizer.encode(DIGITS) != theirs(DIGITS).input_ids
    digits_alone = [pt.Digits(individual_digits=True), pt.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = pt.Sequence(digits_alone)
    assert tokenizer.encode(DIGITS) == theirs(DIGITS).input_ids
    assert (tokenizer.eos_ids, tokenizer.bos_id) == ((theirs.eos_token_id,), theirs.bos_token_id)
    chat = [dict(role="user", content="Hi")]
    assert tokenizer.chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_quick_reader():
    "Stepping over the vocabulary changes nothing else"
    quick, full = GGUFFile(default_model()), GGUFReader(default_model())
    assert [(t.name, t.kind, t.data.shape) for t in quick.tensors] == [
        (t.name, t.tensor_type.name, t.data.shape) for t in full.tensors]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(quick.tensors, full.tensors))
    fields = {key: field for key, field in full.fields.items() if not key.startswith("GGUF.")}
    assert list(quick.fields) == list(fields)
    for key, field in fields.items():
        if field.types[-1].name != "STRING" or field.types[0].name == "STRING":
            assert np.array_equal(quick.fields[key], field.contents()), key


@pytest.mark.usefixtures("default_pair")  # by then the vocabulary is converted
def test_start_without_transformers():
    code = ("import sys; from pagedlm.weights import default_model, open_source; "
            "open_source(default_model()).tokenizer().encode('Hi'); print('transformers' in sys.modules)")
    assert said_by(code) == "False\n"
