"The compiled stage from logits to ids: says what the readable one says, whatever is asked, in every form; and bugs planted into it"
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from common import check_noticed
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from pagedlm import cpu_choose
from pagedlm.choose import Chooser, read_table
from pagedlm.core import SamplingParams, StructuredOutputsParams
from pagedlm.cpu import CHECKED, FORM, Team
from pagedlm.cpu_runner import CpuRunner
from pagedlm.model import tiny_config, tiny_model
from pagedlm.request import Admit, Plan, Work
from pagedlm.sampling import bits_of

pytestmark = pytest.mark.usefixtures("one_thread")
TEAM = Team(2)
KINDS = dict(temperature=torch.float32, top_k=torch.int32, top_p=torch.float32, min_p=torch.float32)
GRAMMAR = StructuredOutputsParams(regex="[ab]*")


def admit(row, said, n_prompt=1, stops=(), words=None, **params):
    p = SamplingParams(**dict(temperature=0) | params)
    p.bad_word_ids, p.bad_words = words, ["…"]*bool(words)
    return Admit(row, tuple(said), n_prompt, p, row, (1,), tuple(stops))


def step(chooser, x, admits):
    "Ids, and Scores of those who asked"
    how = [torch.tensor([getattr(a.params, k) for a in admits], dtype=kind) for k, kind in KINDS.items()]
    how += [torch.tensor(v) for v in ([a.seed if a.params.seed is None else a.params.seed for a in admits], [len(a.ids) for a in admits])]
    works = [Work(a.row, len(a.ids) - 1, 1, None, (), True) for a in admits]
    ids, scored = chooser(x, works, torch.tensor([a.row for a in admits]), how)
    return ids.tolist(), scored and read_table(scored[1].numpy(), [w.n_top for w in scored[0]])


def chooser(rows, V, module=cpu_choose, team=TEAM, **kw):
    made = Chooser(rows, V, 64, **kw)
    made.bring(module.CpuChooser(rows, V, team))
    return made


def grammar_for(V):
    "Some dozen ids that depend on the request and on how much was said; now and then all"
    return lambda params: lambda said: None if len(said) % 3 == 2 else bits_of([(params.seed + 7*len(said) + j*j) % V for j in range(12)], V)


def roll(params): return (lambda prompt, answer, logits: logits.roll(len(answer))) if params.extra_args else None


def wish(rng, V):
    def some(n): return [rng.randrange(V) for _ in range(n)]
    words = [some(rng.randint(1, 3)) for _ in range(rng.choice([0, 0, 4, 2*V if V < 50 else 30]))]
    p = dict(temperature=rng.choice([0, 1e-6, .5, 1, 1.6]), top_k=rng.choice([0, -1, 1, 3, 20, V]), top_p=rng.choice([1, 1, .95, .5, .01]), min_p=rng.choice([0, 0, .1, 1]),
             repetition_penalty=rng.choice([1, 1, 1.3, .8]), frequency_penalty=rng.choice([0, 0, 1, -.5]), presence_penalty=rng.choice([0, 0, .7]),
             logit_bias={i: rng.uniform(-5, 5) for i in some(rng.choice([0, 0, 3]))}, allowed_token_ids=rng.choice([None, None, some(9)]),
             min_tokens=rng.choice([0, 0, 4]), logprobs=rng.choice([None, 0, 3, -1]), seed=rng.getrandbits(62))
    p |= dict(structured_outputs=GRAMMAR) if rng.random() < .3 else dict(extra_args=dict(roll=1)) if rng.random() < .2 else {}
    return p | dict(words=words)


def shape(rng, x):
    "Logits as they may come: smooth, with ties, flat, with holes"
    kind = rng.randrange(5)
    if kind == 1: x = x.round()
    if kind == 2: x = x*1e-3
    if kind == 3: x[:, ::rng.choice([2, 3])] = -math.inf
    if kind == 4: x = x*20 - 300
    return x


