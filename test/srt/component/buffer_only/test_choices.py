"""The choice to fetch or compute a hit, by the speeds of the store and the model."""

from __future__ import annotations

import pytest

from component.buffer_only.cache import PAGE, prompt
from component.buffer_only.ranks import Ranks
from component.buffer_only.scenes import measured, steps, stored
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.worth import Choice


@pytest.mark.parametrize(
    ("call_s", "in_store", "pages", "always", "choice", "hit"),
    [
        # Sixteen tokens take 16 ms to compute: no request waits a second for a call.
        (1.0, 5, 5, False, Choice.UNASKED, 0),
        (1.0, 5, 5, True, Choice.UNMEASURED, 4),
        # All missing tokens would take longer to compute than to fetch, the stored ones do not.
        (0.03, 4, 10, False, Choice.SLOWER, 0),
        # Twenty-five pages would take two rounds of calls, of 60 ms each, and 100 ms to compute;
        # the store has the pages of the first round.
        (0.06, 24, 26, False, Choice.FASTER, 24),
    ],
)
def test_a_hit_is_fetched_if_that_is_faster(
    call_s: float, in_store: int, pages: int, always: bool, choice: Choice, hit: int
):
    """Guards against a hit that is fetched although computing is faster, or the other way round."""
    tokens = prompt(1, pages)
    cache = stored(tokens[: in_store * PAGE], settings={"always_fetch": always})
    measured(cache, call_s)
    assert cache.serve("r", tokens) == hit * PAGE
    assert cache.buffer.context.choices == {choice: 1}
    assert hit or not cache.store.asked("batch_get_v1")


@pytest.mark.parametrize(
    ("server", "choice"),
    [("decodes", Choice.UNASKED), ("is full", Choice.FASTER), ("was idle", Choice.FASTER)],
)
def test_steps_of_the_scheduler_count(server: str, choice: Choice):
    """Guards against a request that waits two long steps for tokens that take less time to compute,
    although the store answers in 3 ms; and against steps that count although they cost nothing."""
    tokens = prompt(1, 5)
    cache = stored(tokens)
    measured(cache, 0.003)
    for _ in range(5):
        cache.buffer.prefetches.in_line([], full=server == "is full")
        cache.buffer.is_idle = server == "was idle"
        cache.now += 0.04
        cache.step()
    cache.want("r", tokens)
    steps(cache, 4)
    assert cache.buffer.context.choices == {choice: 1}


@pytest.mark.parametrize("in_store", [0, 5], ids=["not stored", "stored"])
def test_one_in_sixteen_waits_for_a_slow_store(in_store: int):
    """Guards against a slow store that is never measured again, and against requests that all wait
    a step for its answer, although their few new tokens are computed sooner."""
    tokens = prompt(1, 5)
    cache = stored(tokens[: in_store * PAGE])
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


def test_a_slow_hit_comes_in_time_for_the_end_of_the_line():
    """Guards against a missed hit of the last request, which has time while others compute."""
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
def test_all_ranks_use_the_slowest_ranks_times(slow: str):
    """Guards against a rank that queries or fetches tokens that the other one computes."""
    ranks = Ranks(2)
    ranks.store(prompt(1, 5))
    for cache, seconds in zip(ranks.caches, (5.0, 1e-6), strict=True):
        if slow == "fetches":
            measured(cache, seconds)
        else:
            cache.buffer.ran(1.0, 1000)
            cache.buffer.prefetches.calls.query_seconds.add(seconds)
    ranks.live()
    ranks.on_all(lambda cache: cache.want("r", prompt(1, 5)))
    ranks.live()
    assert ranks.on_all(lambda cache: cache.tree.check_prefetch_progress("r"))
    assert ranks.on_all(lambda cache: dict(cache.buffer.context.choices)) == {Choice.UNASKED: 1}
