"""A store that does not return: hits are lost, and the pages that it may still use are kept."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, check_idle, nodes
from component.buffer_only.ranks import Ranks
from component.buffer_only.scripted_store import ScriptedStore
from sglang.srt.mem_cache.buffer_only import page_store, pipelines, store_client
from sglang.srt.mem_cache.buffer_only.backup_queue import STUCK
from sglang.srt.mem_cache.buffer_only.page_store import IOThreads
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.stage import Direction

PROMPT = prompt(1, 5)


@pytest.fixture(params=[False, True], ids=["a rank of several", "the only rank"])
def cache(request: pytest.FixtureRequest) -> Iterator[Cache]:
    """The store has ``PROMPT``, the tree is empty."""
    store = ScriptedStore()
    found = Cache(store, alone=request.param)
    found.compute(PROMPT)
    found.settle()
    found.flush()
    yield found
    store.open_all()


def let_go(cache: Cache) -> None:
    """The hanging calls return."""
    cache.let_go()
    cache.settle()


@pytest.mark.hazard("staging-pages")
def test_a_read_that_hangs(cache: Cache):
    """The request computes; the staging pages are not lent again before the call has returned, and
    what it then writes lands in nobody's pages."""
    gate = cache.store.hang("batch_get_v1")
    assert cache.serve("r", PROMPT) == 0
    assert gate.entered.is_set()
    (piece,) = cache.buffer.prefetches.fetches.under_way
    assert piece.overdue and piece.owner is None
    kept = set(piece.staging.pages)
    for number in range(10, 16):
        cache.compute(prompt(number, 3))
        cache.step()
        check(cache)
        assert not any(kept & set(op.staging.pages) for op in cache.buffer.backups.running)
    assert cache.stage.used(Direction.PREFETCH) == 4
    let_go(cache)
    assert set(cache.store.written) <= kept
    check_idle(cache)


def test_a_write_that_hangs(cache: Cache):
    """The node is not taken for stored, and the pages stay until the store has read them."""
    cache.store.hang("batch_set_v1")
    cache.compute(prompt(2, 3))
    for _ in range(4):
        cache.step()
    (op,) = cache.buffer.backups.running
    assert op.overdue and cache.stage.used(Direction.BACKUP) == 3
    (node,) = nodes(cache.tree)
    assert node.stored == node.launched == 0
    assert cache.serve("r", PROMPT[: 2 * PAGE]) == 0, "the store is down, and not asked"
    let_go(cache)
    assert not cache.store.disturbed
    check_idle(cache)


def test_the_server_counts_as_idle_without_a_store_that_hangs(cache: Cache):
    """/flush_cache must work while a call of the store does not return, and must not give its
    pages away."""
    cache.store.hang("batch_get_v1")
    cache.serve("r", PROMPT)
    for _ in range(3):
        cache.step()
    assert cache.stage.used() > 0
    for _ in range(5):
        cache.step()
    assert not cache.buffer.busy
    cache.flush()
    assert cache.stage.used(Direction.PREFETCH) == 4
    let_go(cache)
    check_idle(cache)


def test_a_read_that_hangs_half_way():
    """What came before the call that hangs is used; the pages of the rest are kept for it."""
    cache = stored([PROMPT], batch_pages=2)
    cache.store.hang("batch_get_v1", call=2)
    assert cache.serve("r", PROMPT) == 2 * PAGE
    cache.step()
    (rest,) = cache.buffer.prefetches.fetches.under_way
    kept = set(rest.staging.pages)
    assert rest.overdue and len(kept) == 2 == cache.stage.used(Direction.PREFETCH)
    check(cache)
    cache.store.written.clear()
    let_go(cache)
    assert set(cache.store.written) == kept
    check_idle(cache)


def test_a_write_that_hangs_half_way():
    """What was acknowledged before is stored, and its pages are free; those of the call that hangs
    are not."""
    cache = Cache(batch_pages=2)
    cache.store.hang("batch_set_v1", call=2)
    cache.compute(prompt(2, 4))
    for _ in range(4):
        cache.step()
    (node,) = nodes(cache.tree)
    assert node.stored == 2 * PAGE and cache.stage.used(Direction.BACKUP) == 2
    let_go(cache)
    assert not cache.store.disturbed
    check_idle(cache)


