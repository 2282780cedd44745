"""A store that does not return: hits are lost, and the pages that it may still use are kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, check_idle, nodes
from component.store_parts.scripted_store import ScriptedStore
from sglang.srt.mem_cache.buffer_only.read_state import State
from sglang.srt.mem_cache.buffer_only.stage import Direction

PROMPT = prompt(1, 5)


@pytest.fixture
def cache() -> Iterator[Cache]:
    """The store has ``PROMPT``, the tree is empty."""
    store = ScriptedStore()
    found = Cache(store)
    found.compute(PROMPT)
    found.settle()
    found.flush()
    yield found
    store.open_all()


def let_go(cache: Cache) -> None:
    """The hanging call returns; wait for the thread that it ran on."""
    busy = cache.buffer.parts.store._guard.busy()
    cache.store.open_all()
    for one in busy:
        one.returned.exception(10)
    cache.settle()


def test_a_read_that_hangs(cache: Cache):
    """The request computes; the staging pages are not lent again before the call has returned, and
    what it then writes lands in nobody's pages."""
    gate = cache.store.hang("batch_get_v1")
    assert cache.serve("r", PROMPT) == 0
    assert gate.entered.is_set()
    (read,) = cache.buffer.reads.live
    assert read.state is State.LINGERING and read.rid == "r"
    kept = set(read.lease.pages)
    for number in range(10, 16):
        cache.compute(prompt(number, 3))
        cache.step()
        check(cache)
        assert not any(kept & set(op.lease.pages) for op in cache.buffer.writes.ops)
    assert cache.stage.used(Direction.READ) == 4
    let_go(cache)
    assert set(cache.store.written) <= kept
    check_idle(cache)


def test_a_write_that_hangs(cache: Cache):
    """The node is not taken for stored, and the pages stay until the store has read them."""
    cache.store.hang("batch_set_v1")
    cache.compute(prompt(2, 3))
    for _ in range(4):
        cache.step()
    (op,) = cache.buffer.writes.ops
    assert op.lingering and cache.stage.used(Direction.WRITE) == 3
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
    cache.buffer.writes.intents.clear()
    for node in nodes(cache.tree):
        node.intent = None
    for _ in range(5):
        cache.step()
    assert not cache.buffer.busy
    cache.flush()
    assert cache.stage.used(Direction.READ) == 4
    let_go(cache)
    check_idle(cache)


def test_a_query_that_hangs(cache: Cache):
    """It holds no pages, so that nothing is left of it when the deadline is over."""
    cache.store.hang("batch_exists")
    assert cache.serve("r", PROMPT) == 0
    assert not cache.buffer.reads.live
    let_go(cache)
    check_idle(cache)
