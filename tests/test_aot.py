"tools/aot_check.py finds what is broken; processes of their own, for here Triton interprets (conftest.py)"
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")
TOOL = Path(__file__).parent.parent/"tools"/"aot_check.py"


def run(*how, code=None):
    "(exit code, what it prints); with code, Python that changes the tool first"
    start = [str(TOOL)] if code is None else ["-c", f"import sys; sys.path.insert(0, {str(TOOL.parent)!r}); {code}"]
    done = subprocess.run([sys.executable, *start, *how], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def test_it_sees_each_thing_that_can_be_wrong():
    code, said = run("--self-test", "--jobs", "1")
    assert code == 0 and "all 10 seen" in said, said


def test_exit_code_table_and_json(tmp_path):
    "A GPU with less shared memory than the smallest kernel wants"
    code = ("import aot_check as a; a.TARGETS['sm_90'] = a.TARGETS['sm_90']._replace(shared=0); "
            "sys.exit(a.main(sys.argv[1:]))")
    path = tmp_path/"sub"/"aot.json"
    code, said = run("--target", "sm_90", "--kernel", "peak", "--json", str(path), code=code)
    assert code == 1, said
    assert "FAILED peak (V128256 R64 bf16) on sm_90: 32 bytes of shared memory, but sm_90 has 0" in said
    assert "1 compiled, 1 of them failed, 0 skipped" in said
    row, = json.loads(path.read_text())["table"]
    assert row["state"] == "failed" and row["shared"] == 32 and row["spills"] == 0 and row["registers"] > 8


def test_the_default_table_covers_every_kernel():
    "All targets, all kinds of launches; what is left out says so, also a kernel that came later"
    code, said = run("--list", code="import aot_check as a; a.fused.new_kernel = a.crooked; sys.exit(a.main(sys.argv[1:]))")
    assert code == 1 and "FAILED pagedlm.fused.new_kernel: no configuration in tools/aot_check.py launches it" in said, said
    assert said.count("FAILED") == 1
    rows = [line.split() for line in said.splitlines()]
    for target in ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942"):
        mine = [" ".join(row) for row in rows if target in row]
        for words in ("attend many D128 G4 bf16", "attend many D128 G4 fp16", "attend few D64 G3 bf16", "attend few D256",
                      "merge few", "store D128 bf16", "add_rmsnorm C4096 add", "act_mul", "peak", "draw", "choose"):
            assert any(row.startswith(words) for row in mine), (target, words)
    assert sum("kv-e4m3" in row for row in rows) == 9 # two kernels for four targets, and why not for the fifth:
    assert ["kv_dtype=torch.float8_e4m3fn," in row for row in rows if "skipped:" in row] == [True]