def differences(module, seed, n_steps=3, team=TEAM):
    "What the two stages say differently in a few steps of a random batch"
    rng = random.Random(seed)
    V, rows = rng.choice([1, 7, 31, 32, 33, 97, 256, 1000]), rng.randint(1, 6)
    kw = dict(grammar=grammar_for(V), processors=[roll])
    fast, slow, found = chooser(rows, V, module, team, **kw), Chooser(rows, V, 64, **kw), []
    asks, said = [wish(rng, V) for _ in range(rows)], [[rng.randrange(min(V, 9)) for _ in range(rng.randint(2, 9))] for _ in range(rows)]
    for at in range(n_steps):
        x = shape(rng, 3*torch.randn(rows, V, generator=torch.Generator().manual_seed(rng.getrandbits(40))))
        admits = [admit(i, s, 2, [i for i in (1, 2) if i < V], **ask) for i, (s, ask) in enumerate(zip(said, asks))]
        if at == 0 or rng.random() < .3:
            for c in fast, slow: c.learn(Plan(admits, [], []))
        before = x.clone()
        ids, told = step(fast, x, admits)
        if not torch.equal(x, before): found.append("logits")
        try: ids2, told2 = step(slow, x, admits)
        except ValueError as e:  # nothing but -inf: a mask let nothing else through
            return found if -1 in ids and f"logits of row {ids.index(-1)}:" in str(e) else [(ids, e)]
        if ids != ids2: found.append((ids, ids2))
        for a, b in zip(told or (), told2 or (), strict=True):
            if (a.id, a.rank, len(a.top_ids)) != (b.id, b.rank, len(b.top_ids)): found.append((a, b))
            p, q = np.array([a.logprob, *a.top_logprobs]), np.array([b.logprob, *b.top_logprobs])
            if not np.allclose(p, q, atol=1e-5, rtol=1e-6): found.append((p, q))
        for s, id in zip(said, ids2): s.append(id)
    return found


# ---- what the readable stage says

@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_any_mixture_of_wishes(seed):
    assert differences(cpu_choose, seed) == []


@pytest.mark.parametrize("scale", [.01, 1, 3])
def test_a_vocabulary_of_fifty_thousand(scale):
    "Flat, in between, sharp: every way to find the limit; whoever is kept by thousands"
    V, rng = 49_157, random.Random(scale)
    hows = [dict(temperature=t, top_k=k, top_p=p, min_p=m) for t in (.7, 1.5) for k, p, m in
            ((0, 1, 0), (50, 1, 0), (0, .9, 0), (0, .999, 0), (5000, .8, 0), (0, 1, .02), (40_000, 1, 0), (0, .5, .3))]
    x = scale*torch.randn(len(hows), V, generator=torch.Generator().manual_seed(5))
    admits = [admit(i, [rng.randrange(V) for _ in range(9)], seed=i, logprobs=20, **how) for i, how in enumerate(hows)]
    got = []
    for c in chooser(len(hows), V), Chooser(len(hows), V, 64):
        c.learn(Plan(admits, [], []))
        got.append(step(c, x, admits))
    assert got[0][0] == got[1][0]
    for a, b in zip(got[0][1], got[1][1]):
        assert (a.id, a.rank, a.top_ids) == (b.id, b.rank, b.top_ids) and np.allclose(a.top_logprobs, b.top_logprobs, atol=1e-5)


def filtered(module, seed, team=TEAM):
    "Do both stages draw the same of 256 short, flat rows, where the last that a filter keeps is drawn often?"
    rng, V = random.Random(seed), 64
    hows = [dict(temperature=rng.choice([1, 3]), top_k=rng.choice([0, 1, 2, 3, 5, 9, 17, 40]), top_p=rng.choice([1, .97, .8, .5, .2]),
                 min_p=rng.choice([0, 0, .05, .2, .5])) for _ in range(256)]
    admits = [admit(i, [1], seed=rng.getrandbits(62), **how) for i, how in enumerate(hows)]
    x = torch.randn(256, V, generator=torch.Generator().manual_seed(seed))
    got = []
    for c in chooser(256, V, module, team), Chooser(256, V, 64):
        c.learn(Plan(admits, [], []))
        got.append(step(c, x, admits)[0])
    return got[0] == got[1]


def test_filters_on_top_of_each_other():
    assert all(filtered(cpu_choose, seed) for seed in range(8))


def test_equal_ones_go_by_id():
    "Of equal logits the lowest id: greedy, top_k, and the likeliest that are told"
    x = torch.zeros(4, 3000)
    admits = [admit(0, [1], logprobs=4), admit(1, [1], temperature=1., top_k=1), admit(2, [1], temperature=1., top_p=1e-9), admit(3, [1], temperature=1., top_k=7, seed=3)]
    c = chooser(4, 3000)
    c.learn(Plan(admits, [], []))
    ids, (told,) = step(c, x, admits)
    assert ids[:3] == [0, 0, 0] and ids[3] < 7 and told.top_ids == [0, 1, 2, 3] and told.rank == 3000


