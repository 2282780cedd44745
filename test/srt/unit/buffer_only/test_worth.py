"""Load or recompute: the arithmetic."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from sglang.srt.mem_cache.buffer_only.worth import TRIAL_EVERY, Chooser, FetchChoice, Mean, Speeds

#: A call of 10 ms for 8 MB; a query of 2 ms; 10,000 tokens a second.
SPEEDS = Speeds(call_us=10_000, call_bytes=8_000_000, query_us=2_000, tokens_per_s=10_000)


def chooser(page_size: int = 100, page_bytes: int = 8_000_000, **changes: int) -> Chooser:
    """Return a chooser for pages that are fetched in one call each."""
    speeds = replace(SPEEDS, **changes)
    return Chooser(page_size, page_bytes, 1, False, Counter(), speeds)


@pytest.mark.parametrize(
    ("pages", "page_bytes", "calls_ahead", "queries", "seconds"),
    [
        (1, 8_000_000, 0, 0, 0.01),
        (1, 100, 0, 0, 0.01),
        (1, 16_000_000, 0, 0, 0.02),
        (4, 8_000_000, 0, 0, 0.01),
        (5, 8_000_000, 0, 0, 0.02),
        (1, 8_000_000, 8, 0, 0.03),
        (1, 8_000_000, 0, 3, 0.016),
    ],
)
def test_the_time_of_a_fetch(
    pages: int, page_bytes: int, calls_ahead: int, queries: int, seconds: float
):
    """A fetch takes rounds of four calls, each as long as its bytes, or as a call of the mean
    size."""
    fetch_s = chooser(page_bytes=page_bytes).fetch_seconds(pages, calls_ahead, queries)
    assert fetch_s == pytest.approx(seconds)


@pytest.mark.parametrize(("queries", "steps"), [(0, 1), (3, 2)])
def test_answers_are_noticed_in_steps(queries: int, steps: int):
    """Guards against a request that waits two long steps for KV that is computed sooner."""
    without_steps_s = chooser().fetch_seconds(1, 0, queries)
    fetch_s = chooser(step_us=20_000).fetch_seconds(1, 0, queries)
    assert fetch_s == pytest.approx(without_steps_s + steps * 0.02)


@pytest.mark.parametrize(
    ("tokens", "tokens_ahead", "choice"),
    [(101, 0, FetchChoice.FASTER), (99, 0, FetchChoice.SLOWER), (50, 51, FetchChoice.FASTER)],
)
def test_the_faster_of_fetch_and_compute(tokens: int, tokens_ahead: int, choice: FetchChoice):
    """A hit of 10 ms against the time to compute it; a fetch that overlaps with the wait for other
    requests costs nothing."""
    choosing = chooser(page_size=tokens)
    assert choosing.choose(1, 0, tokens_ahead, trial=False) is choice
    assert choosing.choices == {choice: 1}


@pytest.mark.parametrize(
    ("call_us", "pages", "asks"), [(40_000, 3, False), (40_000, 4, True), (40_000, 5, True)]
)
def test_a_hit_whose_part_is_faster(call_us: int, pages: int, asks: bool):
    """Four pages come in one round and save the time of that call; five take two rounds."""
    assert chooser(call_us=call_us).asks(pages, 0, 0, queries=0) is asks


@pytest.mark.parametrize("calls_ahead", range(5))
@pytest.mark.parametrize("tokens_ahead", [0, 60, 400])
def test_any_part_of_a_hit_may_be_first(calls_ahead: int, tokens_ahead: int):
    """Guards against a hit that is not fetched although a part of it would arrive before it is
    computed; only two sizes of full calls are checked."""
    outcomes = set()
    for pages, call_us in product(range(1, 30), (1_000, 9_000, 20_000, 30_000, 400_000)):
        choosing = replace(chooser(call_us=call_us), piece_pages=2, page_size=50)
        known = calls_ahead, tokens_ahead, 1
        any_part_is_faster = any(
            choosing.is_faster(part, *known) for part in (pages, *range(2, pages, 2))
        )
        assert choosing.asks(pages, *known) is any_part_is_faster
        outcomes.add(any_part_is_faster)
    assert outcomes == {True, False}


@pytest.mark.parametrize("missing", ["call_bytes", "tokens_per_s"])
def test_an_unmeasured_store_is_tried(missing: str):
    """Without a trial the store's speed would stay unknown."""
    choosing = chooser(page_size=1, **{missing: 0})
    assert choosing.choose(100, 0, 0, trial=False) is FetchChoice.UNMEASURED


def test_lookups_alone_may_take_longer_than_computing():
    """No call is ever measured for a store without hits."""
    choosing = chooser(page_size=25, call_bytes=0, call_us=0)
    assert [choosing.asks(1, 0, 0, queries) for queries in (1, 2)] == [True, False]


@pytest.mark.parametrize("trial", [False, True])
def test_a_slow_store_is_tried_now_and_then(trial: bool):
    """The store may be faster by now, which only a fetch can tell; at once for a request whose
    lookup was made for that purpose."""
    choosing = chooser(page_size=1)
    choices = [choosing.choose(1, 0, 0, trial) for _ in range(TRIAL_EVERY)]
    slower = 0 if trial else TRIAL_EVERY - 1
    assert choices == [FetchChoice.SLOWER] * slower + [FetchChoice.TRIAL] * (TRIAL_EVERY - slower)


def test_a_mean_that_forgets():
    """The first value counts whole, and old values count less and less."""
    mean = Mean(keep=0.5)
    assert mean.value == 0
    mean.add(10.0)
    assert mean.value == 10.0
    mean.add(40.0)
    assert mean.value == pytest.approx((0.5 * 10 + 40) / 1.5)
    for _ in range(40):
        mean.add(7.0)
    assert mean.value == pytest.approx(7.0)
