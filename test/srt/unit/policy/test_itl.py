"""The bound on inter-token latency: the allowed time of a chunk, and its largest size."""

from __future__ import annotations

import dataclasses
import random
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.policy.chunk_times import (
    GAIN,
    TOLERATED,
    UNKNOWN,
    Measured,
    StepTimes,
    TokenGaps,
    agreed_costs,
)
from sglang.srt.disaggregation.policy.pace import MIN_CHUNK, Costs, Limits, Pace

BOUND = 0.1
LIMITS = Limits(tokens=1000, chunk=512, max_itl=BOUND, page=16)
COSTS = st.builds(
    Costs,
    st.none() | st.floats(0, 0.2),
    st.none() | st.floats(0, 0.01),
    st.none() | st.floats(0, 0.1),
    st.floats(0, 2 * BOUND),
)


# ---- the largest chunk ----


@pytest.mark.parametrize(
    ("costs", "tokens"),
    [
        (Costs(0.01, 0.0001, 0.01), 512),  # no bound was agreed on
        (Costs(slack=0.05), MIN_CHUNK),  # costs are unknown
        (Costs(0.01, 0.0, 0.01, slack=0.05), MIN_CHUNK),  # the slope is unknown
        (Costs(0.01, 0.0001, 0.01, slack=0.05), 400),
        (Costs(0.01, 0.0001, 0.01, slack=0.02), 100),
        (Costs(0.01, 0.0001, 0.01, slack=0.1), 512),
        (Costs(0.01, 0.0001, 0.01, slack=0.0105), 5),
        (Costs(0.01, 0.0001, 0.01, slack=0.009), 0),
        (Costs(0.01, 0.0, 0.01, slack=0.009), 0),
        (Costs(0.01, 0.0001, 0.01, slack=0.11), MIN_CHUNK),  # more than the bound: one trial
    ],
)
def test_the_largest_chunk(costs: Costs, tokens: int) -> None:
    """Guards against a formula without the constant, a large first chunk, and an unmeasured
    size."""
    assert costs.largest_chunk(LIMITS) == pytest.approx(tokens, abs=1)


@given(COSTS, st.floats(0, 0.1))
def test_a_chunk_is_expected_within_its_slack(costs: Costs, less: float) -> None:
    """Guards against a chunk that is expected to exceed the bound, and feedback of the wrong
    sign."""
    tokens = costs.largest_chunk(LIMITS)
    assert 0 <= tokens <= LIMITS.chunk
    if costs.slack > BOUND:
        return
    assert costs._replace(slack=max(costs.slack - less, 0.0)).largest_chunk(LIMITS) <= tokens
    if tokens and costs.slope:
        seconds = (costs.constant or 0.0) + costs.slope * tokens
        assert seconds <= costs.slack + 1e-9
        assert tokens == LIMITS.chunk or seconds + costs.slope > costs.slack - 1e-9


@pytest.mark.parametrize(
    ("limits", "least"),
    [
        (LIMITS, MIN_CHUNK),
        (Limits(1000, chunk=32, page=16), 32),
        (Limits(1000, page=128), 128),
        (Limits(1000, chunk=32, page=64), 64),
    ],
)
def test_the_smallest_chunk(limits: Limits, least: int) -> None:
    """Guards against a chunk that ends inside a page, and one that never fits."""
    assert limits.least == least
    bounded = dataclasses.replace(limits, max_itl=BOUND)
    assert Costs(0.0, 1e-6, slack=BOUND / 2).largest_chunk(bounded) >= least


# ---- a gap's time beside its chunk ----

LATE, EARLY = -GAIN * BOUND * (1 - TOLERATED), GAIN * BOUND * TOLERATED


@pytest.mark.parametrize(
    ("rids", "chunks", "seconds", "fits", "gap", "change"),
    [
        pytest.param("a", [], 0.5, True, (0.5, False), 0.0, id="no chunk, no feedback"),
        pytest.param("ab", [], 0.5, True, (0.5, False), 0.0, id="one more begins"),
        pytest.param("b", [], 8.0, True, None, 0.0, id="the earlier requests have ended"),
        pytest.param("", [0.02], 8.0, True, None, 0.0, id="all have ended"),
        pytest.param("a", [0.02], 0.08, True, (0.08, True), LATE, id="a late chunk"),
        pytest.param("a", [0.02], 0.06, True, (0.06, True), EARLY, id="a chunk in time"),
        pytest.param("a", [0.01, 0.01], 0.06, True, (0.06, True), EARLY, id="two in time"),
        pytest.param("a", [None], 0.5, True, (0.5, True), 0.0, id="one of unknown time"),
        pytest.param("a", [], 5.0, False, (5.0, False), EARLY, id="no chunk fits"),
    ],
)
def test_gaps(
    rids: str, chunks: list[float | None], seconds: float, fits: bool,
    gap: tuple[float, bool] | None, change: float,
) -> None:  # fmt: skip
    """Guards against gaps that no request waited for, chunks that count in another gap, a margin
    that no breach widens, and one that never narrows."""
    for bound in (BOUND, None):
        gaps = TokenGaps(bound)
        gaps.chunks.append(0.3)
        assert gaps.step(1.0, frozenset("a"), True) is None
        gaps.chunks.extend(chunks)
        found = gaps.step(1.0 + seconds, frozenset(rids), fits)
        assert found == (gap and pytest.approx(gap))
        expected = None if bound is None else pytest.approx(BOUND / 2 + change)
        assert gaps.slack == expected
        assert not gaps.chunks
    gaps.chunks.extend([0.1] * 1000)  # turns that all end without a decode step
    assert len(gaps.chunks) <= 64


