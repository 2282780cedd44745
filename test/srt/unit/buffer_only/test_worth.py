"""Load or recompute: the arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from sglang.srt.mem_cache.buffer_only.worth import (
    TRIAL_EVERY,
    Choice,
    Hit,
    Mean,
    Speeds,
    choose,
    fetch_seconds,
    full_rounds,
)

#: A call of 10 ms for 8 MB; a query of 2 ms; 10,000 tokens a second.
SPEEDS = Speeds(call_us=10_000, call_bytes=8_000_000, query_us=2_000, tokens_per_s=10_000)


@pytest.mark.parametrize(
    ("hit", "seconds"),
    [
        (Hit(1000, calls=1, call_bytes=8_000_000), 0.01),
        (Hit(1000, calls=1, call_bytes=100), 0.01),
        (Hit(1000, calls=1, call_bytes=16_000_000), 0.02),
        (Hit(1000, calls=4, call_bytes=8_000_000), 0.01),
        (Hit(1000, calls=5, call_bytes=8_000_000), 0.02),
        (Hit(1000, calls=1, call_bytes=8_000_000, calls_ahead=8), 0.03),
        (Hit(1000, calls=1, call_bytes=8_000_000, queries=3), 0.016),
    ],
)
def test_how_long_a_fetch_takes(hit: Hit, seconds: float):
    """In rounds of four calls, each as long as its bytes, or as a call of the mean size."""
    assert fetch_seconds(SPEEDS, hit, side_by_side=4) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("tokens", "tokens_ahead", "choice"),
    [(101, 0, Choice.FASTER), (99, 0, Choice.SLOWER), (50, 51, Choice.FASTER)],
)
def test_who_is_first(tokens: int, tokens_ahead: int, choice: Choice):
    """A hit of 10 ms against the time to compute it; what is fetched while the request waits for
    others costs it nothing."""
    hit = Hit(tokens, calls=1, call_bytes=8_000_000, tokens_ahead=tokens_ahead)
    assert choose(SPEEDS, hit, 4, 0) is choice


def test_a_hit_no_part_of_which_is_first():
    """Whatever is under way and ahead, the rounds that are looked at tell for all parts."""
    both = set()
    for calls, ahead, waits, ms in itertools.product(
        range(1, 20), range(6), (0, 60, 150), range(5, 60, 5)
    ):

        def slower(count: int, ahead=ahead, waits=waits, ms=ms) -> bool:
            speeds = Speeds(call_us=ms * 1000, call_bytes=10, tokens_per_s=1000)
            return choose(speeds, Hit(10 * count, count, 10, ahead, waits), 4, 0) is Choice.SLOWER

        looked_at = all(slower(count) for count in {calls, *full_rounds(calls, ahead, 4)})
        assert looked_at == all(slower(count) for count in range(1, calls + 1))
        both.add((looked_at, slower(calls)))
    assert both == {(True, True), (False, True), (False, False)}


@pytest.mark.parametrize("missing", ["call_bytes", "tokens_per_s"])
def test_what_was_never_measured_is_tried(missing: str):
    """Or nothing would ever be known of it."""
    hit = Hit(1, calls=100, call_bytes=8_000_000)
    assert choose(replace(SPEEDS, **{missing: 0}), hit, 4, 0) is Choice.UNMEASURED


def test_lookups_alone_may_take_longer_than_computing():
    """Of a store that has nothing no call is ever measured."""
    speeds = replace(SPEEDS, call_bytes=0, call_us=0)
    hit = Hit(25, calls=1, call_bytes=8_000_000, queries=1)
    assert choose(speeds, hit, 4, 0) is Choice.UNMEASURED
    assert choose(speeds, replace(hit, queries=2), 4, 0) is Choice.SLOWER


def test_a_slow_store_is_tried_now_and_then():
    """It may be faster by now, which only a fetch can tell."""
    hit, choices = Hit(1, calls=1, call_bytes=8_000_000), []
    for row in range(TRIAL_EVERY):
        choices.append(choose(SPEEDS, hit, 4, row))
    assert choices == [Choice.SLOWER] * (TRIAL_EVERY - 1) + [Choice.TRIAL]


def test_a_mean_that_forgets():
    """The first value counts whole, and an old one less and less."""
    mean = Mean(keep=0.5)
    assert mean.value == 0
    mean.add(10.0)
    assert mean.value == 10.0
    mean.add(40.0)
    assert mean.value == pytest.approx((0.5 * 10 + 40) / 1.5)
    for _ in range(40):
        mean.add(7.0)
    assert mean.value == pytest.approx(7.0)
