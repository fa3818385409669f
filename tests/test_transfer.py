"Prompts computed by one engine, answers written by another: the same tokens as one engine says, whatever happens on the way"
import logging
import os
import signal
import time
from collections import Counter
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
import torch
from common import Trouble, World, mutant, play, random_arrivals, random_world, real_engine
from test_llm import tiny
from test_oracle import EOS, Real, model_of, random_params

from pagedlm import SamplingParams, transfer
from pagedlm.core import StructuredOutputsParams, cdiv
from pagedlm.model import tiny_config, tiny_model
from pagedlm.paged import load_backend
from pagedlm.request import Request
from pagedlm.runner import Runner
from pagedlm.scheduler import fcfs, priority

pytestmark = pytest.mark.usefixtures("one_thread", "quiet")


@pytest.fixture
def quiet(caplog):
    caplog.set_level(logging.ERROR, "pagedlm.transfer")


# ---- random engines on both sides

class Memory:
    "The memory of the arithmetic model as a cache; to read what nobody wrote is a KeyError"
    dtype = torch.int64

    def __init__(self, world): self.memory, self.n_blocks = world.runner.memory, world.manager.pool.n_blocks

    def lift(self, slots):
        kept = [self.memory[s] if s else 0 for s in slots]
        return torch.tensor(kept, dtype=torch.int64).view(torch.uint8).view(-1, 1, 1, 8)

    def lay(self, slots, stored):
        for s, x in zip(slots, stored.contiguous().view(torch.int64).flatten().tolist(), strict=True):
            self.memory[s] = x


class Run:
    "`World.run`, with what a runner of a model has"
    chooser = SimpleNamespace(processors=[])

    def __init__(self, world):
        self.world, real = world, isinstance(world, Real)
        self.model = world.model if real else SimpleNamespace(
            config=tiny_config(n_layers=1, n_kv_heads=1, n_heads=1), dtype=torch.int64, parameters=tuple)
        self.cache = world.runner.cache if real else Memory(world)

    def __call__(self, plan): return self.world.run(plan)


def carriers(module):
    "One that sometimes does not deliver, and sometimes the wrong bytes"
    class Fickle(module.KVTransfer):
        def offer(self, said): return said._replace(sums=module.sums(self.cache.lift(self.slots(said))))

        def read(self, said, first):
            stored = super().read(said, first)
            if self.rnd.random() < self.p/2:
                raise module.Lost("on its way")
            if self.rnd.random() < self.p/2:
                stored[self.rnd.randrange(len(stored)), -1, 0, 3] += 1
            return module.checked(stored, said, first)
    return Fickle


class Prompts(World):
    "Whose requests are somebody else's"
    def check(self):
        self.manager.check()
        assert set(self.manager.tables) == set(self.scheduler.running)

    def check_plan(self, plan): self.check()


class Answers(World):
    "Whose prompts others compute"
    def join(self, others, module, p_bad=0):
        self.engine.run, self.others, homes = Run(self), others, []
        for o in others:
            o.engine.run = Run(o)
            homes.append(module.Prefill(o.engine, carriers(module)))
            homes[-1].carrier.p, homes[-1].carrier.rnd, o.manager = p_bad, self.mishap, o.scheduler.manager
        self.engine = module.Split(self.engine, homes)
        self.manager = self.scheduler.manager
        return self

    def step(self):
        for o in self.others:
            if self.mishap.random() < .02:
                o.trouble = self.mishap.choice(["before", "after"])
            if self.mishap.random() < .02:
                o.lose_rows()
        return super().step()

    def check(self):
        super().check()
        s, e = self.scheduler, self.engine
        for o in self.others:
            o.check()
            assert set(o.manager.kept) <= set(e.homes), "blocks that nobody will ask for"
        assert set(e.homes) == set(s.expected) | set(self.manager.parcels) and set(e.parcels) <= set(s.expected)
        assert all(id in s.waiting for id in self.manager.parcels)

    def check_done(self):
        for r in self.requests:  # whoever was blamed for a step that raised, there or here
            r.error = Trouble() if "computed: Trouble()" in str(r.error) else r.error
        super().check_done()
        for o in self.others:
            assert not (len(o.scheduler) or o.manager.kept or o.manager.tables or o.engine.run.world is not o)
            assert o.manager.pool.n_free == o.manager.pool.n_blocks - 1
        e = self.engine
        assert not (e.homes or e.parcels or e.asked or +e.load or self.manager.parcels)
        assert not any(p.numbers for p in e.prefills)
        return self