STEPS = st.tuples(
    st.floats(0, 10), st.sampled_from([None, (), (0.02,), (0.02, 0.5)]), st.booleans()
)


@given(st.lists(STEPS))
def test_the_slack_stays_in_its_limits(steps: list[tuple[float, object, bool]]) -> None:
    """Guards against a slack that no vote can carry, one that takes minutes to recover, and ranks
    that agree on the largest."""
    measured, other, at = Measured(BOUND), Measured(BOUND), 0.0
    for seconds, chunks, fits in steps:
        at += seconds
        measured.gaps.chunks.extend([None] if chunks is None else chunks)
        measured.gaps.step(at, frozenset("a"), fits)
        slack = measured.gaps.slack
        assert 0 <= slack <= 2 * BOUND + 1e-9
        assert agreed_costs(measured.votes()).slack == pytest.approx(slack, abs=1e-6)
        agreed = agreed_costs([*map(min, measured.votes(), other.votes())])
        assert agreed.slack == pytest.approx(min(slack, BOUND / 2), abs=1e-6)
    assert Measured().votes() == [UNKNOWN] * 4


def test_chunks_are_expected_by_those_before() -> None:
    """Guards against a chunk that is compared with an average that includes it, and one that is
    compared before any measurement."""
    measured = Measured(BOUND)
    times = StepTimes(measured, blocking=True)
    for number in range(6):
        times.launched(100, number)
        times.hook(number + 0.02 * (1 + number // 5))
    assert [*measured.gaps.chunks][:4] == [None] * 4
    assert [*measured.gaps.chunks][4:] == pytest.approx([0.02, 0.02], rel=0.05)


def test_chunks_that_seem_to_take_several_bounds_are_tried_again() -> None:
    """Guards against a server that computes no local turns any more while requests run."""
    gaps, at = TokenGaps(BOUND), 0.0
    while gaps.slack < 5 * BOUND:
        assert at < 100_000
        at += 1
        gaps.step(at, frozenset("a"), fits=False)
    gaps.chunks.append(5 * BOUND)
    gaps.step(at + 5 * BOUND, frozenset("a"), fits=False)
    assert gaps.slack == 2 * BOUND, "recovers soon"


# ---- the whole control loop ----


class Server:
    """A simulated decode server with an endless queue of turns. Seconds and tokens."""

    def __init__(self, bound: float, constant: float, noise: float, seed: int = 1) -> None:
        self.limits = Limits(tokens=10_000, max_itl=bound, page=16)
        self.measured, self.pace = Measured(bound), Pace(self.limits)
        self._random, self._noise, self.constant = random.Random(seed), noise, constant
        self._at = 0.0
        #: Gaps with a chunk and without; tokens of all chunks.
        self.gaps: dict[bool, list[float]] = {True: [], False: []}
        self.tokens = 0

    def take(self, seconds: float) -> float:
        """Advance the clock by about ``seconds``; return the actual duration."""
        slow = 3.0 if self._random.random() < 0.003 else 1.0
        took = slow * seconds * self._random.lognormvariate(0, self._noise)
        self._at += took
        return took

    def run(self, steps: int) -> None:
        measured, pace, limits = self.measured, self.pace, self.limits
        for _ in range(steps):
            pace.costs = agreed_costs(measured.votes())
            tokens = pace.next_chunk(10_000, 3, delays=True)
            if tokens:
                expected = measured.chunk.at(tokens) if measured.chunk.is_known else None
                measured.gaps.chunks.append(expected)
                measured.chunk.add(tokens, self.take(self.constant + 0.0001 * tokens))
                pace.chunk(tokens, 3)
                self.tokens += tokens
            measured.add_step(self.take(0.01))
            pace.step()
            gap = measured.gaps.step(self._at, frozenset("a"), pace.fits(limits.least, True))
            if gap is not None:
                self.gaps[gap[1]].append(gap[0])


@pytest.mark.parametrize("noise", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("bound", [0.05, 0.1])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_bound_holds_at_p99(seed: int, bound: float, noise: float) -> None:
    """Guards against a margin that is too small for the spread, and against one that allows no
    chunk although there is time."""
    server = Server(bound, 0.005, noise, seed)
    server.run(4000)
    with_chunk = server.gaps[True][len(server.gaps[True]) // 10 :]
    passed = sum(gap > bound for gap in with_chunk)
    assert passed <= 0.015 * len(with_chunk) + 2
    assert quantiles(sum(server.gaps.values(), []), n=100)[98] <= bound
    assert len(with_chunk) > 300 and server.tokens / len(server.gaps[True]) > 50


def test_no_bound_that_can_be_kept() -> None:
    """Guards against a server whose chunks all exceed the bound: one gap in a hundred may."""
    server = Server(0.02, 0.03, noise=0.1)
    server.run(6000)
    every = len(server.gaps[True]) + len(server.gaps[False])
    assert 0 < sum(gap > 0.02 for gap in server.gaps[True]) <= 0.015 * every


def test_a_server_that_was_slow_for_a_while() -> None:
    """Guards against a bound that fits no chunk after one slow moment, and is never tested
    again."""
    server = Server(0.05, 0.005, noise=0.1)
    for server.constant, steps in ((0.005, 500), (0.2, 1000), (0.005, 2000)):
        server.run(steps)
    before = server.tokens
    server.run(1000)
    assert server.tokens - before > 10_000
