"""Where one rank decides, the first fetch of a hit follows its query without another step."""

from __future__ import annotations

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, check_idle
from component.buffer_only.test_prefetch_line import measured, stored
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.worth import Choice

PROMPT = prompt(1, 5)


def asked(hit: int = 4, tokens: list[int] = PROMPT, **changes: object) -> Cache:
    """A cache on its own whose store has ``hit`` pages, and is being asked for ``tokens``."""
    cache = stored([PROMPT[: hit * PAGE]] if hit else [], alone=True, **changes)
    cache.want("r", tokens)
    cache.step(work=False)
    check(cache)
    assert cache.state("r") is State.QUERYING
    return cache


def fetched(cache: Cache) -> list[str]:
    return [key for method, keys in cache.store.calls if method == "batch_get_v1" for key in keys]


def test_a_hit_is_there_one_step_after_its_query():
    """A step may take as long as a batch: with a fetch that waits for the scheduler to look, a hit
    would cost two."""
    cache = asked()
    cache.work()
    cache.step(work=False)
    check(cache)
    assert cache.state("r") is State.STAGED and cache.tree.check_prefetch_progress("r")
    assert cache.buffer.context.choices == {Choice.UNMEASURED: 1}
    assert cache.compute(PROMPT, rid="r") == 4 * PAGE
    cache.settle()
    check_idle(cache)


def test_it_is_seen_while_it_is_under_way():
    """The query was answered, what followed it was not: nothing else is fetched meanwhile."""
    cache = asked()
    cache.threads["query"].run()
    for _ in range(3):
        cache.step(work=False)
        check(cache)
        assert cache.state("r") is State.FETCHING
    cache.step()
    assert cache.state("r") is State.STAGED and len(fetched(cache)) == 4
    assert cache.compute(PROMPT, rid="r") == 4 * PAGE
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("hit", [0, 1, 3])
def test_what_was_reserved_and_not_used_goes_back(hit: int):
    """In the step in which the answer is seen."""
    cache = asked(hit)
    assert cache.stage.used() == 4
    cache.work()
    cache.step(work=False)
    check(cache)
    assert cache.stage.used() == hit == len(fetched(cache))
    assert cache.tree.check_prefetch_progress("r")
    assert cache.compute(PROMPT, rid="r") == hit * PAGE
    cache.settle()
    check_idle(cache)


def test_the_rest_of_a_long_hit():
    """What does not fit into the first call is fetched in the usual way."""
    long = prompt(2, 12)
    cache = stored([long], alone=True)
    cache.want("r", long)
    cache.step(work=False)
    assert cache.stage.used() == 6  # half of what fetches may have
    for _ in range(3):
        cache.step()
        check(cache)
    assert cache.state("r") is State.STAGED and len(fetched(cache)) == 11
    assert cache.compute(long, rid="r") == 11 * PAGE
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("when", ["asked", "answered", "fetched"])
@pytest.mark.parametrize("how", ["abort", "flush", "clear", "again"])
def test_nobody_wants_it_any_more(when: str, how: str):
    """Its pages come back when the store has let go of them, whatever it has answered."""
    cache = asked()
    if when != "asked":
        cache.threads["query"].run()
    if when == "fetched":
        cache.threads["fetch"].run()
    if how == "abort":
        cache.tree.release_aborted_request("r")
    elif how == "flush":
        cache.flush()
    elif how == "clear":
        cache.tree.clear_storage_backend()
    else:
        cache.want("r", prompt(9, 5))
    check(cache)
    for _ in range(3):
        cache.step()
        check(cache)
    cache.tree.release_aborted_request("r")
    cache.settle()
    check_idle(cache)


def test_a_hit_that_would_be_slower_is_not_fetched():
    """The choice is made where the answer comes; the scheduler counts it once."""
    cache = stored([PROMPT[: 4 * PAGE]], alone=True)
    measured(cache, 0.03)
    cache.want("r", prompt(2, 6, base=PROMPT[: 4 * PAGE]))
    for _ in range(3):
        cache.step()
        check(cache)
    assert cache.state("r") is State.MISSED and not fetched(cache)
    assert cache.buffer.context.choices == {Choice.SLOWER: 1}
    cache.tree.release_aborted_request("r")
    cache.settle()
    check_idle(cache)


def test_pages_that_were_lost_since_the_query():
    """Between the two calls of the store."""
    cache = asked()
    cache.threads["query"].run()
    cache.store.drop(list(cache.store.content)[2])
    cache.step()
    check(cache)
    assert cache.tree.check_prefetch_progress("r")
    assert cache.compute(PROMPT, rid="r") == 2 * PAGE
    cache.settle()
    check_idle(cache)


def test_nothing_is_reserved_where_pages_are_missed():
    """Queries that may find nothing never have more than half of what fetches may have, and no
    more than half of what is free."""
    cache = stored([], alone=True)
    for number in range(8):
        cache.want(f"r{number}", prompt(number, 5))
    cache.step(work=False)
    check(cache)
    reserved = cache.buffer.prefetches.fetches.reserved
    assert [len(first.staging.pages) for first in reserved] == [4, 2]
    cache.buffer.prefetches.in_line([])
    cache.settle()
    check_idle(cache)
