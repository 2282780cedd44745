"""Prefixes that stay on the device: look-ups keep them in the store, and lost pages are written
again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, nodes
from component.buffer_only.scenes import steps

BASE = prompt(1, 3)
LONG = prompt(2, 3, base=BASE)


def hot() -> Cache:
    """Return a cache with ``LONG``, just written, in two nodes of the tree and in the store."""
    cache = Cache(pages=32)
    for tokens in (BASE, LONG):
        cache.compute(tokens)
        cache.settle()
    use(cache)
    cache.store.calls.clear()
    return cache


def later(cache: Cache) -> None:
    """Advance the clock until prefixes in use are looked up again."""
    cache.now += 11.0
    cache.step()


def use(cache: Cache) -> None:
    """Run a request with a full hit on the device."""
    cache.compute(LONG)
    steps(cache, 3)


def test_a_prefix_in_use_is_looked_up():
    """Guards against a store that evicts the prefixes in use first, because it never sees requests
    for them; one look-up for the whole path, not one for each request."""
    cache = hot()
    use(cache)
    assert cache.store.asked("batch_exists") == [], "it was written a moment ago"
    for _ in range(3):
        later(cache)
        use(cache), use(cache)
    assert cache.store.asked("batch_exists") == [cache.keys(LONG)] * 3


@pytest.mark.parametrize("loaded", [False, True])
def test_a_prefix_that_was_just_moved_is_not_looked_up(loaded: bool):
    """Guards against a needless look-up for each prompt without a shared prefix: at a request's end
    its pages have just been stored or loaded."""
    cache = Cache(pages=32)
    if loaded:
        cache.compute(LONG)
        cache.settle()
        cache.evict(1000)
        cache.serve("r", [*LONG, 0])
    else:
        cache.compute(LONG)
    cache.settle()
    use(cache)
    assert cache.store.asked("batch_exists").count(cache.keys(LONG)) == 0


@pytest.mark.hazard("stale-beliefs")
@pytest.mark.parametrize("page", [0, 2, 3, 5, None])
def test_lost_pages_are_written_again(page: int | None):
    """Guards against pages that are never stored because they count as stored, and so make all
    pages behind them unreachable; and against a failed look-up that counts as a loss, after which
    every prefix in use would be written again."""
    cache, keys = hot(), []
    keys = cache.keys(LONG)
    if page is None:
        cache.store.fail("batch_exists")
    else:
        cache.store.drop(keys[page])
    later(cache)
    use(cache)
    good = 6 if page is None else page
    assert sum(node.stored for node in nodes(cache.tree)) == good * PAGE
    use(cache)
    cache.settle()
    assert set(cache.store.content) == set(keys)
    assert all(node.storage_backed for node in nodes(cache.tree))
    assert cache.buffer.context.counters["store_lost_pages"] == (page is not None)


@pytest.mark.parametrize(("lost", "counted"), [(range(0), 0), ((1, 4), 2), (range(30), 30)])
def test_each_lost_page_is_counted(lost: Sequence[int], counted: int):
    """Guards against stored pages that count as lost because they are behind a lost one."""
    cache, tokens = Cache(pages=32, tokens=80 * PAGE), prompt(1, 30)
    cache.compute(tokens)
    cache.settle()
    for page in lost:
        cache.store.drop(cache.keys(tokens)[page])
    later(cache)
    cache.compute(tokens)
    steps(cache, 3)
    assert cache.buffer.context.counters["store_lost_pages"] == counted


@pytest.mark.parametrize("prefix_keys", [False, True])
def test_a_shared_prefix_is_looked_up_once(prefix_keys: bool):
    """Guards against a trunk that is looked up again for each session below it."""
    cache = Cache(pages=64, tokens=80 * PAGE, settings={"pass_prefix_keys": prefix_keys})
    sessions = [prompt(number, 2, base=BASE) for number in range(2, 7)]
    for tokens in sessions:
        cache.compute(tokens)
        cache.settle()
    cache.store.calls.clear()
    later(cache)
    for tokens in sessions:
        cache.compute(tokens)
        steps(cache, 2)
    first, *later_lookups = cache.store.asked("batch_exists")
    assert first == cache.keys(sessions[0])
    assert later_lookups == [cache.keys(tokens)[3:] for tokens in sessions[1:]]


@pytest.mark.hazard("split-while-under-way")
@pytest.mark.parametrize("then", [1, 2, 4, 5, "flush", "evict", "clear"])
def test_a_path_that_changes_while_it_is_looked_up(then: int | str):
    """Guards against a loss that is recorded for wrong nodes: it counts from the start of the path,
    even if nodes were split or evicted, or the store was cleared since."""
    cache = hot()
    cache.store.drop(cache.keys(LONG)[3])
    later(cache)
    cache.compute(LONG)
    cache.step(work=False)
    assert cache.buffer.touches.running
    match then:
        case "flush":
            cache.flush()
        case "evict":
            cache.evict(1000)
        case "clear":
            cache.tree.clear_storage_backend()
        case cut:
            cache.match(LONG[: int(cut) * PAGE])
            cache.step()
            assert sum(node.stored for node in nodes(cache.tree)) == 3 * PAGE
    check(cache)
    cache.compute(LONG)
    cache.settle()
    cache.step()
    assert set(cache.keys(LONG)) <= set(cache.store.content)
