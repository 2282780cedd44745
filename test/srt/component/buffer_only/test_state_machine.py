"""Hypothesis looks for a short sequence of events that breaks an invariant, and shrinks it."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check_idle
from component.buffer_only.ranks import Ranks

#: Prompts that share prefixes in several ways, up to more pages than the smallest stage has.
TRUNKS = [prompt(1, 5), prompt(2, 12)]
BANK = [
    *TRUNKS,
    *(prompt(10 + n, n, base=TRUNKS[n % 2]) for n in range(1, 5)),
    *(prompt(20 + n, n, base=TRUNKS[n % 2][: 3 * PAGE]) for n in range(1, 5)),
]
#: By number, so that a failure can be read.
PROMPTS = st.integers(0, len(BANK) - 1)
NAMES = st.sampled_from([None, None, "tenant"])
RANK = st.integers(0, 1)
LANES = st.sampled_from(["query", "fetch", "write"])
METHODS = st.sampled_from(["batch_exists", "batch_get_v1", "batch_set_v1"])


class Server(RuleBasedStateMachine):
    """The life of one server's cache, in any order; everything is checked after each event."""

    ranks_of_server: ClassVar[int] = 1
    taken: ClassVar[Counter[str]]
    ranks: Ranks

    @initialize(pages=st.integers(2, 20), tokens=st.integers(14, 40))
    def start(self, pages: int, tokens: int) -> None:
        self.ranks = Ranks(self.ranks_of_server, pages=pages, tokens=tokens * PAGE)
        self.rids: dict[str, tuple[list[int], str | None]] = {}
        self.count = 0
        self.taken["sequences"] += 1

    def one(self, rank: int) -> Cache:
        return self.ranks.caches[rank % len(self.ranks.caches)]

    def done(self, what: str) -> None:
        self.ranks.check()
        self.taken[what] += 1

    @rule(number=PROMPTS, extra_key=NAMES)
    def arrive(self, number: int, extra_key: str | None) -> None:
        self.count += 1
        rid = f"r{self.count}"
        self.rids[rid] = (BANK[number], extra_key)
        self.ranks.each(lambda cache: cache.want(rid, BANK[number], extra_key))
        self.done("arrive")

    @precondition(lambda self: self.rids)
    @rule(data=st.data())
    def admit(self, data: Any) -> None:
        """The scheduler looks at a request, and runs it if it can."""
        rid = data.draw(st.sampled_from(sorted(self.rids)))
        if self.ranks.each(lambda cache: cache.tree.check_prefetch_progress(rid)):
            tokens, extra_key = self.rids.pop(rid)
            self.ranks.each(lambda cache: run(cache, rid, tokens, extra_key))
            self.taken["admitted"] += 1
        self.done("admit")

    @precondition(lambda self: self.rids)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        rid = data.draw(st.sampled_from(sorted(self.rids)))
        del self.rids[rid]
        self.ranks.each(lambda cache: cache.tree.release_aborted_request(rid))
        self.done("abort")

    @precondition(lambda self: self.rids)
    @rule(data=st.data())
    def retract(self, data: Any) -> None:
        """The same request asks again."""
        rid = data.draw(st.sampled_from(sorted(self.rids)))
        self.ranks.each(lambda cache: cache.want(rid, *self.rids[rid]))
        self.done("retract")

    @rule(number=PROMPTS, extra_key=NAMES)
    def compute(self, number: int, extra_key: str | None) -> None:
        """A request that did not wait for anything."""
        self.ranks.each(lambda cache: run(cache, "", BANK[number], extra_key))
        self.done("compute")

    @rule(pages=st.integers(1, 12))
    def evict(self, pages: int) -> None:
        self.ranks.each(lambda cache: cache.evict(pages * PAGE))
        self.done("evict")

    @rule(number=PROMPTS, extra_key=NAMES, pages=st.integers(1, 12))
    def split(self, number: int, extra_key: str | None, pages: int) -> None:
        self.ranks.each(lambda cache: cache.held_tokens(BANK[number][: pages * PAGE], extra_key))
        self.done("split")

    @rule()
    def step(self) -> None:
        self.ranks.step()
        self.done("step")

    @rule(steps=st.integers(1, 5))
    def live(self, steps: int) -> None:
        """The usual way of things, so that short sequences get far."""
        for _ in range(steps):
            for cache in self.ranks.caches:
                cache.work()
            self.ranks.step()
            self.ranks.check()
        self.done("live")

    @rule(rank=RANK, lane=LANES, jobs=st.integers(1, 2))
    def work(self, rank: int, lane: str, jobs: int) -> None:
        self.one(rank).lanes[lane].run(jobs)
        self.done("work")

    @rule(rank=RANK, slow=st.booleans())
    def copies(self, rank: int, slow: bool) -> None:
        self.one(rank).slow = slow
        self.done("slow" if slow else "fast")

    @rule(rank=RANK, method=METHODS)
    def fail(self, rank: int, method: str) -> None:
        self.one(rank).store.fail(method)
        self.done("fail")

    @rule(rank=RANK, method=METHODS, good=st.integers(0, 3))
    def partly(self, rank: int, method: str, good: int) -> None:
        """A hole behind the first ``good`` pages, or fewer pages found."""
        change = (
            (lambda found: min(found, good))
            if method == "batch_exists"
            else (lambda results: [at != good for at in range(len(results))])
        )
        self.one(rank).store.answer(method, change)
        self.done("partly")

    @rule(rank=RANK, share=st.floats(0.1, 1.0))
    def lose(self, rank: int, share: float) -> None:
        """The store evicts."""
        store = self.one(rank).store
        keys = list(store.content)
        store.drop(*keys[: int(len(keys) * share)])
        self.done("lose")

    @rule(rank=RANK, seconds=st.sampled_from([0.5, 5.0, 11.0]))
    def time_passes(self, rank: int, seconds: float) -> None:
        self.one(rank).now += seconds
        self.done("time")

    @rule()
    def flush(self) -> None:
        """At any time: SGLang refuses it while something is under way, but others reset too."""
        self.ranks.each(lambda cache: cache.flush())
        self.rids.clear()
        self.done("flush")

    @rule()
    def clear_store(self) -> None:
        self.ranks.each(lambda cache: cache.tree.clear_storage_backend())
        self.done("clear")

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        for cache in self.ranks.caches:
            cache.slow = False
        # Every request ends, however long the store took.
        for _ in range(100):
            for cache in self.ranks.caches:
                cache.work()
                cache.now += 0.2
            self.ranks.step()
            for rid in list(self.rids):
                if self.ranks.each(lambda cache, rid=rid: cache.tree.check_prefetch_progress(rid)):
                    tokens, extra_key = self.rids.pop(rid)
                    self.ranks.each(lambda cache, r=rid, t=tokens, e=extra_key: run(cache, r, t, e))
            self.ranks.check()
        assert not self.rids, "a request was never admitted"
        for cache in self.ranks.caches:
            check_idle(cache)
            assert not cache.store.disturbed
        self.ranks.close()


class TwoRanks(Server):
    """The same with two ranks whose stores, copies and clocks differ."""

    ranks_of_server = 2

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "ranks"):
            assert all(len(lengths) == 1 for lengths in self.ranks.group.log)
            assert len(set.union(set(), *self.ranks.group.log)) <= 1


def run(cache: Cache, rid: str, tokens: list[int], extra_key: str | None) -> int:
    """The request runs; what it hit, or -1 where the device has no room now."""
    cache.tree.take_storage_hit(rid)
    try:
        return cache.compute(tokens, extra_key)
    except MemoryError:
        return -1


@pytest.mark.parametrize("server", [Server, TwoRanks])
@pytest.mark.timeout(600)
def test_any_sequence_of_events(server: type[Server]) -> None:
    """Staging pages, device slots, locks and references balance after every event on every rank,
    the content is right, every request ends, and nothing is left when nothing is under way."""
    server.taken = Counter()
    run_state_machine_as_test(
        server,
        settings=settings(
            max_examples=int(__import__("os").environ.get("BO_N", "150")),
            stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
        ),
    )
    taken = server.taken
    assert taken["sequences"] >= 120
    assert taken["admitted"] > 50 and taken["flush"] > 50 and taken["partly"] > 50