def hang_for_reads(cache: Cache, *prompts: list[int]) -> None:
    """One read after the other hangs, in a store that answers everything else."""
    for number, tokens in enumerate(prompts):
        cache.store.hang("batch_get_v1")
        assert cache.serve(f"hung {number}", tokens) == 0
        cache.step()
        cache.revive()
        for _ in range(8):  # what was computed meanwhile is written now
            cache.step()


@pytest.mark.hazard("back-pressure-deadlock")
def test_reads_that_hang_for_ever(caplog: pytest.LogCaptureFixture):
    """They have all that reads may have of the stage. Requests compute at once: waiting for pages
    that nobody gives back, each would lose all the time that it may wait. Nothing is lent twice,
    the pages are counted, and the log says where they are."""
    prompts = [prompt(number, 9) for number in range(1, 5)]
    cache = stored(prompts, tokens=80 * PAGE)
    hang_for_reads(cache, *prompts[:2])
    kept = cache.stage.used(Direction.PREFETCH)
    assert kept == cache.stage.shares[Direction.PREFETCH].ceiling == cache.stage.stranded
    assert "12 staging pages" not in caplog.text and "12 of 16" in caplog.text
    before = cache.now
    for number, tokens in enumerate([*prompts[2:], prompts[0]]):
        rid = f"after {number}"
        cache.want(rid, tokens)
        assert not cache.tree.check_prefetch_progress(rid)
        cache.step()
        assert cache.tree.check_prefetch_progress(rid) and cache.now == before
        assert cache.buffer.prefetches.loadable(rid, 0, len(tokens)) == 0
        cache.tree.release_aborted_request(rid)
        check(cache)
    cache.compute(prompt(8, 3))
    for _ in range(5):
        cache.step()
    assert cache.match(prompt(8, 3)).last_device_node.storage_backed, "writes go on"
    assert cache.stage.used() == kept and not cache.buffer.busy
    cache.flush()
    assert cache.stage.used() == kept, "a flush does not prove that the call has returned"
    let_go(cache)
    assert cache.stage.stranded == 0
    check_idle(cache)
    assert cache.serve("again", prompts[2]) == 8 * PAGE
    cache.settle()
    check_idle(cache)


def test_a_read_that_waits_for_one_that_hangs():
    """It was there before the store was known to hang; it is let go when that is known."""
    prompts = [prompt(number, 9) for number in range(1, 4)]
    cache = stored(prompts, tokens=80 * PAGE)
    hang_for_reads(cache, prompts[0])
    cache.want("second", prompts[1])
    cache.want("third", prompts[2])
    cache.store.hang("batch_get_v1")
    cache.step()
    cache.step()
    assert cache.state("second") is State.FETCHING and cache.state("third") is State.FOUND
    for _ in range(3):
        cache.step()
    assert cache.state("third") is State.MISSED
    for rid in ("second", "third"):
        assert cache.tree.check_prefetch_progress(rid)
        assert cache.buffer.prefetches.loadable(rid, 0, 36) == 0
        cache.tree.release_aborted_request(rid)
    let_go(cache)
    check_idle(cache)


@pytest.mark.hazard("back-pressure-deadlock")
def test_writes_that_hang_for_ever():
    """They have all that writes may have of the stage. What waits to be written is dropped and
    counted: a server that keeps it would never be idle again, and its queue only grow."""
    cache = Cache(tokens=80 * PAGE)
    for number in range(2):
        cache.store.hang("batch_set_v1")
        cache.compute(prompt(number, 4))
        for _ in range(4):
            cache.step()
        cache.revive()
    kept = cache.stage.used(Direction.BACKUP)
    assert kept == cache.stage.shares[Direction.BACKUP].ceiling == cache.stage.stranded
    cache.compute(prompt(7, 5))
    cache.step()
    assert cache.buffer.backups.queue.dropped[STUCK] == 5 * PAGE and not cache.buffer.busy
    assert cache.evict(1000) == 13 * PAGE, "and it keeps nothing from eviction"
    check(cache)
    cache.let_go()
    for _ in range(2):
        cache.step()
    assert cache.stage.used() == 0 and not cache.store.disturbed
    cache.compute(prompt(7, 5))
    cache.settle()
    assert all(node.storage_backed for node in nodes(cache.tree))
    check_idle(cache)


