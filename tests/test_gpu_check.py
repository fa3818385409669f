"The script for a rented GPU, without one: it must work, and notice what is wrong, before the rent runs"
import ast
import json
import math
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import pagedlm
from pagedlm import kernels

ROOT = Path(pagedlm.__file__).parent.parent
SCRIPT = ROOT/"tools"/"gpu_check.py"
pytestmark = [pytest.mark.skipif(not kernels.INTERPRETED, reason="Triton was imported without TRITON_INTERPRET=1"),
              pytest.mark.skipif(not SCRIPT.exists(), reason="not in the repository")]


def module_of(path, name):
    spec = spec_from_file_location(name, path)
    spec.loader.exec_module(module := module_from_spec(spec))
    return module


@pytest.fixture
def script():
    return module_of(SCRIPT, "gpu_check")


def dry(script, tmp_path, *args):
    "Exit code and findings of a dry run"
    code = script.main(["--dry", "--out", str(tmp_path), *args])
    file, = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    file.unlink()
    return code, rows


def kinds(rows, kind): return [r for r in rows if r["kind"] == kind]


def test_a_slice(script, tmp_path, capsys):
    "Decodes, chunks, windows, sinks, splits; a graph with other lengths; a stamp first, a table last"
    code, rows = dry(script, tmp_path, "--only", "check", "--slice", "1/9")
    assert code == 0
    assert rows[0]["kind"] == "stamp" and rows[-1]["kind"] == "slice"
    assert rows[0]["dry"] and rows[0]["torch"] == torch.__version__ and len(rows[0]["script"]) == 12
    assert {"date", "device", "triton", "transformers", "package", "asked"} <= set(rows[0])
    names = [r["name"] for r in kinds(rows, "check")]
    assert len(names) == 2 and any("attend" in n for n in names) and any("graph" in n for n in names)
    assert all(r["ok"] and 0 <= r["error"] <= r["limit"] for r in kinds(rows, "check"))
    assert "2 checks, 0 failures" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("old,new", [
    ("key[None, :] <= qpos[:, None]", "key[None, :] < qpos[:, None]"),    # a token does not see itself
    ("ok, qpos = t < n, pos + t", "ok, qpos = t < n - (n > 1), pos + t")], # a chunk's last token is not written
    ids=["blind", "forgetful"])
