"Recorded steps and steps ahead: whole engines whose decodes are replayed give the naive answer"
from collections import Counter
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from common import play, random_arrivals, random_policy, random_world
from test_oracle import EOS, Real, model_of, random_params

from pagedlm import graphs
from pagedlm.core import SamplingParams, cdiv
from pagedlm.graphs import NOBODY, FixedBackend, GraphRunner, graph_sizes, make_runner, tape
from pagedlm.model import tiny_config, tiny_model
from pagedlm.paged import TorchBackend
from pagedlm.request import Admit, Plan, Work
from pagedlm.runner import Direct, Pinned, Runner, largest_plan, pack, unpack

N_ENGINES = 30


pytestmark = pytest.mark.usefixtures("one_thread")


class Late(Direct):
    "A way to a device whose answers are not there before somebody waits for them, and only once"
    def receive(self, ids, then):
        ids = [ids.clone()]
        return lambda: then(ids.pop().tolist())


class Event:
    "Counts who waits for it"
    def __init__(self): self.n_waits = 0
    def record(self): pass
    def synchronize(self): self.n_waits += 1


def pinned(**kw): return Pinned("cpu", pin=False, new_event=Event, **kw)


class Counting(GraphRunner):
    "Notes how its steps went: a number of rows, or None for the plain way"
    def run(self, works):
        self.how = getattr(self, "how", [])
        self.how.append(self.size(works))
        return super().run(works)


class Replayed(Real):
    "A `World` whose decodes come from a tape"
    def __init__(self, model, backend=None, sizes=None, wire=Direct, kind=Counting, **shape):
        self.fixed, self.sizes, self.wire, self.kind = backend or FixedBackend(), sizes, wire, kind
        super().__init__(model, **shape)

    def runner_of(self, scheduler):
        pool, block_size = self.manager.pool, self.manager.block_size
        runner = self.kind(self.model, self.fixed, pool.n_blocks, block_size, scheduler.max_num_seqs, scheduler.limit,
                           sizes=self.sizes, record=tape, wire=self.wire())
        runner.cache.fill(float("nan"))
        runner.static[:] = -2**31  # what a step does not send is nothing to read
        return runner


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=lambda x: str(x).removeprefix("torch."))
def test_replayed_engines_equal_naive(dtype):
    model, rnd, total = model_of(dtype, 2, 16), Random(f"{dtype}"), Counter()
    for i in range(N_ENGINES):
        block_size = rnd.randint(1, 6)
        shape = dict(block_size=block_size, n_blocks=1 + cdiv(rnd.randint(8, 32), block_size), ahead=rnd.choice([0, 1, 1, 2]),
                     sizes=rnd.choice([None, [1, 2, 3, 4, 5, 6], [8], [2, 5], [1]]), wire=rnd.choice([Direct, Late, pinned]))
        policy = dict(policy=random_policy(rnd)) if i % 2 else {}
        world = random_world(rnd, kind=partial(Replayed, model), **shape, **policy)
        arrivals = random_arrivals(rnd, world, vocab=range(64), eos_ids=EOS)
        mishaps = dict(p_abort=.02, p_lose=.05, p_fail=.03) if i % 3 else {}
        total += play(world, rnd, [a | random_params(rnd) for a in arrivals], **mishaps).counts()
        steps = getattr(world.runner, "how", [])
        total.update(plain=steps.count(None), replayed=len(steps) - steps.count(None))
    print(dict(total))
    assert total["preempt"] >= 10 and total["share"] >= 10 and total["replayed"] > 300 < total["plain"]


def serve(**kw):
    "Three requests in one engine, all decoding together for a while; the world, checked"
    world = Replayed(model_of(torch.float32, 2, 16), n_blocks=30, max_num_seqs=4, **kw)
    for i, n in enumerate([5, 9, 2]):
        world.add(range(i + 1, i + 1 + n), max_tokens=12, seed=i, temperature=.7*(i % 2))
    return world.drain().check_done()


def test_rows_of_nobody_leave_no_trace():
    world = serve(sizes=[4], block_size=2)
    assert world.runner.how.count(4) > 8
    k = world.runner.cache.k[:, :, :, 0, 0]
    used = {b for plan in world.plans for w in plan.works for b in w.new_blocks}
    used |= {b for plan in world.plans for a in plan.admitted for b in a.blocks}
    others = [b for b in range(1, 30) if b not in used]
    assert others and k[:, others].isnan().all() and k[:, 0, 1:].isnan().all() and not k[:, 0, 0].isnan().any()


class OldLengths(FixedBackend):
    def plan(self, specs, cache, q_lens, kv_lens, n_rows=None, max_len=None):
        self.lens = torch.tensor(kv_lens)
        return {}

    def attend(self, spec, layer, q, cache, meta):
        return super().attend(spec, layer, q, cache, meta._replace(seq_lens=self.lens))