class RealPrompts(Prompts, Real):
    pass


class RealAnswers(Answers, Real):
    pass


def split_game(rnd, module=transfer, p_bad=0., prompts=Prompts, answers=Answers, vocab=None, params=dict, **mishaps):
    "One random game -> how often what happened"
    real = dict(n_blocks=1 + cdiv(rnd.randint(8, 48), 3), block_size=3) if vocab else {}
    others = [random_world(rnd, prompts, n_blocks=rnd.randint(8, 16), max_model_len=1000, policy=rnd.choice([fcfs, priority]))
              for _ in range(rnd.choice([1, 1, 2]))]  # where all answers have one token, only the urgent preempt
    world = random_world(rnd, answers, **real)
    world.mishap = Random(rnd.random())
    world.join(others, module, p_bad)
    longest = min(p.limit for p in world.engine.prefills) - 1
    arrivals = random_arrivals(rnd, world, **dict(vocab=vocab, eos_ids=EOS) if vocab else {})
    arrivals = [a | dict(prompt=a["prompt"][:longest], priority=rnd.randrange(3)) | params() for a in arrivals]
    total = play(world, rnd, arrivals, **mishaps).counts() + Counter(world.manager.counts)
    return total + Counter({f"{name} there": n for o in others for name, n in o.counts().items()})


def sweep(n, seed, **kw):
    rnd, total = Random(seed), Counter()
    for _ in range(n):
        total += split_game(rnd, **kw)
    return total


MISHAPS = dict(p_abort=.04, p_lose=.05, p_fail=.03)


def test_a_pair_of_engines_says_what_the_oracle_says():
    total = sweep(150, 1, p_bad=.2, **MISHAPS) + sweep(50, 2)
    print(total)
    assert total["parcels"] > 300 and total["spared"] > 200 and total["lost"] > 30 and total["abort"] > 25
    assert total["preempt"] > 15 and total["preempt there"] > 4 and total["share there"] > 60 and total["evict"] > 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_pair_of_real_engines_says_what_the_model_says(dtype):
    model, rnd = model_of(dtype, 2, 16), Random(3)
    kinds = dict(prompts=partial(RealPrompts, model), answers=partial(RealAnswers, model))
    total = sweep(9, str(dtype), vocab=range(64), params=lambda: random_params(rnd), p_bad=.1, **kinds, **MISHAPS)
    assert total["parcels"] > 15 and total["spared"] > 5


# ---- what may be asked

ASKED = dict(
    chance=dict(temperature=.9, seed=3), several=dict(temperature=1.2, seed=4, n=3), one=dict(max_tokens=1),
    penalties=dict(repetition_penalty=1.3, presence_penalty=.5, frequency_penalty=.2),
    how_likely=dict(logprobs=3, prompt_logprobs=2), stop=dict(stop=["a", "e", "M"]), ids=dict(stop_token_ids=list(range(60))),
    least=dict(min_tokens=3, stop_token_ids=list(range(128))), words=dict(bad_words=["a", "th"]),
    form=dict(structured_outputs=StructuredOutputsParams(regex="(ab|cd)+e")), alone=dict(skip_reading_prefix_cache=True))
PROMPTS = ["the one prompt that begins", "the one prompt that began", "another"]


