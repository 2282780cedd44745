"""A store that does not return: hits are lost, and pages that its calls may still access are
kept."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, nodes
from component.buffer_only.ranks import Ranks
from component.buffer_only.scenes import steps, stored
from component.buffer_only.scripted_store import ManualThreads
from sglang.srt.mem_cache.buffer_only import pipelines, store_client
from sglang.srt.mem_cache.buffer_only.nodes import STUCK
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.stage import Direction

PROMPT = prompt(1, 5)
OTHER = prompt(2, 4)


@pytest.mark.hazard("staging-pages")
@pytest.mark.parametrize(
    ("method", "batch_pages", "call", "good"),
    [
        ("batch_exists", 100, 1, 0),
        ("batch_get_v1", 100, 1, 0),
        ("batch_get_v1", 2, 2, 2),
        ("batch_set_v1", 100, 1, 0),
        ("batch_set_v1", 2, 2, 2),
    ],
)
def test_a_call_that_hangs(method: str, batch_pages: int, call: int, good: int):
    """Guards against pages that are reused while a hung call may still access them, also after a
    flush. The request computes the rest, or the node counts as stored only up to there, and the
    server counts as idle for a flush."""
    cache = stored(PROMPT, batch_pages=batch_pages)
    cache.store.hang(method, call)
    if method == "batch_set_v1":
        cache.compute(OTHER)
        steps(cache, 4)
        assert [node.stored for node in nodes(cache.tree)] == [good * PAGE]
    else:
        assert cache.serve("r", PROMPT) == good * PAGE
        steps(cache, 4)
    kept = {page for staging in cache.stage.allocated for page in staging.pages}
    assert len(kept) == cache.stage.stranded == (0 if method == "batch_exists" else 4 - good)
    assert cache.serve("s", PROMPT) <= 4 * PAGE, "the store is down, and not queried"
    assert not cache.buffer.busy
    cache.flush()
    assert cache.stage.used() == len(kept)
    cache.store.written.clear()
    cache.open_gates()
    cache.settle()
    assert set(cache.store.written) <= kept


@pytest.mark.hazard("staging-pages")
@pytest.mark.parametrize("method", ["batch_get_v1", "batch_set_v1"])
def test_a_store_that_hangs_on_one_rank(method: str):
    """Guards against ranks with different stages: the other rank's call has ended, but its pages
    are kept too. Otherwise its stage would have room that the first rank's has not."""
    ranks = Ranks(2, tokens=80 * PAGE)
    ranks.store(PROMPT)
    first, second = ranks.caches
    gate = first.store.hang(method)
    if method == "batch_get_v1":
        ranks.on_all(lambda cache: cache.want("r", PROMPT))
    else:
        ranks.on_all(lambda cache: cache.compute(OTHER))
    ranks.live(6)
    assert gate.waiting and second.client.under_way == 0
    assert ranks.on_all(lambda cache: cache.stage.stranded) == 4
    assert ranks.on_all(lambda cache: cache.tree.check_prefetch_progress("r"))
    assert not any(node.stored for node in nodes(second.tree)), "durable on one rank is not durable"


