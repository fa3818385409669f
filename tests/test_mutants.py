"""Who tests the tests? One-line bugs, put into a copy of the package: a short random sweep must catch each"""
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

MODULES = "__init__", "core", "blocks", "request", "scheduler", "engine"
MUTANTS = {  # what is wrong: (module, a piece of its source, what to put there)
    "a hit leaves no token to compute": (
        "blocks", "(len(request.tokens) - 1)//self", "len(request.tokens)//self"),
    "admission forgets that hits leave the free list": (
        "blocks", "n_new + n_revived + reserved", "n_new + reserved"),
    "admission forgets what is owed to others": (
        "blocks", "n_new + n_revived + reserved", "n_new + n_revived"),
    "a shared block stays on the free list": ("blocks", "for b in blocks: self.pop(b, None)", "pass"),
    "a reader more is not counted": ("blocks", "self.refs[b] += 1", "pass"),
    "free while others read": ("blocks", "if not self.refs[b]: left.append(b)", "left.append(b)"),
    "a block keeps its name when it is used anew": (
        "blocks", "if self.keys[b] is not None: self._evict(b)", "pass"),
    "a name moves to the block that got it last": ("blocks", "if key in self.named: return", "pass"),
    "a name forgets what came before": (
        "blocks", "blake2b(before + ids.tobytes()", "blake2b(ids.tobytes()"),
    "a name keeps 32 bits of an id": (
        "blocks", 'array("q", tokens[i*block_size:(i+1)*block_size])',
        'array("q", [t & 2**32 - 1 for t in tokens[i*block_size:(i+1)*block_size]])'),
    "salts share": ("blocks", "else _root(salt)", 'else b""'),
    "named before it is full": (
        "blocks", "n = n_computed//self.block_size", "n = len(request.tokens)//self.block_size"),
    "the last free block is never handed out": ("blocks", "if n > self.n_free", "if n >= self.n_free"),
    "a block too few": (
        "blocks", "max(0, cdiv(n_tokens, self.block_size)", "max(0, cdiv(n_tokens - 1, self.block_size)"),
    "a block too many": (
        "blocks", "max(0, cdiv(n_tokens, self.block_size)", "max(0, cdiv(n_tokens + 1, self.block_size)"),
    "caching cannot be turned off": ("blocks", "if not self.caching or n <=", "if n <="),
    "a table forgets its older blocks": ("blocks", "+= new", "= new"),
    "ignore_eos is ignored": ("request", "frozenset() if params.ignore_eos else ", ""),
    "one token more than fits": ("request", "or n >= limit", "or n > limit"),
    "one token more than asked for": (
        "request", "n >= self.n_most", "n > self.n_most"),
    "progress survives preemption": (
        "scheduler", "r.n_computed, r.n_planned = Status.WAITING, 0, 0",
        "r.n_computed, r.n_planned = Status.WAITING, r.n_computed, r.n_planned"),
    "what was cached is computed again": ("scheduler", "Status.RUNNING, n_cached, n_cached", "Status.RUNNING, 0, 0"),
    "every chunk samples": ("scheduler", "tuple(new), last))", "tuple(new), True))"),
    "a chunk too long by one": (
        "scheduler", "start = r.n_planned\n", "start, n = r.n_planned, n + (n > 1)\n"),
    "the last id stands for any single id": (
        "scheduler", "n == 1 and last and start >= r.n_prompt", "n == 1 and start >= r.n_prompt"),
    "a victim's work stays in the plan": (
        "scheduler", "works.pop(victim.id).n if", "works[victim.id].n if"),
    "a victim's tokens are lost to the budget": (
        "scheduler", "works.pop(victim.id).n if", "works.pop(victim.id).n*0 if"),
    "a victim of this step is planned": (
        "scheduler", "r.status is not alive or not left", "not left"),
    "no budget, no end": (
        "scheduler", "r.status is not alive or not left", "r.status is not alive"),
    "a step that preempted admits": ("scheduler", "if not preempted and not made_way: ", ""),
    "a row too many": (
        "scheduler", "len(self.running) < self.max_num_seqs", "len(self.running) <= self.max_num_seqs"),
    "chunks before decodes": ("scheduler", "len(r.tokens) > r.n_planned + 1)", "len(r.tokens) <= r.n_planned + 1)"),
    "who ends keeps its blocks": ("scheduler", "self.manager.release(r)", "pass"),
    "who ends keeps its row": ("scheduler", "self._free.append(r.row)", "pass"),
    "gone rows are not told": ("scheduler", "gone, self._gone = self._gone, []", "gone = []"),
    "new blocks are told twice": ("scheduler", "works[id]._replace(new_blocks=())", "works[id]"),
    "the newest id is not told": (
        "scheduler", "said, stops = tuple(r.tokens)", "said, stops = tuple(r.tokens[:-1])"),
    "nothing is sent again": ("scheduler", "self._untold.update(self.running)", "pass"),
    "one token is computed for ever": (
        "scheduler", "r.n_computed = start + n", "r.n_computed = start + n - sample"),
    "nothing is ever named": ("scheduler", "self.manager.name_full(r, start + n)", "pass"),
    "the longest sequence is longer than the pool": (
        "scheduler", "min(self.max_model_len, manager.capacity)", "self.max_model_len"),
    "a prompt that leaves no room": (
        "scheduler", "if r.n_prompt >= self.limit", "if r.n_prompt > self.limit"),
    "a failed step is not sent again": ("scheduler", "        self.rows.resend()", "        pass"),
    "a failed step is not taken back": ("engine", "self.scheduler.rewind()", "self.scheduler.rows.resend()"),
    "what was planned counts as computed": ("scheduler", "r.n_planned = r.n_computed = min(r.n_computed,", "r.n_planned = r.n_computed = min(r.n_planned,"),
    "a newcomer gets what was under way": ("scheduler", "for _, owners in self.under_way: owners.pop(r.row, None)", "pass"),
    "who waited long waits on": ("scheduler", "if self.max_pause > 1 and not self.passed_over: return", "if True: return"),
    "a token after the last": ("scheduler", "if r.full(start + 1, self.limit): continue", "if False: continue"),
}