@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])
def test_whatever_is_asked(compiled):
    "Also of the text: the answer, its log-probabilities and why it ended are those of one engine"
    if compiled:
        pytest.importorskip("numba")
    else:
        pytest.importorskip("llguidance")
    make = partial(tiny, enforce_eager=not compiled)
    plain, pair = make(), transfer.split(make(), transfer.Prefill(make().engine))
    assert type(plain.engine.run).__name__ == ("CpuRunner" if compiled else "Runner")
    for name, params in ASKED.items():
        p = SamplingParams(**dict(temperature=0, max_tokens=9) | params)
        want, got = (llm.generate(PROMPTS, p, use_tqdm=False) for llm in (plain, pair))
        for a, b in zip(want, got):
            assert (a.outputs, a.prompt_logprobs) == (b.outputs, b.prompt_logprobs), name
    assert pair.engine.manager.counts["parcels"] > 2*len(ASKED) and not pair.engine.homes
    want, got = (llm.embed(PROMPTS, use_tqdm=False)[0].outputs.embedding for llm in (plain, pair))
    assert got == pytest.approx(want, abs=1e-5)  # computed where it is asked


def test_caches_of_several_kinds():
    "What the readable runner wrote, in 16 or 8 bits as well, the compiled step reads, and the other way"
    pytest.importorskip("numba")
    p = SamplingParams(temperature=0, max_tokens=6)
    for kind in "float32", "bfloat16", "int8":
        make = partial(tiny, kv_cache_dtype=kind)
        want = [o.outputs[0].token_ids for o in make().generate(PROMPTS, p, use_tqdm=False)]
        for here, there in ((dict(), dict(attention_backend="torch")), (dict(attention_backend="torch"), dict(block_size=7))):
            llm = transfer.split(make(**here), transfer.Prefill(make(**there).engine))
            got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, p, use_tqdm=False)]
            assert llm.engine.manager.counts["parcels"] == 3
            assert kind != "float32" or got == want, "float32 rounds nowhere that a tiny model would feel"


def test_only_what_is_missing_travels():
    llm = transfer.split(tiny(), transfer.Prefill(tiny().engine))
    p, row = SamplingParams(temperature=0, max_tokens=4), 2*2*2*16*4
    for prompt, tokens in (list(range(10)), 10), (list(range(10)), 2), ([*range(8), 99], 1), (list(range(8)), 0), ([5]*3, 3):
        before = Counter(llm.engine.manager.counts)
        llm.generate([prompt], p, use_tqdm=False)
        assert llm.engine.manager.counts - before == +Counter(
            parcels=1, tokens=tokens, bytes=tokens*row, spared=len(prompt) - tokens)


def test_salts_hold_there_too():
    llm, p = transfer.split(tiny(), transfer.Prefill(tiny().engine)), SamplingParams(temperature=0, max_tokens=2)
    found = [llm.generate([dict(prompt_token_ids=[5]*12, cache_salt=salt)], p, use_tqdm=False)[0].num_cached_tokens for salt in "aaba"]
    assert found == [0, 8, 0, 8]  # where the prompt is computed


# ---- what does not fit is refused in words

def runner(dtype=torch.float32, seed=1, **changes):
    return Runner(tiny_model(tiny_config(**changes), seed, dtype), load_backend("torch"), 4, 4, 2, 16)


@pytest.mark.parametrize("changes,said", [
    (dict(n_layers=1), "n_layers=1 where prompts are computed, but 2 where answers"), (dict(rope_theta=5.), "rope_theta=5.0"),
    (dict(seed=2), "vectors="), (dict(dtype=torch.float64), "float64 where prompts are computed, but torch.float32")], ids=str)
def test_two_models_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        transfer.agree(transfer.facts(runner(**changes)), transfer.facts(runner()))


