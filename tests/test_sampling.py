"""Logits processors and log-probabilities against transformers' own, on random inputs; chances against counts"""
from random import Random

import numpy as np
import pytest
import torch

from pagedlm.choose import Chooser, Wish, request_processors, wishes
from pagedlm.core import SamplingParams
from pagedlm.request import Admit, Plan, Told, Work
from pagedlm.sampling import allow, ban, bits_of, filter_logits, logprobs, penalise, process, sample, score

hf = pytest.importorskip("transformers.generation.logits_process")
pytestmark = pytest.mark.usefixtures("one_thread")
V = 97


def rows(seed, R=4, spread=4, dtype=torch.float32):
    return (spread*torch.randn(R, V, generator=torch.Generator().manual_seed(seed))).to(dtype)


def same(ours, theirs, atol=1e-4):
    "The same tokens are left, with the same chances"
    assert torch.equal(ours > -torch.inf, theirs > -torch.inf)
    assert torch.allclose(ours.softmax(-1), theirs.softmax(-1), atol=atol)


def book(x, said, n_prompt=0, stops=(), words=None, **params):
    p = SamplingParams(**params)
    p.bad_word_ids = words
    return torch.stack([process(row, list(ids), n_prompt, p, stops) for row, ids in zip(x, said)])


# ---- against transformers

@pytest.mark.parametrize("seed", range(5))
def test_top_k(seed):
    for k in 1, 2, 20, V - 1, V, V + 5:
        same(filter_logits(rows(seed), [1.]*4, [k]*4, [1.]*4, [0.]*4), hf.TopKLogitsWarper(k)(None, rows(seed)))


@pytest.mark.parametrize("seed", range(5))
def test_top_p(seed):
    for p in .999, .9, .5, .1, 1e-6:
        same(filter_logits(rows(seed), [1.]*4, [0]*4, [p]*4, [0.]*4), hf.TopPLogitsWarper(p)(None, rows(seed)))


@pytest.mark.parametrize("seed", range(5))
def test_min_p(seed):
    for p in 1., .5, .1, .001:
        same(filter_logits(rows(seed), [1.]*4, [0]*4, [1.]*4, [p]*4), hf.MinPLogitsWarper(p)(None, rows(seed)))


@pytest.mark.parametrize("seed", range(10))
def test_all_filters_in_order(seed):
    "Each on what the ones before left. transformers' usual order is temperature, top_k, top_p, min_p; ours has min_p first, as vLLM"
    rnd, x = Random(seed), rows(seed)
    t, k, p, m = rnd.choice([.3, .7, 1.5]), rnd.choice([3, 20, 50]), rnd.choice([.5, .9, .99]), rnd.choice([.01, .1])
    want = hf.TemperatureLogitsWarper(t)(None, x)
    for warp in hf.MinPLogitsWarper(m), hf.TopKLogitsWarper(k), hf.TopPLogitsWarper(p):
        want = warp(None, want)
    same(filter_logits(x, [t]*4, [k]*4, [p]*4, [m]*4), want)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [.5, .9, 1.1, 2.0])
def test_repetition_penalty(seed, penalty):
    "Prompt and output count"
    rnd, x = Random(seed), rows(seed)
    said = torch.tensor([[rnd.randrange(V) for _ in range(12)] for _ in range(4)])
    want = hf.RepetitionPenaltyLogitsProcessor(penalty)(said, x.clone())
    one, none = torch.full((4,), penalty), torch.zeros(4)
    for n_prompt in 0, 5, 12:
        assert torch.allclose(penalise(x, said, torch.full((4,), 12), torch.full((4,), n_prompt), one, none, none), want)
        assert torch.allclose(book(x, said.tolist(), n_prompt, repetition_penalty=penalty), want)


def test_presence_and_frequency_count_the_output_alone():
    "Case 22: prompt a a a, output a b b"
    x, said = torch.zeros(1, V) + 5, [[3, 3, 3, 3, 4, 4]]
    counts = dict(presence_penalty=(1.0, 1.0), frequency_penalty=(1.0, 2.0), repetition_penalty=(5 - 5/1.5, 5 - 5/1.5))
    for name, (a, b) in counts.items():
        out = book(x, said, 3, **{name: 1.5 if "repetition" in name else 1.0})
        assert out[0, 3] == pytest.approx(5 - a) and out[0, 4] == pytest.approx(5 - b) and (out[0, 5:] == 5).all()
    for value, want in (2., 2/1.5), (-2., -2*1.5), (0., 0.):  # divides what is positive, multiplies what is negative
        assert book(torch.full((1, V), value), [[3]], 1, repetition_penalty=1.5)[0, 3] == pytest.approx(want)


