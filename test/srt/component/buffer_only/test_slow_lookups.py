"""A store whose lookups take long: what it would have is computed instead of waited for."""

from __future__ import annotations

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check_idle
from component.buffer_only.ranks import Ranks
from component.buffer_only.test_stalls import DeadStore, Pace, PacedThreads, stream
from sglang.srt.mem_cache.buffer_only.worth import Choice


@pytest.mark.parametrize("dead", [False, True], ids=["misses", "errors"])
@pytest.mark.parametrize("alone", [False, True])
def test_most_do_not_wait_for_slow_lookups(alone: bool, dead: bool):
    """A store that has nothing, or fails, in two seconds, and 33 requests a second: two lookups run
    side by side, so that each request would wait for all before it, up to its deadline."""
    pace, store = Pace(2.0), DeadStore()
    store.dead = dead
    cache = Cache(
        store, tokens=1200 * PAGE, alone=alone, threads=lambda *args: PacedThreads(pace, *args)
    )
    pace.clock = lambda: cache.now
    cache.buffer.ran(1.0, 1000)
    waits = stream(cache, [prompt(number, 6) for number in range(300)])
    first = 2 * 33 + 2  # nothing is known before the first answer
    assert max(waits) < 11
    later = sorted(waits)[:-first]
    assert later[int(len(later) * 0.9)] <= 0.1, "all but one in sixteen are admitted at once"
    assert cache.buffer.context.choices[Choice.UNASKED] > 200
    # It is found out that the store is well again.
    pace.call_s, store.dead = 0.0, False
    cache.now += 100
    cache.flush()
    cache.settle()
    before = cache.buffer.context.choices[Choice.UNASKED]
    stream(cache, [prompt(500 + number, 6) for number in range(200)])
    assert cache.buffer.context.choices[Choice.UNASKED] - before < 150
    cache.flush()
    cache.settle()
    check_idle(cache)


def test_ranks_go_by_the_slowest_lookup():
    """Or one would ask for what the other one computes."""
    ranks = Ranks(2)
    ranks.each(lambda cache: cache.buffer.ran(1.0, 1000))
    ranks.caches[1].buffer.prefetches.queries.seconds.add(1.0)
    ranks.live(1)
    ranks.each(lambda cache: cache.want("r", prompt(1, 5)))
    ranks.live(1)
    assert ranks.each(lambda cache: cache.tree.check_prefetch_progress("r"))
    assert ranks.each(lambda cache: dict(cache.buffer.context.choices)) == {Choice.UNASKED: 1}
    ranks.close()


@pytest.mark.parametrize("alone", [False, True])
def test_slow_lookups_that_are_given_up_are_learned(alone: bool):
    """With the policy ``timeout`` each one is given up before its answer: that it took longer than
    the others is known all the same."""
    pace = Pace(5.0)
    cache = Cache(
        tokens=1200 * PAGE,
        alone=alone,
        threads=lambda *args: PacedThreads(pace, *args),
        settings={"policy": "timeout"},
    )
    pace.clock = lambda: cache.now
    cache.buffer.ran(1.0, 1000)
    stream(cache, [prompt(0, 6)])
    assert cache.buffer.context.counters["prefetch_timeouts"] == 1
    cache.now += 10
    cache.step()
    waits = stream(cache, [prompt(number, 6) for number in range(1, 11)])
    assert max(waits) == 0 and cache.buffer.context.choices[Choice.UNASKED] == 10