def test_refusals():
    with pytest.raises(ValueError, match="kv_cache_dtype=torch.int8 where"):
        transfer.split(tiny(), transfer.Prefill(tiny(kv_cache_dtype="int8").engine))
    with pytest.raises(ValueError, match="largest of 4 tokens"):
        transfer.facts(runner(windows=(4,)))
    with pytest.raises(ValueError, match="a function cannot be read from outside"):
        transfer.facts(lambda plan: [])
    spread = runner()
    spread.cache.k, spread.cache.v = (x[..., :1, :].contiguous() for x in (spread.cache.k, spread.cache.v))
    with pytest.raises(ValueError, match=r"\(2, 1\) layers and heads of \(2, 2\)"):
        transfer.facts(spread)
    busy = tiny()
    busy.add(["abc"])
    with pytest.raises(ValueError, match="1 requests are under way"):
        transfer.Prefill(busy.engine)
    with pytest.raises(ValueError, match="carrier='pigeon', but there is only shared, gloo, nccl"):
        transfer.Remote(tiny, carrier="pigeon")
    llm = transfer.split(tiny(), transfer.Prefill(tiny(num_gpu_blocks_override=5).engine))
    with pytest.raises(ValueError, match="has 16 tokens, but the engine that computes prompts takes at most 15"):
        llm.generate([[1]*16])
    assert not len(llm.engine.scheduler) and not llm.engine.homes
    llm.generate([[1]*15], use_tqdm=False)


def test_a_prompt_that_raises_ends_with_its_error_and_alone():
    llm, home = tiny(), transfer.Prefill(tiny().engine)
    run, home.engine.run = home.engine.run, lambda plan: run(plan) if all(len(a.ids) != 5 for a in plan.admitted) else 1/0
    transfer.split(llm, home)
    answers = llm.add([[1]*5, [2]*3, [3]*7], SamplingParams(temperature=0, max_tokens=3))
    for _ in range(40):
        try:
            llm.texts.step()
        except ZeroDivisionError:
            pass
    assert [a.lead.finish_reason for a in answers] == ["error", "length", "length"]
    assert "ZeroDivisionError" in str(answers[0].lead.error)
    assert not (llm.engine.homes or home.manager.kept or len(home.engine.scheduler))


def test_reset_and_close_forget_everything_there():
    llm, home = tiny(), transfer.Prefill(tiny().engine)
    transfer.split(llm, home)
    for end in llm.engine.reset, llm.engine.close:
        answers = llm.add(["abcde"*5, "abc", "abc"], SamplingParams(temperature=0, max_tokens=3))
        llm.texts.step()
        llm.abort(answers[2].id)
        end()
        assert not (llm.engine.homes or home.manager.kept or len(home.engine.scheduler))
        for a in answers:
            llm.texts.forget(a)
    assert llm.engine.prefills == []
    assert llm.generate(["abc"], use_tqdm=False)[0].finished  # by itself


# ---- other processes

def asks(e, names="abcdefgh"):
    return [e.add(Request(name, [7*j % 60 for j in range(10)] + [i*j % 60 for j in range(2*i)],
                          SamplingParams(temperature=i % 2*.8, max_tokens=9, seed=i, logprobs=i % 3 or None)))
            for i, name in enumerate(names)]


@pytest.fixture(scope="module")
def expected():
    alone = real_engine()
    requests = asks(alone)
    list(alone.drain())
    return [(r.output, r.scores) for r in requests]


def until(pair, done):
    "Steps, until something is so"
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "for a minute"
        pair.step()


