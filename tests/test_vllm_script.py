"The script that vLLM answered, with its imports changed: the same structures, ends, greedy texts and numbers, but for a list"
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from vllm_differences import DIFFERENCES, REFUSALS

from pagedlm import LLM
from pagedlm.weights import default_model

HERE = Path(__file__).parent
THEIRS = json.loads((HERE / "data/vllm_answers.json").read_text(encoding="utf-8"))
CLOSE = .01  # a second choice as near to the first might win on another processor; no recorded one is


@pytest.fixture(scope="module")
def script():
    "tests/vllm_script.py with `from vllm…` made `from pagedlm`, and nothing else"
    source = (HERE / "vllm_script.py").read_text(encoding="utf-8")
    changed, n = re.subn(r"^from vllm\S* import", "from pagedlm import", source, flags=re.M)
    assert n == 2
    module = ModuleType("script")
    exec(compile(changed, "vllm_script.py", "exec"), vars(module))
    return module


@pytest.fixture(scope="module")
def ours(script, default_pair):
    "What it tells here. The weights are those that vLLM had: the GGUF's, in float32"
    pytest.importorskip("llguidance", reason="structured outputs need the extra `grammar`")
    script.MODEL = str(default_model())
    return json.loads(json.dumps(script.run(LLM(*default_pair, **script.OPTIONS))))


def differences(theirs, ours, where=""):
    "{where: (theirs, ours)}; numbers with a point may differ a little"
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        parts = [(f"{where}.{key}" if where else key, theirs[key], ours[key]) for key in theirs]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        parts = [(f"{where}[{i}]", *both) for i, both in enumerate(zip(theirs, ours))]
    elif isinstance(theirs, float) and isinstance(ours, float):
        return {} if abs(theirs - ours) <= THEIRS["tolerance"] else {where: (theirs, ours)}
    else:
        refused = theirs in REFUSALS and ours in ("ValueError", "TypeError") if isinstance(theirs, str) else False
        return {} if refused or type(theirs) is type(ours) and theirs == ours else {where: (theirs, ours)}
    return {k: both for part in parts for k, both in differences(*part[1:], part[0]).items()}


def test_every_call_tells_the_same(ours):
    assert ours["cases"].keys() == THEIRS["cases"].keys() and len(ours["cases"]) > 90
    found = {(case, where): both for case, told in THEIRS["cases"].items() for where, both in differences(told, ours["cases"][case]).items()}
    assert {key: both[1] for key, both in found.items()} == {key: mine for key, (mine, _) in DIFFERENCES.items()}
    assert ours["n_calls"] == THEIRS["n_calls"] > 200


def records(told):
    "All answers in what a case tells"
    if isinstance(told, list):
        for x in told:
            yield from records(x)
    elif isinstance(told, dict):
        yield from told.get("answers", ())


def test_much_was_compared():
    "Texts word for word: no first choice was close to the second"
    gaps = [gap for some in THEIRS["cases"]["gaps"].values() for gap in some]
    assert min(gaps) > CLOSE
    said = [answer for told in THEIRS["cases"].values() for answer in records(told)]
    n_ids, n_logprobs = sum(len(a["ids"]) for a in said), sum(len(p) for a in said for p in a["logprobs"] or ())
    print(f"{len(said)} answers of {n_ids} tokens, {n_logprobs} log-probabilities; the closest second choice was {min(gaps)} behind")
    assert len(said) > 90 and n_ids > 600 and n_logprobs > 40


def test_differences_are_seen():
    a = [dict(ids=[1, 2], total=-1.0, finish="stop", error="TypeError")]
    for b in ([dict(a[0], ids=[1, 3])], [dict(a[0], ids=[1])], [dict(a[0], total=-1.1)], [dict(a[0], total=None)], [dict(a[0], more=1)], a*2,
              [dict(a[0], finish="length")], [dict(a[0], ids=[1, 2.0])], [dict(a[0], error="accepted")]):
        assert len(differences(a, b)) == 1 and len(differences(b, a)) == 1
    assert not differences(a, [dict(a[0], total=-1.0001, error="ValueError")])