def quick_check():
    "A sweep in little: it must fail on each mutant, and run to its end on the real thing"
    from common import sweep
    from test_scheduler import test_a_victim_gives_its_tokens_back as story
    story()
    total = sweep(Random(1), 120, p_lose=.1, p_fail=.1, p_abort=.02)
    total += sweep(Random(2), 120)
    total += sweep(Random(3), 120, policy=True)
    assert total["share"] > 200 and total["preempt"] > 100 and total["evict"] > 500


def check_copy(folder, module=None, old="", new=""):
    "`quick_check` in a Python that imports a copy of the package, with one change"
    import pagedlm
    copy = folder/"pagedlm"
    copy.mkdir()
    for name in MODULES:
        shutil.copy(Path(pagedlm.__file__).parent/f"{name}.py", copy)
    if module:
        source = (copy/f"{module}.py").read_text(encoding="utf-8")
        assert source.count(old) == 1, f"{module}.py has changed: this mutant needs a new line to break"
        (copy/f"{module}.py").write_text(source.replace(old, new), encoding="utf-8")
    env = os.environ | dict(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")
    return subprocess.run([sys.executable, __file__, str(copy)], env=env, capture_output=True, text=True, timeout=120)


def test_the_check_passes_what_is_right(tmp_path):
    done = check_copy(tmp_path)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("bug", MUTANTS)
def test_mutant_is_caught(bug, tmp_path):
    done = check_copy(tmp_path, *MUTANTS[bug])
    assert done.returncode == 1 and "SyntaxError" not in done.stderr, "nobody noticed"
    print(done.stderr.strip().splitlines()[-1])  # what noticed it: read with `pytest -s`


if __name__ == "__main__":
    import pagedlm
    assert Path(pagedlm.__file__).parent == Path(sys.argv[1])
    quick_check()
