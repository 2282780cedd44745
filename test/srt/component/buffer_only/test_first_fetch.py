"""Where one rank decides, the first fetch of a hit follows its query without another step."""

from __future__ import annotations

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, check_idle
from component.buffer_only.test_prefetch import admit_in_line
from component.buffer_only.test_prefetch_line import measured, stored
from sglang.srt.mem_cache.buffer_only import fetch
from sglang.srt.mem_cache.buffer_only.patience import MOST_S
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


def leave(cache: Cache, *rids: str) -> None:
    """Their clients are gone, and nothing is left of them."""
    for rid in rids:
        cache.tree.release_aborted_request(rid)
    cache.settle()
    check_idle(cache)


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


def test_nothing_is_prepared_for_a_miss(monkeypatch: pytest.MonkeyPatch):
    """Guards against work on the scheduler's thread, before it can admit the request, for a fetch
    that most prompts do not have."""
    monkeypatch.setattr(fetch, "slots_of", None)
    cache = asked(0)
    cache.work()
    cache.step(work=False)
    assert cache.state("r") is State.MISSED
    leave(cache, "r")


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
    leave(cache, "r")


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
    leave(cache, "r")


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


@pytest.mark.parametrize("together", [False, True])
def test_one_prefix_is_reserved_for_once(together: bool):
    """Whoever else begins with it, in the same step or while it comes, fetches nothing of it, also
    where the stage has room for both."""
    cache = stored([PROMPT[: 4 * PAGE]], alone=True, pages=64)
    prompts = {"r": PROMPT, "s": prompt(9, 2, base=PROMPT[: 4 * PAGE])}
    for rid, tokens in prompts.items():
        cache.want(rid, tokens)
        if not together:
            cache.step(work=False)
            cache.threads["query"].run()
            cache.step(work=False)
            check(cache)
    if together:
        cache.step(work=False)
        assert len(cache.buffer.prefetches.fetches.reserved) == 1
    assert admit_in_line(cache, prompts, lambda: check(cache)) == 8 * PAGE
    assert len(fetched(cache)) == 4
    cache.settle()
    check_idle(cache)


def prompt_store(hit: int, **changes: object) -> Cache:
    """A store that has ``hit`` pages of the prompt and answers at once, where somebody waits; and
    batches of a second."""
    cache = stored([PROMPT[: hit * PAGE]] if hit else [], alone=True, **changes)
    cache.buffer.ran(1.0, 0)
    for thread in cache.threads.values():
        thread.prompt, thread.waits = thread.name == "query", []
    return cache


def waits(cache: Cache) -> list[float]:
    return cache.threads["query"].waits


def test_a_miss_that_is_known_at_once_waits_for_no_batch():
    """The next step may be a batch away."""
    cache = prompt_store(0)
    cache.want("r", PROMPT)
    cache.step(work=False)
    check(cache)
    assert cache.state("r") is State.MISSED and cache.tree.check_prefetch_progress("r")
    assert waits(cache) == [MOST_S] and cache.stage.used() == 0
    assert cache.compute(PROMPT, rid="r") == 0
    cache.settle()
    check_idle(cache)


def test_a_hit_that_is_known_at_once_is_on_its_way():
    """It is fetched while the batch runs that is formed in this step."""
    cache = prompt_store(4)
    cache.want("r", PROMPT)
    cache.step(work=False)
    check(cache)
    assert cache.state("r") is State.FETCHING and cache.stage.used() == 4
    cache.step()
    assert cache.tree.check_prefetch_progress("r")
    assert cache.compute(PROMPT, rid="r") == 4 * PAGE
    cache.settle()
    check_idle(cache)


def test_a_store_that_does_not_answer_at_once_is_waited_for_once():
    """Then in every second step that asks it, and so on; its answers are taken as they come."""
    cache = prompt_store(0)
    cache.threads["query"].prompt = False
    for number in range(3):
        cache.want(f"r{number}", prompt(number, 5))
        cache.step(work=False)
        check(cache)
        assert cache.state(f"r{number}") is State.QUERYING
        assert waits(cache) == [MOST_S] * (1, 1, 2)[number]
    cache.step()
    for number in range(3):
        assert cache.tree.check_prefetch_progress(f"r{number}")
        cache.tree.release_aborted_request(f"r{number}")
    cache.settle()
    check_idle(cache)


def test_nobody_waits_for_an_answer_where_the_server_is_full():
    """Who could have been admitted in an earlier step was not: nobody behind it gets in either."""
    cache = prompt_store(0)
    for number in range(3):
        cache.want(f"r{number}", prompt(number, 5))
        cache.now += 0.1
        cache.step(work=False)
        assert waits(cache) == [MOST_S]
    cache.buffer.prefetches.in_line(["r1", "r2"])  # r0 runs, and nobody is known to be kept out
    cache.want("r3", prompt(3, 5))
    cache.now += 0.1
    cache.step(work=False)
    assert waits(cache) == [MOST_S] * 2
    leave(cache, "r1", "r2", "r3")


def test_nobody_waits_for_an_answer_where_no_place_is_free():
    """By the server's own count: with nobody else in line nothing shows it, and the step would take
    longer for a request that does not get in."""
    cache = prompt_store(0)
    for full in (True, False):
        cache.want(f"r{full}", prompt(full, 5))
        cache.buffer.prefetches.in_line(["rTrue", "rFalse"], full)
        cache.now += 0.1
        cache.step(work=False)
        assert waits(cache) == ([] if full else [MOST_S])
    leave(cache, "rTrue", "rFalse")


def test_what_is_asked_again_is_not_waited_for():
    """Its request is ready, and the answer may be another miss."""
    cache = prompt_store(0)
    cache.want("r", PROMPT)
    cache.step(work=False)
    cache.now += 1.0
    cache.step(work=False)
    assert len(cache.buffer.prefetches.queries.under_way) == 1 == len(waits(cache))
    leave(cache, "r")


def test_best_effort_waits_for_no_answer():
    """Its requests are admitted with what is there, whatever the answer will be."""
    cache = prompt_store(0, hicache_storage_prefetch_policy="best_effort")
    cache.want("r", PROMPT)
    cache.step(work=False)
    assert cache.state("r") is State.QUERYING and waits(cache) == []
    leave(cache, "r")


def test_ranks_do_not_look_twice():
    """What one of them knows by then another may not."""
    cache = stored([])
    cache.buffer.ran(1.0, 0)
    cache.threads["query"].prompt = True
    cache.want("r", PROMPT)
    cache.step(work=False)
    assert cache.state("r") is State.QUERYING and waits(cache) == []
    leave(cache, "r")
