"""When a hit is fetched, and whether: where one rank decides, its first fetch follows its query
without another step, and a step waits a little for the answers to requests that have just arrived;
what is computed instead, by how fast the store and the model are."""

from __future__ import annotations

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.ranks import Ranks
from component.buffer_only.scenes import admit_in_line, measured, steps, stored
from component.buffer_only.test_prefetch import ALONE, pages_fetched
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.worth import MOST_S, Choice

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
    """Then after one step that asks it and is given no time, after two, four and so on, up to 64: a
    slow store costs next to nothing. One that answers in time again is waited for again."""
    cache = prompt_store()
    cache.threads["query"].prompt = False
    waits, at = cache.threads["query"].waits, []
    for number in range(330):
        cache.threads["query"].prompt = number > 255
        cache.want(f"r{number}", prompt(number, 5))
        cache.step(work=False)
        if waits:
            at.append(number)
            waits.clear()
        cache.step()
        assert cache.tree.check_prefetch_progress(f"r{number}")
        cache.buffer.prefetches.in_line([])
    assert at == [0, 2, 5, 10, 19, 36, 69, 134, 199, *range(264, 330)]


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


# ---- load or recompute ----


@ALONE
@pytest.mark.parametrize(
    ("call_s", "in_store", "pages", "always", "choice", "hit"),
    [
        # Sixteen tokens take 16 ms to compute: nobody waits for a call of a second for them.
        (1.0, 5, 5, False, Choice.UNASKED, 0),
        (1.0, 5, 5, True, Choice.UNMEASURED, 4),
        # All that is missing would take longer to compute than to fetch, what there is does not.
        (0.03, 4, 10, False, Choice.SLOWER, 0),
        # Twenty-five pages would take two rounds of calls, of 60 ms each, and 100 ms to compute;
        # the store has those of the first round.
        (0.06, 24, 26, False, Choice.FASTER, 24),
    ],
)
def test_what_is_fetched(
    call_s: float, in_store: int, pages: int, always: bool, choice: Choice, hit: int, alone: bool
):
    """No clock moves meanwhile."""
    tokens = prompt(1, pages)
    cache = stored(tokens[: in_store * PAGE], alone=alone, settings={"always_fetch": always})
    measured(cache, call_s)
    assert cache.serve("r", tokens) == hit * PAGE
    assert cache.buffer.context.choices == {choice: 1}
    assert hit or not cache.store.asked("batch_get_v1")


@ALONE
@pytest.mark.parametrize("in_store", [0, 5], ids=["nothing is stored", "all is stored"])
def test_one_in_sixteen_waits_for_a_slow_store(in_store: int, alone: bool):
    """To see whether it is still slow. An answer takes a step of the scheduler, and so would every
    request whose few new tokens are computed sooner than anything is fetched."""
    tokens = prompt(1, 5)
    cache = stored(tokens[: in_store * PAGE], alone=alone)
    waits = []
    for number in range(48):
        measured(cache, 1.0)
        cache.want(f"r{number}", tokens)
        cache.step(work=False)
        waits.append(not cache.tree.check_prefetch_progress(f"r{number}"))
        steps(cache, 3)
        cache.buffer.prefetches.in_line([])
    assert waits == ([False] * 15 + [True]) * 3
    assert cache.buffer.context.choices[Choice.TRIAL] == (3 if in_store else 0)


@ALONE
def test_a_fetch_goes_on_when_the_rest_is_found(alone: bool):
    """The calls that are under way for a hit of twelve pages would count against the fourteen that
    it has grown to, as if all were still to come and behind them: it would be given up for slow."""
    tokens = prompt(1, 15)
    cache = stored(tokens, alone=alone)
    content = dict(cache.store.content)
    cache.store.drop(*list(content)[12:])
    measured(cache, 0.04)
    cache.want("r", tokens)
    for _ in range(6):
        cache.threads["query"].run()
        cache.calm()
        steps(cache, 1, work=False)
        if cache.state("r") is State.FETCHING and cache.store.content != content:
            assert cache.stage.used() == 12
            cache.store.content.update(content)
            cache.now += 0.6
    assert cache.state("r") is State.FETCHING and cache.stage.used() == 12
    assert cache.run("r", tokens) == 14 * PAGE
    assert cache.buffer.context.choices == {Choice.FASTER: 1}


def test_a_slow_hit_comes_in_time_for_the_end_of_the_line():
    """Those before it compute for longer than its call takes."""
    prompts = {f"r{number}": prompt(number, 5) for number in range(4)}
    cache = stored(prompts["r3"])
    measured(cache, 0.05)
    for rid, tokens in prompts.items():
        cache.want(rid, tokens)
    steps(cache, 4)
    assert [cache.state(rid) for rid in prompts] == [State.MISSED] * 3 + [State.STAGED]
    assert cache.buffer.context.choices == {Choice.UNASKED: 3, Choice.FASTER: 1}


@pytest.mark.hazard("ranks-part-in-collective")
@pytest.mark.parametrize("slow", ["lookups", "fetches"])
def test_ranks_go_by_the_slowest(slow: str):
    """Or one would ask for, or fetch, what the other one computes."""
    ranks = Ranks(2)
    ranks.store(prompt(1, 5))
    for cache, seconds in zip(ranks.caches, (5.0, 1e-6), strict=True):
        if slow == "fetches":
            measured(cache, seconds)
        else:
            cache.buffer.ran(1.0, 1000)
            cache.buffer.prefetches.calls.query_seconds.add(seconds)
    ranks.live()
    ranks.each(lambda cache: cache.want("r", prompt(1, 5)))
    ranks.live()
    assert ranks.each(lambda cache: cache.tree.check_prefetch_progress("r"))
    assert ranks.each(lambda cache: dict(cache.buffer.context.choices)) == {Choice.UNASKED: 1}