def test_nonsense_harms_nobody_else():
    "NaN, infinity, nothing: -1 in the row where it is, for any wish, and all others as before"
    rng, V = random.Random(3), 500
    asks = [dict(temperature=1., top_p=.9), {}, dict(presence_penalty=1., logprobs=2), dict(logprobs=-1, temperature=1.), dict(temperature=1., top_k=9), dict(min_p=.1, temperature=1.)]
    admits = [admit(i, [1, 2, 3], **ask) for i, ask in enumerate(asks)]
    c, slow = chooser(6, V), Chooser(6, V, 64)
    for one in c, slow: one.learn(Plan(admits, [], []))
    x = torch.randn(6, V)
    calm = step(c, x, admits)[0]
    for row in range(6):
        for value in math.nan, math.inf, -math.inf:
            odd = x.clone()
            odd[row, rng.randrange(V) if value != -math.inf else slice(None)] = value
            ids = step(c, odd, admits)[0]
            assert ids[row] == -1 and [*ids[:row], *ids[row + 1:]] == [*calm[:row], *calm[row + 1:]]
            with pytest.raises(ValueError, match=f"logits of row {row}"): step(slow, odd, admits)
    hidden = [admit(0, [1], allowed_token_ids=[3, 4], logprobs=1)]  # by a mask, from the choice but not from who asks how likely
    for one in c, slow: one.learn(Plan(hidden, [], []))
    x[0, 9] = math.nan
    (ids, (a,)), (ids2, (b,)) = (step(one, x[:1], hidden) for one in (c, slow))
    assert ids == ids2 and ids[0] in (3, 4) and math.isnan(a.logprob) and (a.rank, a.top_ids) == (b.rank, b.top_ids)


def test_bans_that_leave_nothing_give_way():
    for V, words in (5, [[i] for i in range(5)]), (5, [[2, i] for i in range(5)]):
        admits = [admit(0, [0, 2], 1, words=words, logit_bias={3: 9.0})]
        got = []
        for c in chooser(1, V), Chooser(1, V, 64):
            c.learn(Plan(admits, [], []))
            got.append(step(c, torch.linspace(0, 1, V)[None], admits)[0])
        assert got == [[3], [3]]


def begun_in_the_prompt(module, team=TEAM):
    "Ids after a prompt of 1 2, then after 1 2 2, where 3 is likeliest and 2 3 is a bad word: only the answer counts"
    got, x = [], torch.zeros(1, 5)
    x[0, 3] = 1
    for said in [1, 2], [1, 2, 2]:
        admits = [admit(0, said, 2, words=[[2, 3]])]
        for c in chooser(1, 5, module, team), Chooser(1, 5, 64):
            c.learn(Plan(admits, [], []))
            got += step(c, x, admits)[0]
    return got


def test_a_bad_word_begins_in_the_answer():
    assert begun_in_the_prompt(cpu_choose) == [3, 3, 0, 0]


@pytest.mark.parametrize("how, says", [(dict(logit_bias={97: 1.0}), "token id 97, but the vocabulary has 97"), (dict(words=[[3, 97]]), "token id 97"), (dict(words=[[-1]]), "token id -1")])
def test_no_id_reaches_outside_of_a_row(how, says):
    with pytest.raises(ValueError, match=says): chooser(1, 97).learn(Plan([admit(0, [1], **how)], [], []))


# ---- in the runner

def test_who_asks_for_nothing_loads_nothing():
    "Greedy loads nothing of it; who samples loads no wishes; who has none no log-probabilities"
    runner = CpuRunner(tiny_model(tiny_config()), 20, 16, 4, 64)
    def run(**params):
        a = admit(0, [1, 2, 3], 3, **params)
        runner(Plan([a], [Work(0, 0, 3, a.ids, (), True)], []))
        quick = runner.chooser.quick
        return {name for name in ("pick", "change", "judge") if quick and quick.stage.one[name]}
    assert run() == set()
    assert run(temperature=1., top_p=.9) == {"pick"}
    assert run(logprobs=1) == {"pick", "judge"}
    assert run(presence_penalty=1.) == {"pick", "judge", "change"}


# ---- every form, and every address looked up

def small_sweep():
    for seed in range(12):
        assert differences(cpu_choose, seed) == [], seed
    if CHECKED:
        c = cpu_choose.CpuChooser(1, 97, Team(1))
        c.jobs["n_bans"], c.jobs["bans"] = 1, np.array([970_000]).ctypes.data
        with pytest.raises(IndexError, match="outside of all arrays"):
            c(torch.zeros(1, 97), [0], ([0.], [0], [1.], [0.], [0], [0]), {}, [], torch.zeros(0, 3, dtype=torch.int64))
    print(FORM, "checked" if CHECKED else "")