@pytest.mark.parametrize("seed", range(5))
def test_bias(seed):
    rnd, x = Random(seed), rows(seed)
    bias = {rnd.randrange(1, V): rnd.uniform(-9, 9) for _ in range(5)}
    want = hf.SequenceBiasLogitsProcessor([[[i], b] for i, b in bias.items()])(torch.zeros(4, 3, dtype=torch.long), x.clone())
    assert torch.allclose(book(x, [[0]*3]*4, logit_bias=bias), want)


@pytest.mark.parametrize("seed", range(8))
def test_bad_words(seed):
    rnd, x = Random(seed), rows(seed)
    said = torch.tensor([[rnd.randrange(4) for _ in range(9)] for _ in range(4)])
    words = [[rnd.randrange(4) for _ in range(rnd.randint(1, 3))] + [rnd.randrange(V)] for _ in range(9)] + [[5]]
    want = hf.NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([-1]))(said, x.clone())
    same(book(x, said.tolist(), words=words, bad_words=["…"]), want)


def test_min_tokens():
    x, said = rows(0), torch.zeros(4, 7, dtype=torch.long)
    for at_least in 1, 4, 5, 9:
        theirs = hf.MinNewTokensLengthLogitsProcessor(3, at_least, torch.tensor([7, 9]))(said, x.clone())
        assert torch.equal(book(x, said.tolist(), 3, stops=[7, 9], min_tokens=at_least), theirs)


def test_allowed_ids():
    x, ids = rows(0), [5, 90, 5, 33]
    want = hf.PrefixConstrainedLogitsProcessor(lambda batch, said: sorted({*ids}), 1)(torch.zeros(4, 1, dtype=torch.long), x.clone())
    assert torch.equal(book(x, [[0]]*4, allowed_token_ids=ids), want)
    assert torch.equal(allow(x, torch.from_numpy(np.stack([bits_of(ids, V)]*4))), want)


@pytest.mark.parametrize("dtype,eps", [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 1e-6)])
def test_logprobs(dtype, eps):
    x = rows(3, dtype=dtype)
    want = torch.log_softmax(x if dtype == torch.float64 else x.float(), -1)
    assert torch.allclose(logprobs(x), want, atol=eps)
    p, rank, top_ids, top = score(x, torch.tensor([0, 50, 96, 7]), 5)
    for i, id in enumerate([0, 50, 96, 7]):
        assert float(p[i]) == pytest.approx(float(want[i, id]), abs=eps) and int(rank[i]) == int((x[i] >= x[i, id]).sum())
    assert torch.allclose(top, want.topk(5).values, atol=eps) and torch.allclose(want.gather(1, top_ids), top, atol=eps)


# ---- chances

def chi2(counts, p): return float(((counts - counts.sum()*p)**2/(counts.sum()*p)).sum())


@pytest.mark.parametrize("how", [dict(), dict(temperature=.6), dict(top_k=6), dict(top_p=.8), dict(min_p=.2),
                                 dict(temperature=1.4, top_k=9, top_p=.95, min_p=.05),
                                 dict(repetition_penalty=1.4, presence_penalty=.4, logit_bias={2: 1.0}, allowed_token_ids=[*range(0, 13)]),
                                 dict(frequency_penalty=.7, top_p=.9)], ids=str)
