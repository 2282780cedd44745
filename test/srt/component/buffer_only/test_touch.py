"""Prefixes that the device has all the time: the store is told that they are used, and has them
written again when it has lost them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, nodes
from component.buffer_only.scenes import steps

BASE = prompt(1, 3)
LONG = prompt(2, 3, base=BASE)


def hot() -> Cache:
    """The tree and the store have ``LONG``, in two nodes; it was just written."""
    cache = Cache(pages=32)
    for tokens in (BASE, LONG):
        cache.compute(tokens)
        cache.settle()
    use(cache)
    cache.store.calls.clear()
    return cache


def later(cache: Cache) -> None:
    """When what is used is looked up again."""
    cache.now += 11.0
    cache.step()


def use(cache: Cache) -> None:
    """A request that finds everything on the device."""
    cache.compute(LONG)
    steps(cache, 3)


def test_a_prefix_in_use_is_looked_up():
    """A store that evicts what nobody asks for would lose first what is used most. One look-up for
    the whole path, and not for each request."""
    cache = hot()
    use(cache)
    assert cache.store.asked("batch_exists") == [], "it was written a moment ago"
    for _ in range(3):
        later(cache)
        use(cache), use(cache)
    assert cache.store.asked("batch_exists") == [cache.keys(LONG)] * 3


@pytest.mark.parametrize("loaded", [False, True])
def test_what_a_request_has_brought(loaded: bool):
    """At its end the store has just taken it, or given it: with prompts that share nothing, each
    would be asked for once more than is of use."""
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
def test_what_the_store_has_lost_is_written_again(page: int | None):
    """Believed to be stored, it never would be; and all behind it is out of reach meanwhile. A
    store that fails has lost nothing, or every fault would have all that is in use written
    again."""
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
    """Guards against pages that are counted as lost since they lie behind one."""
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
    first, *others = cache.store.asked("batch_exists")
    assert first == cache.keys(sessions[0])
    assert others == [cache.keys(tokens)[3:] for tokens in sessions[1:]]


@pytest.mark.hazard("split-while-under-way")
@pytest.mark.parametrize("then", [1, 2, 4, 5, "flush", "evict", "clear"])
def test_a_path_that_changes_while_it_is_looked_up(then: int | str):
    """What is lost is counted from the start of the path, whatever its nodes are by then: split, or
    gone from the tree; or the store was cleared since."""
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