class Unmasked(FixedBackend):
    def attend(self, spec, layer, q, cache, meta):
        lens = torch.full_like(meta.seq_lens, meta.block_tables.shape[1]*cache.block_size)
        return super().attend(spec, layer, q, cache, meta._replace(seq_lens=lens))


class Shifted(Counting):
    def forward(self, batch): return super().forward(batch).roll(1, 0)


class NothingNew(Counting):
    def forward(self, batch): return super().forward(batch._replace(ids=batch.ids.clamp(min=0)))


class Swapped(Counting):
    def sample(self, logits, batch, works):
        out = super().sample(logits, batch, works)
        self.last[batch.rows] = self.last[batch.rows.flip(0)]
        return out


class HostKnows(Counting):
    def arrays(self, works, n_rows=None):
        last = self.rows.last.copy()
        out = super().arrays(works, n_rows)
        self.rows.last[:] = last  # ids of the admission, for ever
        return out


class EveryPlan(Counting):
    "Chunks too"
    def size(self, works): return next((n for n in self.sizes if n >= len(works)), None)


@pytest.mark.parametrize("bug", [
    dict(backend=OldLengths()), dict(backend=Unmasked()), dict(kind=Shifted), dict(kind=NothingNew), dict(kind=Swapped),
    dict(kind=HostKnows), dict(kind=EveryPlan)],
    ids=lambda bug: next(x.__name__ if isinstance(x, type) else type(x).__name__ for x in bug.values()))
def test_bugs_are_caught(bug):
    serve(sizes=[1, 2, 4])
    with pytest.raises((AssertionError, ValueError, RuntimeError, IndexError)):
        serve(sizes=[1, 2, 4], **bug)


def test_nobody_must_not_sit_in_a_real_row(monkeypatch):
    serve(sizes=[4])
    monkeypatch.setattr(graphs, "NOBODY", NOBODY._replace(row=0))
    with pytest.raises(AssertionError):
        serve(sizes=[4])


def test_sizes():
    for n in range(1, 70):
        sizes = graph_sizes(n)
        assert sizes == sorted(set(sizes)) and sizes[-1] == n and sizes[0] == 1
        assert all(min(s for s in sizes if s >= rows) - rows < 8 for rows in range(1, n + 1))


def test_who_gets_recordings():
    model = tiny_model()
    for backend in TorchBackend(), FixedBackend():
        for asked in {}, dict(enforce_eager=True):
            assert type(make_runner(model, backend, 9, 4, 3, 32, **asked)) is Runner
    with pytest.raises(ValueError, match="TorchBackend has no method plan"):
        GraphRunner(model, TorchBackend(), 9, 4, 3, 32, record=tape)


def test_a_host_that_asks_is_refused():
    class Asks(FixedBackend):
        def attend(self, spec, layer, q, cache, meta):
            return super().attend(spec, layer, q[:int(meta.q_starts[-1])], cache, meta)
    with pytest.raises(RuntimeError, match="asks for a number"):
        GraphRunner(tiny_model(), Asks(), 9, 4, 3, 32, record=tape)


# ---- the way to the device

def test_buffers_are_not_written_while_they_leave():
    for n in 1, 2, 3:
        wire, events, places = pinned(n_buffers=n), [], []
        for i in range(8):
            buffer = wire.room(10 + i)
            if i >= n:
                assert events[i - n].n_waits == 1, "written to while its last copy was under way"
            assert not any(e.n_waits for e in events[max(0, i - n + 1):]), "waited for a copy that nobody is in the way of"
            buffer[:] = i
            assert wire.send(buffer).tolist() == [i]*(10 + i)
            events.append(wire.sent[wire.turn])
            places.append(buffer.ctypes.data)
        assert len(set(places[-n:])) == n


def test_what_is_sent_to_static_memory_lies_where_it_did():
    "A recording has addresses in it: the arrays of n rows must lie at the same ones, whoever is in them"
    model = model_of(torch.float32, 2, 16)
    runner = GraphRunner(model, FixedBackend(), 9, 4, 4, 32, sizes=[4], record=tape)
    places = set()
    for R in 1, 2, 4:
        works = [Work(i, 3, 1, None, (), True) for i in range(R)]
        runner.rows.learn(Plan([Admit(i, (7, 8, 9, 10), 4, SamplingParams(), i, (1 + i,)) for i in range(R)], works, []))
        with torch.inference_mode():
            batch = runner.batch(*runner.arrays(works + [NOBODY]*(4 - R), 4), runner.static)
        tensors = batch.ids, batch.row, *batch.meta[:5]
        places.add(tuple((x.data_ptr(), tuple(x.shape), x.stride()) for x in tensors))
        assert all(x.data_ptr() % 16 == 0 for x in (*tensors, batch.rows, batch.last, *batch.how))
    assert len(places) == 1


