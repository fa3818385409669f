"""Pool and manager under random operations, and stories short enough to draw"""
from random import Random

import pytest
from common import mutant
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test)

from pagedlm import blocks
from pagedlm.blocks import LRU, BlockManager, BlockPool, ByKey, chain_keys, orders
from pagedlm.core import cdiv


class Sequence:
    "All that a manager needs of a request, and how many of its tokens are computed"
    def __init__(self, id, tokens, salt=None):
        self.id, self.tokens, self.salt, self.keys, self.n_computed = id, list(tokens), salt, [], 0

    def prefix(self, n):
        return self.salt, *self.tokens[:n]


class ByChance(ByKey):
    def key(self, block): return hash((block, next(self.clock))) % 1000 - 500


class Machine(RuleBasedStateMachine):
    "Random operations next to a memory that remembers, for each slot, after which prefix it was written"
    @initialize(n_blocks=st.integers(2, 9), block_size=st.integers(1, 3), caching=st.sampled_from([True, True, False]),
                order=st.sampled_from([LRU, LRU, *orders.values(), ByChance]))
    def start(self, n_blocks, block_size, caching, order):
        self.manager = BlockManager(BlockPool(n_blocks, order=order), block_size, caching)
        self.live, self.memory, self.n = {}, {}, 0

    def one(self, data):
        return self.live[data.draw(st.sampled_from(sorted(self.live)))]

    def slot(self, r, p):
        return self.manager.tables[r.id][p//self.manager.block_size], p % self.manager.block_size

    def cached(self):
        "What the named blocks hold, by the prefix that ends with them"
        return {self.memory[b, self.manager.block_size - 1]: b for b in self.manager.pool.named.values()}

    @rule(k=st.integers(0, 12), tail=st.lists(st.integers(0, 1), max_size=6), salt=st.sampled_from([None, None, "s"]),
          reserved=st.sampled_from([0, 0, 1, 3]))
    def admit(self, k, tail, salt, reserved):
        m, B, r = self.manager, self.manager.block_size, Sequence(self.n, [0]*k + tail or [0], salt)
        cached, hit, self.n = self.cached(), [], self.n + 1
        while len(hit) < (len(r.tokens) - 1)//B and (block := cached.get(r.prefix((len(hit) + 1)*B))):
            hit.append(block)
        free, fresh = set(m.pool.free), cdiv(len(r.tokens), B) - len(hit)
        n_cached = m.admit(r, reserved)
        if fresh + len(free & set(hit)) + reserved > len(free):
            assert n_cached is None and r.id not in m.tables and set(m.pool.free) == free
        else:
            assert n_cached == len(hit)*B < len(r.tokens) and m.tables[r.id] == hit
            r.n_computed, self.live[r.id] = n_cached, r

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(1, 9), computes=st.booleans())
    def grow(self, data, n, computes):
        m, r = self.manager, self.one(data)
        end = min(len(r.tokens), r.n_computed + n)
        lacks, n_free, before = m.missing(r, end), m.pool.n_free, list(m.tables[r.id])
        new = m.grow(r, end)
        if lacks > n_free:
            assert new is None and m.tables[r.id] == before and m.pool.n_free == n_free
            return
        assert m.tables[r.id] == before + new and len(new) == lacks
        if not computes:
            return
        for p in range(r.n_computed, end):
            self.memory[self.slot(r, p)] = r.prefix(p + 1)
        r.n_computed = end
        m.name_full(r, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), id=st.integers(0, 1))
    def say(self, data, id):
        self.one(data).tokens.append(id)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        r = self.live.pop(self.one(data).id)
        self.manager.release(r)

    @rule(sure=st.integers(0, 9))
    def reset(self, sure):
        if not sure:
            self.manager.reset()
            self.live = {}

    @invariant()
    def sound(self):
        m, pool = self.manager, self.manager.pool
        m.check()
        used = {b for table in m.tables.values() for b in table}
        assert set(m.tables) == set(self.live) and 0 not in used
        assert len(used) + pool.n_free + 1 == pool.n_blocks
        for r in self.live.values():
            assert all(pool.refs[b] == 1 for b in m.tables[r.id][r.n_computed//m.block_size:])
            assert all(self.memory[self.slot(r, p)] == r.prefix(p + 1) for p in range(r.n_computed))
        assert m.caching or not pool.named and max(pool.refs) <= 1
        assert len(self.cached()) == len(pool.named)


def test_any_operations():
    run_state_machine_as_test(Machine, settings=settings(
        max_examples=250, stateful_step_count=40, deadline=None, derandomize=True, database=None))


ids = st.lists(st.sampled_from([0, 1, 256, 257, 2**32, 2**32 + 1, 2**62]), min_size=4, max_size=4)


@settings(deadline=None, derandomize=True, database=None)
@given(a=ids, b=ids, salts=st.tuples(*[st.sampled_from([None, "", "a", "salt", 0])]*2))
def test_keys_differ_wherever_ids_do(a, b, salts):
    "Case 9. Nothing of an id may get lost on its way into a key; each key has 256 bits of a cryptographic hash"
    ka, kb = (chain_keys([], tokens, 2, 2, salt) for tokens, salt in zip((a, b), salts))
    same = salts[0] == salts[1]
    assert (ka[0] == kb[0]) == (same and a[:2] == b[:2])
    assert (ka[1] == kb[1]) == (same and a == b)
    assert {len(k) for k in ka + kb} == {32}


def test_keys_grow_in_place():
    tokens = list(range(40))
    once, keys = chain_keys([], tokens, 4, 10), []
    for n in (0, 1, 1, 4, 3, 10):
        assert chain_keys(keys, tokens, 4, n) is keys
        assert keys == once[:len(keys)] and len(keys) >= n


# ---- stories: 11 blocks of 4 tokens, block 0 is the null block

@pytest.fixture
def manager():
    return BlockManager(BlockPool(11), 4)


def computed(manager, id, tokens, salt=None):
    "A sequence admitted and computed from end to end"
    r = Sequence(id, tokens, salt)
    r.n_computed = manager.admit(r)
    manager.grow(r, len(r.tokens))
    manager.name_full(r, len(r.tokens))
    manager.check()
    return r


def test_a_prefix_outlives_what_follows_it(manager):
    a = computed(manager, "a", range(14))
    assert manager.tables["a"] == [1, 2, 3, 4]
    manager.release(a)
    assert list(manager.pool.free) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]  # the unnamed one first, then tail before head
    b = computed(manager, "b", range(100, 132))
    assert manager.tables["b"] == [4, 5, 6, 7, 8, 9, 10, 3]              # 3 is evicted, 1 and 2 survive
    manager.release(b)
    computed(manager, "c", range(14))
    assert manager.tables["c"][:2] == [1, 2] and manager.tables["c"][2:] == [3, 10]


def test_a_hit_leaves_one_token_to_compute(manager):
    a = computed(manager, "a", range(8))
    for n, hit in (4, []), (5, [1]), (7, [1]), (8, [1]), (9, [1, 2]):
        r = Sequence(n, range(n))
        assert manager.match(r) == hit and manager.admit(r) == 4*len(hit)
        manager.release(r)
    manager.release(a)
    assert manager.pool.n_free == 10


def test_one_prefix_computed_twice_in_one_step(manager):
    a, b = Sequence("a", range(9)), Sequence("b", range(9))
    for r in a, b:
        assert manager.admit(r) == 0
        manager.grow(r, 9)
    for r in a, b:
        manager.name_full(r, 9)
    assert manager.tables == {"a": [1, 2, 3], "b": [4, 5, 6]} and set(manager.pool.named.values()) == {1, 2}
    manager.release(a)
    assert list(manager.pool.free) == [3, 7, 8, 9, 10, 2, 1]
    c = Sequence("c", range(9))
    assert manager.admit(c) == 8 and manager.tables["c"] == [1, 2]  # the named ones, though nobody reads them
    manager.release(b)
    assert list(manager.pool.free) == [4, 5, 6, 3, 7, 8, 9, 10]     # b's copies have no name: nothing to keep


def test_a_hit_on_free_blocks_needs_room_too(manager):
    a = computed(manager, "a", range(17))
    manager.release(a)                           # named and free: 1 … 4
    b = computed(manager, "b", range(100, 120))  # holds 5 blocks, of 10
    c = Sequence("c", range(24))
    assert manager.match(c) == [1, 2, 3, 4] and manager.pool.n_free == 5  # it needs 6: those 4, and 2 more
    assert manager.admit(c) is None and manager.pool.n_free == 5
    assert manager.admit(Sequence("d", range(20)), reserved=1) is None
    assert manager.admit(Sequence("d", range(20))) == 16 and manager.pool.n_free == 1
    manager.release(b)
    assert manager.admit(c) == 16                # the same 4, now read by two


def test_salts_do_not_share(manager):
    computed(manager, "a", range(9), salt="x")
    assert manager.match(Sequence("b", range(9))) == manager.match(Sequence("c", range(9), "y")) == []
    assert manager.match(Sequence("d", range(9), "x")) == [1, 2]


# ---- who is evicted

@pytest.mark.parametrize("name", [*orders, "by chance"])
def test_the_order_is_respected(name):
    "Whatever is handed out is the first of all free: what has no name, then the smallest key, then what is free longest"
    class Told(ByKey):
        key = ByChance.key
    rnd, pool = Random(0), BlockPool(30, order=orders.get(name, Told))
    found, born = [0]*30, [0]*30
    keys = dict(fifo=lambda b: born[b], lfu=lambda b: found[b])
    key = keys.get(name, lambda b: pool.free[b][1] if name == "by chance" else 0)
    since, held, n_evicted = {b: -b for b in range(1, 30)}, [], 0  # free block -> when it came back
    for now in range(4000):
        if held and rnd.random() < .5:
            given = held.pop(rnd.randrange(len(held)))
            pool.give_back(given)
            back = [b for b in (given if name == "head_first" else given[::-1]) if not pool.refs[b]]
            since |= {b: now + i/100 for i, b in enumerate(back)}
        elif (named := [*pool.named.values()]) and rnd.random() < .4:
            held.append(rnd.sample(named, min(len(named), rnd.randint(1, 4))))
            pool.share(held[-1])
            for b in held[-1]:
                found[b] += 1
        elif pool.n_free:
            line = sorted(pool.free, key=lambda b: (True, key(b), since[b]) if pool.keys[b] else (False, -since[b], 0))
            n = rnd.randint(1, min(3, len(line)))
            n_evicted += sum(pool.keys[b] is not None for b in line[:n])
            held.append(pool.take(n))
            assert held[-1] == line[:n]
            for i, b in enumerate(held[-1]):
                found[b], born[b] = 0, now + i/100
                if rnd.random() < .8:
                    pool.name(b, bytes([now % 256, now//256, i]))
        pool.check()
    assert n_evicted > 300


def test_a_key_costs_what_a_heap_costs():
    "Blocks that are found again and again leave their entries behind, but not for ever"
    pool = BlockPool(1001, order=orders["lfu"])
    all = pool.take(1000)
    for b in all:
        pool.name(b, b.to_bytes(2, "big"))
    pool.give_back(all)
    for _ in range(20):
        pool.share(all)
        pool.give_back(all)
        assert len(pool.free.heap) <= 2*len(pool.free) + 16
    assert [pool.take(1)[0] for _ in range(1000)] == all[::-1] and not pool.n_free and pool.take(1) is None


def test_orders_in_a_story():
    "A, B, A again, C: which blocks go first? Each has two named blocks and a third that is not full"
    lines = {}
    for name in orders:
        m = BlockManager(BlockPool(11, order=orders[name]), 4)
        for id, start in ("a", 0), ("b", 100), ("a", 0), ("c", 200):
            m.release(computed(m, id, range(start, start + 9)))
        lines[name] = m.pool.take(10)[4:]
    assert lines == dict(lru=[4, 3, 2, 1, 6, 5], head_first=[3, 4, 1, 2, 5, 6], fifo=[1, 2, 3, 4, 5, 6], lfu=[4, 3, 6, 5, 2, 1])


@pytest.mark.parametrize("old,new", [
    ("is not entry: pass", "is not entry: break"), ("(False, -now, 0, b)", "(False, now, 0, b)"), ("(True, self.key(b), now,", "(True, self.key(b), -now,"),
    ("(True, self.key(b)", "(False, self.key(b)"), ("2*len(self) + 16", "9**9"), ("next(self.clock), 0", "next(self.clock), self.n_found[b]"),
    ("self.n_found[b] += 1", "pass"), ("reversed(blocks) if self.free.tail_first else blocks", "reversed(blocks)"),
    ("self.born[b], self.n_found[b] =", "_, self.n_found[b] ="), ("if keys[b] is None: self.move", "if keys[b]: self.move")])
def test_these_tests_see_mistakes(old, new, tmp_path, monkeypatch):
    changed = mutant(blocks, old, new, tmp_path/"changed.py")
    for name in "BlockManager", "BlockPool", "ByKey", "orders":
        monkeypatch.setitem(globals(), name, getattr(changed, name))
    with pytest.raises((AssertionError, IndexError, KeyError)):
        for name in (*orders, "by chance"):
            test_the_order_is_respected(name)
        test_a_key_costs_what_a_heap_costs()
        test_orders_in_a_story()


def test_too_small():
    for n in 0, 1:
        with pytest.raises(ValueError, match=f"n_blocks={n}"):
            BlockPool(n)
    with pytest.raises(ValueError, match="block_size=0"):
        BlockManager(BlockPool(3), 0)


def test_any_text_can_be_a_salt():
    salts = ["a", "\ud800", "\ud801", "é", "", 5]
    assert len({chain_keys([], [1, 2, 3, 4], 4, 1, salt)[0] for salt in salts}) == len(salts)