def test_what_is_drawn_is_what_is_left(how):
    "Twenty thousand draws by the chooser, counted: the statistic is beyond its 99.99 % quantile for no kind of wish"
    N, p, said = 20_000, SamplingParams(**how), [1, 1, 2, 3, 3]
    x = torch.linspace(2, -2, 16)[None]
    chooser, ids = Chooser(64, 16, 10), []
    chooser.learn(Plan([Admit(i, tuple(said), 2, p, i, (1,)) for i in range(50)], [], []))
    works = [Work(i, 4, 1, None, (), True) for i in range(50)]
    for j in range(N//50):
        args = [p.temperature]*50, [p.top_k]*50, [p.top_p]*50, [p.min_p]*50, [1000*j + i for i in range(50)], [5]*50
        ids += chooser(x.expand(50, -1), works, torch.arange(50), args)[0].tolist()
    left = filter_logits(process(x[0], said, 2, p)[None], [p.temperature], [p.top_k], [p.top_p], [p.min_p])[0].softmax(-1).double().numpy()
    counts = np.bincount(ids, minlength=16)
    assert counts[left == 0].sum() == 0
    n, kept = int((left > 0).sum()) - 1, left > 0
    assert chi2(counts[kept], left[kept]) < n + 3.72*(2*n)**.5 + 9.2  # above the 99.99 % quantile for every n up to 15


# ---- what is asked is found, and nothing else

def test_only_who_asks_has_a_wish():
    assert not wishes(SamplingParams(temperature=.3, top_p=.9, top_k=5, min_p=.1, seed=4, stop="x", stop_token_ids=[3], n=2,
                                     ignore_eos=True, skip_special_tokens=False, skip_reading_prefix_cache=True))
    for ask in (dict(repetition_penalty=1.1), dict(presence_penalty=.1), dict(frequency_penalty=.1), dict(logit_bias={1: 1}), dict(min_tokens=1),
                dict(allowed_token_ids=[1]), dict(bad_words=["x"]), dict(logprobs=0), dict(prompt_logprobs=0)):
        assert wishes(SamplingParams(**ask)), ask


def test_nobody_asks_nothing_happens():
    "The logits reach the sampler as they are: the very same tensor"
    seen, x = [], rows(0)
    chooser = Chooser(4, V, 20, sample=lambda logits, *how: (seen.append(logits), torch.zeros(4, dtype=torch.long))[1])
    chooser.learn(Plan([Admit(i, (1,), 1, SamplingParams(top_p=.5, stop_token_ids=[2]), i, (1,)) for i in range(4)], [], []))
    ids, scored = chooser(x, [Work(i, 0, 1, (1,), (), True) for i in range(4)], torch.arange(4), ())
    assert seen[0] is x and scored is None and chooser.heard.said is None and not chooser.wishes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_neighbours_are_not_touched(dtype):
    "A row with every wish beside one with none, in every type: the plain row's logits arrive bit for bit"
    seen, x = [], rows(1, dtype=dtype)
    before = x.clone()

    def look(logits, *how):
        seen.append(logits)
        return logits.argmax(-1)
    p = SamplingParams(repetition_penalty=2, presence_penalty=1, logit_bias={3: 50}, allowed_token_ids=[*range(50)], min_tokens=5, logprobs=2)
    p.bad_word_ids = [[1], [2, 3], [4, 5, 6]]
    chooser = Chooser(4, V, 20, sample=look)
    chooser.learn(Plan([Admit(i, (7, 2), 1, SamplingParams() if i % 2 else p, i, (1,), (9,)) for i in range(4)], [], []))
    ids, (asked, table) = chooser(x, [Work(i, 1, 1, (2,), (), True) for i in range(4)], torch.arange(4), ())
    assert torch.equal(x, before) and all(torch.equal(seen[0][i], x[i].to(seen[0].dtype)) for i in (1, 3))
    assert [w.row for w in asked] == [0, 2] and table[:, 0].tolist() == ids[[0, 2]].tolist()
    want = book(x[[0, 2]].float() if dtype != torch.float64 else x[[0, 2]], [[7, 2]]*2, 1, [9], p.bad_word_ids, repetition_penalty=2,
                presence_penalty=1, logit_bias={3: 50}, allowed_token_ids=[*range(50)], min_tokens=5, bad_words=["…"])
    assert torch.allclose(seen[0][[0, 2]], want.to(seen[0].dtype), atol=1e-5)


def test_bans_give_way_when_nothing_is_left():
    x = rows(0, 2)
    out = ban(x, torch.arange(2).repeat_interleave(V), torch.arange(V).repeat(2))
    assert torch.equal(out, x)
    out = ban(x, torch.tensor([0, 0, 1]), torch.tensor([5, 5, 6]), torch.tensor([True, False, False]))  # a pair may come twice
    assert out[0, 5] == -torch.inf and torch.equal(out[1], x[1])


def test_processors_by_name_and_with_prompts():
    makers = request_processors(["test_sampling:Echo"])
    f = makers[0](SamplingParams())
    assert f([1], [2], torch.zeros(3)).tolist() == [1, 2, 0] and makers[0](SamplingParams(n=2)) is None
    with pytest.raises(ValueError, match="new_req_logits_processor"):
        request_processors([3])


class Echo:
    def __init__(self, config, device, pin): assert config is device is None and pin is False  # as vLLM makes them

    def new_req_logits_processor(self, params):
        return None if params.n > 1 else lambda prompt, answer, logits: torch.tensor([*prompt, *answer, 0])


def test_a_wish_can_be_made_again_at_any_time():
    p = SamplingParams(min_tokens=3, logprobs=-1)
    p.bad_word_ids = [[4], [1, 2]]
    for ids in (5,), (5, 6), (5, 6, 7, 8, 9):
        w = Wish(Admit(0, ids, 1, p, 0, (1,), (0,)), V)
        assert (w.banned(len(ids)), w.words, w.n_top) == ([4] + [0]*(len(ids) < 4), [[1, 2]], V)


def test_told_is_three_things():
    assert Told([1], {}, {})[0] == [1]


# ---- temperatures: case 19

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_temperature_to_zero(dtype):
    x = torch.tensor([[60., 59., 0, -torch.inf]]).to(dtype).expand(6, -1)
    t = [0, 1e-7, 1e-5, 1e-4, 1e-3, 1]
    ids = sample(x, t, [0]*6, [1.]*6, [0.]*6, range(6), [5]*6)
    assert ids[:4].tolist() == [int(x[0].argmax())]*4 and (ids != 3).all()
    p = filter_logits(x, t, [0]*6, [1.]*6, [0.]*6).softmax(-1)
    assert p.isfinite().all() and (p[:, 3] == 0).all()