@pytest.mark.parametrize("carrier", ["shared", "gloo"])
def test_in_another_process(carrier, expected, caplog):
    home = transfer.Remote(real_engine, carrier=carrier)
    pair = transfer.Split(real_engine(block_size=4), [home])
    try:
        requests = asks(pair)
        list(pair.drain())
        assert [(r.output, r.scores) for r in requests] == expected
        counts = pair.manager.counts
        assert counts["parcels"] == 8 and counts["spared"] >= 48 and not counts["lost"] and not pair.homes

        requests = asks(pair)               # taken back, and the same ids again at once, for something else
        pair.step()
        for r in requests[::2]:
            pair.abort(r.id)
        again = asks(pair, "".join(r.id for r in requests[::2]))
        list(pair.drain())
        assert [r.output for r in again] == [ids for ids, _ in expected[:4]]
        assert [r.output for r in requests[1::2]] == [ids for ids, _ in expected[1::2]]

        pair.reset()                        # nothing is here: all would have to be sent
        if carrier == "shared":             # memory that does not hold what was said of it
            old = home.carrier.memory
            home.carrier.memory = old + 1
        requests = asks(pair)
        until(pair, lambda: any(r.finish_reason for r in requests))
        home.carrier.memory = old if carrier == "shared" else home.carrier.memory
        asks(pair, "xyz")
        os.kill(home.process.pid, signal.SIGKILL)
        list(pair.drain())
        assert [(r.output, r.scores) for r in requests] == expected
        assert pair.prefills == [] and not (pair.homes or pair.parcels) and not home.process.is_alive()
        assert counts["lost"] > 0 or carrier == "gloo"
        pair.manager.check()
        assert pair.manager.pool.n_free == 59
    finally:
        pair.close()


def test_a_process_that_cannot_begin_says_why():
    with pytest.raises(transfer.Gone, match="invalid literal for int"):
        transfer.Remote(int, "an engine")


# ---- would all this notice a mistake?

MUTANTS = {  # what is wrong: (a piece of the source, what to put there)
    "blocks are freed before they are sent": (
        "        self.kept[request.id] = self.tables.pop(request.id)\n        del self._n_named[request.id]",
        "        super().release(request)\n        self.kept[request.id] = []"),
    "who is preempted keeps its blocks": ("if len(request.tokens) == request.n_prompt: return super().release(request)", "pass"),
    "what was sent is never freed": ("self.pool.give_back(blocks, id)", "pass"),
    "a token too few counts as cached": ("        return parcel.said.n\n", "        return parcel.said.n - 1\n"),
    "counted, but not written": ("self.cache.lay(slots_of(", "(slots_of("),
    "written from the first token on": ("self.tables[request.id], n, len(stored)", "self.tables[request.id], 0, len(stored)"),
    "named before it is full": ("self.name_full(request, parcel.said.n)", "self.name_full(request, parcel.said.n + self.block_size)"),
    "what was lost counts as cached": ("            return n\n        finally", "            return parcel.said.n\n        finally"),
    "the sender is not told": ("finally: parcel.done()", "finally: pass"),
    "no checksum is compared": ("if a != b: raise Lost", "if False: raise Lost"),
    "the answer to an older question": ("r is None or r.number != said.number", "r is None"),
    "who is taken back is not forgotten there": ("    def abort(self, id):\n        self._forget(id)", "    def abort(self, id):\n        pass"),
    "blocks of another size": ("said.n - first, self.block_size)", "said.n - first, self.block_size + 1)"),
}


def notices(module):
    try:
        sweep(40, 4, module=module, p_bad=.2, p_abort=.05, p_lose=.02)
        again = Answers(n_blocks=20)
        again.mishap = SimpleNamespace(random=lambda: 1.)
        again.join([Prompts(n_blocks=20, max_num_batched_tokens=4, max_num_seqs=1)], module)
        again.add([1]*9, "r", max_tokens=3)
        slow, again.engine.prefills[0].poll = again.engine.prefills[0].poll, lambda: []
        while not (told := slow()):
            pass
        again.engine.abort("r")
        again.add([2]*9, "r", max_tokens=3)
        again.engine.prefills[0].poll = lambda: [told.pop()] if told else slow()
        again.drain().check_done()
    except (AssertionError, KeyError, RuntimeError, ValueError, IndexError):
        return True
    return False


def test_what_is_right_passes():
    assert not notices(transfer)


@pytest.mark.parametrize("bug", MUTANTS)
def test_mutant_is_caught(bug, tmp_path):
    assert notices(mutant(transfer, *MUTANTS[bug], tmp_path/"planted.py"))