@pytest.mark.parametrize("form", ["plain", "emulated", "checked"])
def test_other_forms(form):
    env = dict(PAGEDLM_CPU_CHECK="1") if form == "checked" else dict(PAGEDLM_CPU=form)
    done = subprocess.run([sys.executable, __file__], env=os.environ | env | dict(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and form in done.stdout, done.stderr


# ---- who tests the tests?

BUGS = {  # what is wrong: (a piece of the source, what to put there)
    "a bound that too few reach": ("if n < K: high = mid", "if n < K - 2: high = mid"),
    "equal ones in any order": ("return a.b.or_(a.b.shl(n, a.num(32)), i)", "return a.b.or_(a.b.shl(n, a.num(32)), a.b.xor(i, a.num(7)))"),
    "the one that crosses the limit goes": ("if n_high >= k or mass >= need: break\n        last = i64_at(keys + i*8)\n",
                                            "if n_high >= k or mass >= need: break\n        if mass + f32_at(e + (i64_at(keys + i*8) & 0xffffffff)*4) >= need: break\n        last = i64_at(keys + i*8)\n"),
    "one more than k": ("if count < k and m < need: high", "if count <= k and m < need: high"),
    "top_p of all, not of the k": ("k, p*SLACK*held)", "k, p*SLACK*mass_of(y, s.n, np.float32(0)))"),
    "a rival is missed": ("2.**-31*(1 - 2.**-20)", "2.**-31*1.5"),
    "the noise of the neighbour": ("a.mul(a.plus(id, 1), _int64(_STEP))", "a.mul(a.plus(id, 2), _int64(_STEP))"),
    "the position does not matter": ("_int64(_STEP))), position))", "_int64(_STEP))), seed))"),
    "temperature forgotten": ("y = b.fdiv(b.fsub(v, top), t)", "y = b.fsub(v, top)"),
    "places behind the last token": ("for j in range(s.V, s.n): put_f32(x + j*4, low)", "for j in range(s.V, s.n): put_f32(x + j*4, np.float32(0))"),
    "a mask off by one": ("[1 << W*r + i for i in range(W)]", "[1 << (W*r + i + 1) % 16 for i in range(W)]"),
    "stops are banned for good": ("0 if job.position < job.stops_until else job.n_stops", "0"),
    "a word begins in the prompt": ("begun, j = job.position - job.n_prompt >= n - 1, 1", "begun, j = job.position >= n - 1, 1"),
    "frequency counts the prompt": ("for j in range(job.n_prompt, job.position):", "for j in range(0, job.position):"),
    "counts are left behind": ("for j in range(job.position): put_i32", "for j in range(job.n_prompt): put_i32"),
    "penalised once per time it was said": ("put_i32(counts + id*4, np.int32(-1))", "pass"),
    "bans that leave nothing stay": ("call5(stage.change, s, me, x, y, bans - 1)", "call5(stage.change, s, me, x, y, bans)"),
    "a rank without its equals": ("put_i64(job.line + 8, count_from(x, s.n, chosen))", "put_i64(job.line + 8, 1 + count_from(x, s.n, chosen) - count_from(x, s.n, chosen - np.float32(0)))"),
    "log-probabilities of what was changed": ("top, id = peaks(x, s.n, peak), i64_at", "x = y if wishes(job) else x\n    top, id = peaks(x, s.n, peak), i64_at"),
    "a NaN is overlooked": ("return b.select(nan, a.const(F32, math.nan), _largest(a, a.get(top)))", "return _largest(a, a.get(top))"),
}


def notices(module):
    "Does a short sweep see that the module is wrong?"
    x = torch.zeros(1, 40)
    x[0, 3] = math.nan
    if int(module.CpuChooser(1, 40, Team(1))(x, [0], ([1.], [0], [1.], [0.], [0], [0]), {}, [], torch.zeros(0, 3, dtype=torch.int64))[0]) >= 0: return True
    if begun_in_the_prompt(module, Team(1)) != [3, 3, 0, 0]: return True
    if not all(filtered(module, seed, Team(1)) for seed in range(8)): return True
    return any(differences(module, seed, team=Team(1)) for seed in range(60))


@pytest.mark.parametrize("bug", ["equal ones in any order", "one more than k"])
def test_a_planted_bug_is_noticed(bug, tmp_path):
    check_noticed(notices, cpu_choose, *BUGS[bug], tmp_path/"mutant.py")


if __name__ == "__main__":
    small_sweep()
