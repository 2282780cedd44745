"""Where one rank decides: the first fetch of a hit follows its query without another step, and a
step waits a little for the answers to requests that have just arrived."""

from __future__ import annotations

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.scenes import admit_in_line, steps, stored
from component.buffer_only.test_prefetch import pages_fetched
from sglang.srt.mem_cache.buffer_only.patience import MOST_S
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.worth import Choice

PROMPT = prompt(1, 5)


@pytest.mark.parametrize("hit", [0, 1, 3, 4])
def test_a_hit_is_there_one_step_after_its_query(hit: int):
    """A step may take as long as a batch: with a fetch that waits for the scheduler to look, a hit
    would cost two. What was reserved for it and is not used goes back in the same step."""
    cache = stored(PROMPT[: hit * PAGE], alone=True)
    cache.want("r", PROMPT)
    steps(cache, 1, work=False)
    assert cache.state("r") is State.QUERYING and cache.stage.used() == 4
    cache.work()
    steps(cache, 1, work=False)
    assert cache.stage.used() == hit == len(pages_fetched(cache))
    assert cache.buffer.context.choices == ({Choice.UNMEASURED: 1} if hit else {})
    assert cache.tree.check_prefetch_progress("r")
    assert cache.compute(PROMPT, rid="r") == hit * PAGE


def test_the_rest_of_a_long_hit():
    """What does not fit into the first call is fetched in the usual way."""
    long = prompt(2, 12)
    cache = stored(long, alone=True)
    cache.want("r", long)
    steps(cache, 1, work=False)
    assert cache.stage.used() == 6  # half of what fetches may have
    steps(cache, 3)
    assert cache.state("r") is State.STAGED and len(pages_fetched(cache)) == 11
    assert cache.compute(long, rid="r") == 11 * PAGE


def test_little_is_reserved_where_pages_are_missed():
    """Queries that may find nothing never have more than half of what fetches may have, and no
    more than half of what is free."""
    cache = Cache(alone=True)
    for number in range(8):
        cache.want(f"r{number}", prompt(number, 5))
    steps(cache, 1, work=False)
    assert sorted(len(staging.pages) for staging in cache.stage.allocated) == [2, 4]


@pytest.mark.parametrize("together", [False, True])
def test_one_prefix_is_reserved_for_once(together: bool):
    """Whoever else begins with it, in the same step or while it comes, fetches nothing of it, also
    where the stage has room for both."""
    cache = stored(PROMPT[: 4 * PAGE], alone=True, pages=64)
    prompts = {"r": PROMPT, "s": prompt(9, 2, base=PROMPT[: 4 * PAGE])}
    for rid, tokens in prompts.items():
        cache.want(rid, tokens)
        if not together:
            steps(cache, 1, work=False)
            cache.threads["query"].run()
            steps(cache, 1, work=False)
    if together:
        steps(cache, 1, work=False)
        assert len(cache.stage.allocated) == 1
    assert admit_in_line(cache, prompts) == 8 * PAGE
    assert len(pages_fetched(cache)) == 4


# ---- a step that waits for answers ----


def prompt_store(hit: int = 0, alone: bool = True, **changes: object) -> Cache:
    """A store that has ``hit`` pages of the prompt and answers at once, where somebody waits; and
    batches of a second."""
    cache = stored(PROMPT[: hit * PAGE], alone=alone, **changes)
    cache.buffer.ran(1.0, 0)
    cache.threads["query"].prompt = True
    cache.threads["query"].waits.clear()
    return cache


@pytest.mark.parametrize(
    ("hit", "state"), [(0, State.MISSED), (4, State.FETCHING)], ids=["a miss", "a hit"]
)
def test_an_answer_that_comes_at_once(hit: int, state: State):
    """The next step may be a batch away: a miss is admitted in this one, and a hit is fetched while
    the batch runs that is formed in it."""
    cache = prompt_store(hit)
    cache.want("r", PROMPT)
    steps(cache, 1, work=False)
    assert cache.state("r") is state and cache.stage.used() == hit
    assert cache.tree.check_prefetch_progress("r") is (hit == 0)
    assert cache.threads["query"].waits == [MOST_S]
    cache.now += 1.0
    steps(cache, 1)
    assert len(cache.threads["query"].waits) == 1, "what is asked again is not waited for"
    assert cache.run("r", PROMPT) == hit * PAGE


def test_a_store_that_does_not_answer_at_once_is_waited_for_once():
    """Then in every second step that asks it, and so on; its answers are taken as they come."""
    cache = prompt_store()
    cache.threads["query"].prompt = False
    for number in range(3):
        cache.want(f"r{number}", prompt(number, 5))
        steps(cache, 1, work=False)
        assert cache.state(f"r{number}") is State.QUERYING
        assert cache.threads["query"].waits == [MOST_S] * (1, 1, 2)[number]
    cache.step()
    assert all(cache.tree.check_prefetch_progress(f"r{number}") for number in range(3))


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("what one of several ranks knows by then another may not", {"alone": False}),
        ("there nobody waits", {"hicache_storage_prefetch_policy": "best_effort"}),
        ("no place is free, by the server's own count", {}),
    ],
)
def test_where_no_step_waits_for_answers(why: str, changes: dict[str, object]):
    """It would take longer for a request that does not get in, or does not care."""
    cache = prompt_store(**changes)
    cache.want("r", PROMPT)
    cache.buffer.prefetches.in_line(["r"], not changes)
    steps(cache, 1, work=False)
    assert cache.state("r") is State.QUERYING and cache.threads["query"].waits == [], why