def test_packing_is_exact():
    rnd = Random(5)
    for _ in range(50):
        arrays = {}
        for i in range(rnd.randint(1, 9)):
            shape = [rnd.randint(0, 5) for _ in range(rnd.randint(1, 3))]
            kind = rnd.choice([np.int32, np.int64, np.float32])
            arrays[i] = np.random.default_rng(i).integers(-2**31, 2**31, shape).astype(kind)
        views = unpack(torch.from_numpy(pack(arrays, lambda n: np.full(n + 3, 9, np.int32)[:n])), arrays)
        assert all((views[i].numpy() == x).all() and views[i].numpy().dtype == x.dtype for i, x in arrays.items())


def test_seeds_and_parameters_arrive_as_they_are():
    runner = Runner(model_of(torch.float32, 2, 16), TorchBackend(), 9, 4, 3, 32)
    seeds = -2**63, 2**63 - 1, 2**64 - 1
    works = [Work(i, 0, 1, (5,), (), True) for i in range(3)]
    how = [SamplingParams(temperature=.5*i, top_k=i - 1, top_p=1 - .1*i, min_p=.01*i) for i in range(3)]
    runner.rows.learn(Plan([Admit(i, (5,), 1, how[i], seeds[i], (1 + i,)) for i in range(3)], works, []))
    t, k, p, m, seed, position = (x.tolist() for x in runner.batch(*runner.arrays(works)).how)
    assert (k, position, [s % 2**64 for s in seed]) == ([-1, 0, 1], [1]*3, [s % 2**64 for s in seeds])
    for got, name in (t, "temperature"), (p, "top_p"), (m, "min_p"):
        assert got == pytest.approx([getattr(h, name) for h in how])


@pytest.mark.parametrize("budget,rows,max_len", [(8, 8, 50), (50, 4, 40), (512, 3, 100), (7, 1, 5), (2048, 256, 8192)])
def test_the_largest_step_is_as_large_as_any(budget, rows, max_len):
    plan, n_blocks = largest_plan(budget, rows, max_len, 16)
    assert plan.n_tokens == min(budget, rows*max_len) and len(plan.works) == rows and all(w.sample for w in plan.works)
    assert max(max(a.blocks) for a in plan.admitted) < n_blocks
    if budget < 1000:
        assert len(Runner(model_of(torch.float32, 2, 16), TorchBackend(), n_blocks, 16, rows, max_len)(plan).ids) == rows


# ---- the kernels of a GPU, in Triton's interpreter

@torch.inference_mode()
def test_triton_in_recordings_of_fixed_shape():
    "What is replayed on a GPU is called again here, on the same static memory, with tiles and sampler of the GPU"
    kernels, fused = pytest.importorskip("pagedlm.kernels"), pytest.importorskip("pagedlm.fused")
    if not kernels.INTERPRETED:
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")
    model = tiny_model(tiny_config(n_layers=1, vocab_size=64), seed=3)

    class Triton(Replayed):
        def runner_of(self, scheduler):
            runner = Counting(self.model, kernels.TritonBackend(), 9, 4, 2, scheduler.limit, sizes=[2], record=lambda f: f,
                              sample=fused.sample, wire=Late())
            runner.cache.fill(float("nan"))
            return runner
    world = Triton(model, n_blocks=9, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, ahead=1)
    world.add(range(3), max_tokens=5)
    world.add(range(9, 16), max_tokens=3, temperature=.8, top_p=.9, seed=11)
    world.drain().check_done()
    assert world.runner.how.count(2) >= 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ahead", [0, 1])
def test_cuda_graphs_equal_naive(ahead):
    model = model_of(torch.float64, 2, 16)
    gpu = tiny_model(model.config, seed=32, dtype=torch.float64, device="cuda")
    gpu.load_state_dict(model.state_dict())

    class Cuda(Replayed):
        def runner_of(self, scheduler):
            runner = Counting(gpu, FixedBackend(), 30, 4, 4, scheduler.limit)  # `CudaGraphs`, `Pinned`
            runner.cache.fill(float("nan"))
            return runner
    world = Cuda(model, n_blocks=30, max_num_seqs=4, ahead=ahead)
    for i, n in enumerate([5, 9, 2, 7, 7]):
        world.add(range(i + 1, i + 1 + n), max_tokens=12, seed=i, temperature=.7*(i % 2), top_p=.9)
    world.drain().check_done()
    assert len(world.runner.how) - world.runner.how.count(None) > 8