def test_a_wrong_kernel(old, new, tmp_path, monkeypatch, capsys):
    source = Path(kernels.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1
    (tmp_path/"kernels.py").write_text(source.replace(old, new), encoding="utf-8")
    wrong = module_of(tmp_path/"kernels.py", "pagedlm.kernels")
    monkeypatch.setattr(pagedlm, "kernels", wrong)
    monkeypatch.setitem(sys.modules, "pagedlm.kernels", wrong)
    code, rows = dry(module_of(SCRIPT, "gpu_check"), tmp_path, "--only", "check", "--slice", "1/17")
    assert code == 1
    bad, = kinds(rows, "check")
    assert not bad["ok"] and "attend" in bad["name"]
    assert f"FAILED   {bad['name']}" in capsys.readouterr().out


def test_kernels_and_ceilings(script, tmp_path):
    "Everything is timed and compared, and nothing is said about targets"
    code, rows = dry(script, tmp_path, "--only", "ceilings,kernels")
    assert code == 0 and not kinds(rows, "error") and not kinds(rows, "missing")
    assert {r["name"] for r in kinds(rows, "ceiling")} == {"copy", "matmul"}
    assert all(r["ms"] > 0 for r in kinds(rows, "time")) and len(kinds(rows, "time")) >= 11
    assert {"sdpa_ms", "flex_ms"} == {key for r in kinds(rows, "rival") for key in r} - {"kind", "name"}
    assert {r["verdict"] for r in kinds(rows, "target")} == {"not measured"}


def test_engine(script, tmp_path):
    "Whole models, and transformers' continuous batching, which is the one that may be missing"
    code, rows = dry(script, tmp_path, "--only", "engine")
    assert code == 0 and not kinds(rows, "error") and not kinds(rows, "missing")
    names = [r["name"] for r in kinds(rows, "engine")]
    assert len(names) == len(set(names)) == 9 and "Qwen3-0.6B: transformers" in names
    wanted = sum(script.workload(*script.TINY)[1])
    assert all(r["finished"] and r["tokens"] == wanted for r in kinds(rows, "engine") if "tokens" in r)


def test_failures_are_told(script, tmp_path, monkeypatch):
    "A check that raises, a slice that dies, a section that fails, a rival that fails: only the last is forgiven"
    lab = script.begin(script.parse(["--dry", "--out", str(tmp_path), "--only", "check"]))
    units = dict(attention=lambda lab: 1/0, store=lambda lab: script.outcome(dict(x=0.), 1),
                 other=lambda lab: script.outcome(dict(x=math.nan), 1))
    for name, f in units.items():
        monkeypatch.setattr(script, f"{name}_checks", lambda lab, name=name, f=f: [(name, f)])
    script.run_checks(lab)
    assert [r["ok"] for r in kinds(lab.rows, "check")] == [False, True, False] and script.finish(lab) == 1
    assert "ZeroDivisionError" in lab.rows[1]["what"]
    for ours, code in ((False, 0), (True, 1)):
        lab.rows = [dict(kind="check", name="x", ok=True)]
        lab.section(lambda lab: 1/0, 0, ours)
        assert script.finish(lab) == code
    lab.rows = [dict(kind="check", name="x", ok=True)]
    lab.section(script.late, 0)     # the alarm
    assert script.finish(lab) == 0 and kinds(lab.rows, "skip")
    lab.rows = []
    assert script.finish(lab) == 1  # no check ran
    lab.how.jobs = 2
    monkeypatch.setattr(script, "sys", SimpleNamespace(executable="/bin/false"))
    script.run_slices(lab, 1)
    assert [r["name"] for r in kinds(lab.rows, "error")][-2:] == ["slice 0/2", "slice 1/2"]
    assert script.finish(lab) == 1


def test_no_time_is_no_pass(script, tmp_path):
    lab = script.begin(script.parse(["--dry", "--out", str(tmp_path), "--seconds", "1"]))
    lab.dry = False
    script.run_checks(lab)
    lab.section(script.ceilings, 5)
    assert len(kinds(lab.rows, "check")) > 60 and not any(r["ok"] for r in kinds(lab.rows, "check"))
    assert [r["name"] for r in kinds(lab.rows, "skip")] == ["ceilings"]


def test_what_is_not_a_number(script):
    with script.nan_if_unwritten():
        assert torch.empty(5).isnan().all() and torch.empty_like(torch.ones(5, dtype=torch.float16)).isnan().all()
    x = torch.ones(2, 3)
    assert script.worst(x, x) == 0 and script.worst(x*1.5, x) == .5
    assert script.worst(x.where(x < 0, math.nan), x) == script.worst(x[:1], x) == math.inf
    for dtype in torch.float16, torch.float8_e4m3fn, torch.float8_e5m2:
        x = torch.zeros(4, 2).to(dtype)
        script.poison(x)
        assert x.float().isnan().all()


def test_workload_and_floor(script, tmp_path):
    "nano-vllm's README says as many tokens; the floor is about 35,000 of them a second on an H200"
    prompts, wants = script.workload()
    assert (sum(map(len, prompts)), sum(wants)) == (142_827, 133_966)
    lab = script.begin(script.parse(["--dry", "--out", str(tmp_path)]))
    lab.log("ceiling", "copy", rate=4.3e12)
    lab.log("ceiling", "matmul", rate=790e12)
    assert 34_000 < sum(wants)/script.floor_seconds(lab, script.QWEN, prompts, wants) < 38_000


def test_verdicts(script):
    found = [script.verdict(.85, True, x) for x in (.9, .85, .8, None, "nan")]
    assert found == ["met", "met", "gap", "not measured", "not measured"]
    assert [script.verdict(.05, False, x) for x in (.04, .06)] == ["met", "gap"]


def test_options(script, capsys):
    for args in ["--only", "speed"], ["--slice", "1"], ["--slice", "1/0"]:
        with pytest.raises(SystemExit):
            script.parse(args)
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="--dry"):
            script.main([])


# ---- what it needs

WITHOUT = """
import sys, runpy
class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {"numba", "gguf", "nbdev", "fastcore"}: raise ImportError(f"{top} is blocked")
sys.meta_path.insert(0, Block())
sys.argv = ["gpu_check.py", "--dry", "--help"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_imports_little():
    "A rented machine has PyTorch, Triton and transformers, and not what the notebooks and files of models need"
    cmd = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(cmd, cwd=SCRIPT.parent, capture_output=True, text=True, timeout=100)
    assert not done.returncode and "--slice" in done.stdout, done.stderr


NEWER = {  # of Triton, after 3.6: attributes of triton and tl
    "squeeze", "unsqueeze", "to_tensor", "atomic_load", "atomic_store", "aggregate"}
TORCH = set("""
    Generator __version__ arange bfloat16 cat compile cuda cuda.CUDAGraph cuda.Event cuda.empty_cache
    cuda.get_device_name cuda.get_device_properties cuda.graph cuda.is_available cuda.synchronize device empty_like
    equal float16 float32 float8_e4m3fn float8_e5m2 full inference_mode int32 int64 ones randint randn randperm
    stack tensor uint8 use_deterministic_algorithms version version.cuda zeros""".split())  # in 2.6, and so in 2.11


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *parts[::-1]] if isinstance(node, ast.Name) else []


def test_nothing_too_new():
    "Python 3.11's grammar, Triton 3.6's names; a new one of PyTorch's is looked up before it is added here"
    for path in SCRIPT, Path(kernels.__file__), Path(pagedlm.__file__).parent/"fused.py":
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 11))
        names = [name for node in ast.walk(tree) if (name := dotted(node))]
        assert not [name for name in names if name[0] in ("tl", "triton") and name[-1] in NEWER]
        if path == SCRIPT:
            assert {".".join(name[1:]) for name in names if name[0] == "torch" and len(name) > 1} - TORCH == set()
