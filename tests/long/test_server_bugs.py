"Would tests/test_server.py notice? Planted bugs, each in a copy of the package; seconds each, so `make long` runs it"
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openai")
ROOT = Path(__file__).parent.parent.parent
BUGS = {  # what is wrong: (module, a piece of its source, what to put there, tests of which one must fail)
    "leaving is not aborting": ("async_engine", "                self._forget(box)\n", "                pass\n", "leaves"),
    "a full queue takes more": ("async_engine", "self.taken + n > self.n", "False", "come_back"),
    "seats are never given back": ("async_engine", "with self._lock: self.taken -= n", "pass", "leaves"),
    "a failed answer is nobody's": ("async_engine", "for box in {box for _, box in whose}: self._fail(box, StepFailed(name))", "pass", "cannot_be"),
    "neighbours of a failed answer fail": ("engine", "elif group and len(ids) == 1:", "elif ids:", "harms_no_other"),
    "an unreadable answer ends the engine": ("llm", "        except Exception as e: return e\n", "        finally: pass\n", "cannot_be_told"),
    "a listener that raises is asked again": ("llm", "self._drop(listen, name, e)", "pass", "listener"),
    "a message in the log": ("llm", "return type(error).__name__ +", "return repr(error) +", "cannot_be"),
    "who hangs up is not heard": (
        "server", 'while (await receive())["type"] != "http.disconnect": pass', "await asyncio.sleep(1e6)", "leaves"),
    "any host": ("server", "not in self.hosts", "in ()", "names_of"),
    "any key": ("server", "if not hmac.compare_digest(said, self.key.encode())", "if False", "keys"),
    "any form may be sent": ("server", 'if kind != "application/json"', "if False", "bodies"),
    "bodies of any size": ("server", "if n > most:", "if False:", "keys"),
    "an error that comes late is lost": ("server", "except ApiError as e: yield event(e.body)", "except ApiError as e: pass", "cannot_be"),
    "a failure is called a mistake of the client's": ("server", "except StepFailed as e: raise failed(500,", "except StepFailed as e: raise failed(400,", "cannot_be"),
    "an ended choice ends again": ("protocol", "if place in self._ended: continue", "pass", "several_answers"),
    "half a tool call is shown": ("protocol", "n_held(self.text, [OPEN])", "0", "tool_is_called"),
    "unknown fields are let through": ("protocol", 'extra="forbid"', 'extra="ignore"', "wrong"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    module, old, new, tests = BUGS[bug]
    shutil.copytree(ROOT/"pagedlm", tmp_path/"pagedlm", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path/"pagedlm"/f"{module}.py"
    source = path.read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{module}.py has changed: this bug needs a new line"
    path.write_text(source.replace(old, new), encoding="utf-8")
    env = os.environ | dict(PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", f"({tests}) and not snippets", str(ROOT/"tests"/"test_server.py")]
    try:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return  # it hangs: that is noticed
    assert done.returncode == 1, done.stdout[-3000:]