@pytest.mark.hazard("staging-pages")
@pytest.mark.parametrize("method", ["batch_get_v1", "batch_set_v1"])
def test_a_store_that_hangs_on_one_rank(method: str):
    """The other rank's call has ended, and its pages are kept all the same: given back, its stage
    would have room for what the first one's has not, and the ranks do different things."""
    ranks = Ranks(2, tokens=80 * PAGE)
    first, second = ranks.caches
    ranks.each(lambda cache: cache.compute(PROMPT))
    ranks.live(6)
    ranks.each(lambda cache: cache.flush())
    gate = first.store.hang(method)
    if method == "batch_get_v1":
        ranks.each(lambda cache: cache.want("r", PROMPT))
    else:
        ranks.each(lambda cache: cache.compute(prompt(2, 4)))
    ranks.live(6)
    assert gate.waiting and second.client.under_way == 0
    assert ranks.each(lambda cache: cache.stage.stranded) == 4
    assert ranks.each(lambda cache: cache.tree.check_prefetch_progress("r"))
    ranks.each(lambda cache: cache.tree.release_aborted_request("r"))
    assert not any(node.stored for node in nodes(second.tree)), "durable on one rank is not durable"
    first.let_go()
    ranks.live(2)
    for cache in ranks.caches:
        check_idle(cache)
    ranks.close()


def stored(prompts: list[list[int]], **changes: Any) -> Cache:
    """A cache with an empty tree, and a store that has all of ``prompts``."""
    cache = Cache(**changes)
    for tokens in prompts:
        cache.compute(tokens)
        cache.settle()
    cache.flush()
    return cache


def test_a_query_that_hangs(cache: Cache):
    """It holds no pages, so that nothing is left of it when the deadline is over."""
    cache.store.hang("batch_exists")
    assert cache.serve("r", PROMPT) == 0
    assert not cache.buffer.prefetches.queries.under_way and not cache.stage.used()
    let_go(cache)
    check_idle(cache)


def test_the_end_of_a_server_waits_for_all_threads_at_once(monkeypatch: pytest.MonkeyPatch):
    """Not for one after the other: eight of them could take 80 s, and whoever ends servers kills
    one that takes so long."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)

    class Hanging:
        def __init__(self, **_: Any) -> None: ...

        def start(self) -> None: ...

        def join(self, timeout: float) -> None:
            clock.now += timeout

        def is_alive(self) -> bool:
            return True

    def threads(*args: Any) -> IOThreads:
        with monkeypatch.context() as patched:
            patched.setattr(page_store.threading, "Thread", Hanging)
            return IOThreads(*args)

    cache = Cache(threads=threads)
    for module in (page_store, pipelines):
        monkeypatch.setattr(module, "time", clock)
    assert not cache.buffer.close()
    assert clock.now == 100.0 + pipelines.CLOSE_S


def test_a_store_that_does_not_close(monkeypatch: pytest.MonkeyPatch):
    """It has what is left of the time in which a server ends, whatever its deadline, and what it
    still uses is left as it is."""
    cache, waits, returns = Cache(), list[float](), threading.Event()
    client, clock = cache.client, SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    client.settings = dataclasses.replace(client.settings, deadline=3600.0)
    client._wait = lambda call, seconds: waits.append(seconds)
    cache.store.close = returns.wait
    for module in (pipelines, store_client):
        monkeypatch.setattr(module, "time", clock)
    took_8_s = SimpleNamespace(close=lambda until: setattr(clock, "now", until - 2) or True)
    cache.buffer.backups = took_8_s
    assert not cache.buffer.close() and waits == [2.0]
    returns.set()


def test_the_end_of_a_server_asks_nothing_more(cache: Cache):
    """What waits for its turn at a slow store would keep the threads for as long as they may."""
    cache.store.calls.clear()
    for number in range(5):
        cache.want(f"r{number}", prompt(number, 4))
    cache.step(work=False)
    assert cache.buffer.prefetches.queries.under_way and cache.buffer.close()
    cache.work()
    assert not cache.store.calls
    cache.settle()
    check_idle(cache)
