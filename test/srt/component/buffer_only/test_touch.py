"""Prefixes that the device has all the time: the store is told that they are used, and has them
written again when it has lost them."""

from __future__ import annotations

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, check_idle, nodes
from component.buffer_only.ranks import Ranks

BASE = prompt(1, 3)
LONG = prompt(2, 3, base=BASE)


def hot(**changes: object) -> Cache:
    """The tree and the store have ``LONG``, in two nodes; it was just written."""
    cache = Cache(pages=32, **changes)
    for tokens in (BASE, LONG):
        cache.compute(tokens)
        cache.settle()
    use(cache)
    cache.store.calls.clear()
    return cache


def use(cache: Cache) -> None:
    """A request that finds everything on the device."""
    cache.compute(LONG)
    for _ in range(3):
        cache.step()


def looked_up(cache: Cache) -> list[list[str]]:
    return [keys for method, keys in cache.store.calls if method == "batch_exists"]


def test_a_prefix_in_use_is_looked_up():
    """A store that evicts what nobody asks for would lose first what is used most. One look-up for
    the whole path, and not for each request."""
    cache = hot()
    use(cache)
    assert looked_up(cache) == [], "it was written a moment ago"
    for _ in range(3):
        cache.now += 11.0
        cache.step()
        use(cache), use(cache)
    assert looked_up(cache) == [cache.keys(LONG)] * 3
    check_idle(cache)


def test_what_a_request_alone_has_brought_is_not_looked_up():
    """At its end the store has just taken it, or given it: with prompts that share nothing, each
    would be asked for once more than is of use."""
    cache = Cache(pages=32)
    cache.compute(LONG)
    cache.settle()
    cache.store.calls.clear()
    use(cache)
    assert looked_up(cache) == []
    cache.evict(1000)
    cache.serve("r", [*LONG, 0])
    cache.settle()
    use(cache)
    keys = cache.keys(LONG)
    assert looked_up(cache) == [keys[:1], keys[1:]], "before it was fetched, and not again"
    check_idle(cache)


@pytest.mark.parametrize("loaded", [False, True])
def test_the_end_of_a_new_path_makes_all_of_it_recent(loaded: bool):
    """Where requests share a beginning, each that adds to it has the store keep the beginning too,
    in less than the time in which it is asked for by itself."""
    cache = Cache(pages=32)
    if loaded:
        cache.compute(LONG)
        cache.settle()
        cache.evict(1000)
    for _ in range(3):
        cache.compute(BASE)
        cache.settle()
    cache.store.calls.clear()
    (cache.serve("r", [*LONG, 0]) if loaded else cache.compute(LONG))
    cache.settle()
    use(cache)
    assert looked_up(cache).count(cache.keys(LONG)) == 1
    check_idle(cache)


@pytest.mark.hazard("stale-beliefs")
@pytest.mark.parametrize("page", range(6))
def test_what_the_store_has_lost_is_written_again(page: int):
    """Believed to be stored, it never would be; and all behind it is out of reach meanwhile."""
    cache = hot()
    keys = cache.keys(LONG)
    cache.store.drop(keys[page])
    cache.now += 11.0
    cache.step()
    use(cache)
    assert sum(node.stored for node in nodes(cache.tree)) == page * PAGE
    check_idle(cache)
    use(cache)
    cache.settle()
    assert set(cache.store.content) == set(keys)
    assert all(node.storage_backed for node in nodes(cache.tree))
    assert cache.buffer.context.counters["store_lost_pages"] == 6 - page
    check_idle(cache)


def test_a_store_that_fails_has_lost_nothing():
    """Or every fault would have all that is in use written again."""
    cache = hot()
    cache.store.fail("batch_exists")
    cache.now += 11.0
    cache.step()
    use(cache)
    assert all(node.storage_backed for node in nodes(cache.tree))
    check_idle(cache)


@pytest.mark.hazard("split-while-under-way")
@pytest.mark.parametrize("cut", [1, 2, 4, 5])
def test_a_path_is_split_while_it_is_looked_up(cut: int):
    """What is lost is counted from the start of the path, whatever its nodes are by then."""
    cache = hot()
    cache.store.drop(cache.keys(LONG)[3])
    cache.now += 11.0
    cache.step()
    cache.compute(LONG)
    cache.step(work=False)
    assert cache.buffer.touches.running
    cache.match(LONG[: cut * PAGE])
    cache.step()
    assert sum(node.stored for node in nodes(cache.tree)) == 3 * PAGE
    check(cache)


@pytest.mark.parametrize("end", ["flush", "evict", "clear"])
def test_a_path_that_is_gone_when_the_answer_comes(end: str):
    """The answer is about nodes that are not in the tree any more, or about a store that was
    cleared since."""
    cache = hot()
    cache.store.drop(cache.keys(LONG)[1])
    cache.now += 11.0
    cache.step()
    cache.compute(LONG)
    cache.step(work=False)
    if end == "evict":
        cache.evict(1000)
    else:
        cache.flush() if end == "flush" else cache.tree.clear_storage_backend()
    cache.compute(BASE)
    cache.settle()
    cache.step()
    assert set(cache.keys(BASE)) <= set(cache.store.content)
    check_idle(cache)


def test_one_rank_has_lost_a_page():
    """The KV of all ranks is needed: it is lost for all of them."""
    ranks = Ranks(2, pages=32)
    ranks.each(lambda cache: cache.compute(BASE))
    ranks.live(6)
    first = ranks.caches[0]
    first.store.drop(first.keys(BASE)[2])
    for cache in ranks.caches:
        cache.now += 11.0
    ranks.live()
    ranks.each(lambda cache: cache.compute(BASE))
    ranks.live(4)
    assert ranks.each(lambda cache: nodes(cache.tree)[0].stored) == 2 * PAGE
    ranks.each(lambda cache: cache.compute(BASE))
    ranks.live(6)
    assert ranks.each(lambda cache: nodes(cache.tree)[0].storage_backed)
    assert set(first.keys(BASE)) <= set(first.store.content)
    ranks.close()