@pytest.mark.hazard("back-pressure-deadlock")
def test_reads_that_hang_for_ever(caplog: pytest.LogCaptureFixture):
    """Guards against requests that wait for staging pages that hung reads keep for ever, also one
    that was queued before the store was known to hang: they compute at once. The pages are counted
    and logged."""
    prompts = [prompt(number, 9) for number in range(1, 5)]
    cache = stored(*prompts, tokens=80 * PAGE)
    cache.store.hang("batch_get_v1")
    assert cache.serve("first", prompts[0]) == 0
    steps(cache, 1)
    cache.revive()
    steps(cache, 8)  # the KV computed so far is written now
    cache.store.hang("batch_get_v1")
    cache.want("second", prompts[1])
    cache.want("third", prompts[2])
    steps(cache, 2)
    assert cache.state("second") is State.FETCHING and cache.state("third") is State.FOUND
    steps(cache, 3)
    assert all(cache.tree.check_prefetch_progress(rid) for rid in ("second", "third"))
    assert cache.state("second") is cache.state("third") is State.MISSED
    cache.revive()
    kept = cache.stage.used(Direction.PREFETCH)
    assert kept == cache.stage.shares[Direction.PREFETCH].ceiling == cache.stage.stranded
    assert "12 of 16" in caplog.text
    for rid, tokens in {"fourth": prompts[3], "fifth": prompts[0]}.items():
        cache.want(rid, tokens)
        assert cache.tree.check_prefetch_progress(rid)
        assert cache.buffer.prefetches.loadable(rid, 0, len(tokens)) == 0
    cache.buffer.prefetches.in_line([])
    cache.compute(prompt(8, 3))
    steps(cache, 5)
    assert cache.match(prompt(8, 3)).last_device_node.storage_backed, "writes go on"
    assert cache.stage.used() == kept and not cache.buffer.busy
    cache.open_gates()
    cache.settle()
    assert cache.stage.stranded == 0 and cache.serve("again", prompts[3]) == 8 * PAGE


@pytest.mark.hazard("back-pressure-deadlock")
def test_writes_that_hang_for_ever():
    """Guards against a server that is never idle again, and a queue that only grows, because hung
    writes keep all staging pages for writes: queued writes are dropped and counted."""
    cache = Cache(tokens=80 * PAGE)
    for number in range(2):
        cache.store.hang("batch_set_v1")
        cache.compute(prompt(number, 4))
        steps(cache, 4)
        cache.revive()
    kept = cache.stage.used(Direction.BACKUP)
    assert kept == cache.stage.shares[Direction.BACKUP].ceiling == cache.stage.stranded
    cache.compute(prompt(7, 5))
    steps(cache, 1)
    assert cache.buffer.backups.queue.dropped[STUCK] == 5 * PAGE and not cache.buffer.busy
    assert cache.evict(1000) == 13 * PAGE, "and no page is kept from eviction"
    check(cache)
    cache.open_gates()
    steps(cache, 2)
    cache.compute(prompt(7, 5))
    cache.settle()
    assert all(node.storage_backed for node in nodes(cache.tree))


def test_a_store_that_answers_probes_alone():
    """Guards against a gauge (and its alert) that reports a store as in use although all permitted
    calls hang, so that every further one is refused."""
    cache = Cache()
    cache.client.settings = dataclasses.replace(cache.client.settings, max_calls=2)
    for used in (1, 0):
        cache.store.hang("batch_exists")
        cache.client.query(["f" * 64])
        cache.now += 100.0
        cache.client.poll()
        cache.calm()
        assert cache.client.up and cache.buffer.gauges()["store_up"] == used


@pytest.mark.parametrize("left_s", [0.0, 2.0])
def test_a_shutdown_waits_for_all_threads_together(left_s: float, monkeypatch: pytest.MonkeyPatch):
    """Guards against a shutdown that waits for one thread after the other: eight could take 80 s,
    and a supervisor kills a server that takes so long. The store's close gets the rest of the
    common time, whatever its deadline."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)

    class Slow(ManualThreads):
        def close(self, until: float) -> bool:
            clock.now = max(clock.now, until - left_s)
            return left_s > 0

    cache = Cache(threads=Slow)
    cache.client.settings = dataclasses.replace(cache.client.settings, deadline=3600.0)
    cache.store.close = cache.store.hang("close").pass_through
    for module in (pipelines, store_client):
        monkeypatch.setattr(module, "time", clock)
    cache.waits.clear()
    assert not cache.buffer.close()
    assert cache.waits == ([left_s] if left_s else [])
    assert clock.now == 100.0 + pipelines.CLOSE_S - left_s


def test_a_shutdown_drops_queued_calls():
    """Guards against queued calls of a slow store that use up the shutdown's time."""
    cache = Cache()
    for number in range(5):
        cache.want(f"r{number}", prompt(number, 4))
    cache.step(work=False)
    assert cache.buffer.prefetches.calls.queries and cache.buffer.close()
    cache.work()
    assert not cache.store.calls
