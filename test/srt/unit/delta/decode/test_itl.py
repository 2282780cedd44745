"""The bound on inter-token latency: what a chunk may take, and how large it may be."""

from __future__ import annotations

import dataclasses
import random
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.decode.itl import GAIN, TOLERATED, TokenGaps
from sglang.srt.disaggregation.delta.decode.turn_choice import (
    LEAST_CHUNK,
    STEPS_BEFORE_BREACH,
    UNKNOWN,
    Choice,
    Costs,
    Limits,
    Load,
    Measured,
    Pace,
    StepTimes,
    expected_here,
    read,
)

BOUND = 0.1
LIMITS = Limits(tokens=1000, chunk=512, max_itl=BOUND, page=16)
A, B = frozenset({"a"}), frozenset({"b"})

TIMES = st.floats(0, 10)
COSTS = st.builds(
    Costs,
    st.none() | st.floats(0, 0.2),
    st.none() | st.floats(0, 0.01),
    st.none() | st.floats(0, 0.1),
    st.floats(0, 2 * BOUND),
)


# ---- how large a chunk may be ----


@pytest.mark.parametrize(
    ("costs", "tokens"),
    [
        (Costs(0.01, 0.0001, 0.01), 512),  # no bound was agreed on
        (Costs(slack=0.05), LEAST_CHUNK),  # costs are unknown
        (Costs(0.01, 0.0, 0.01, slack=0.05), LEAST_CHUNK),  # the size says nothing
        (Costs(0.01, 0.0001, 0.01, slack=0.05), 400),
        (Costs(0.01, 0.0001, 0.01, slack=0.02), 100),
        (Costs(0.01, 0.0001, 0.01, slack=0.1), 512),
        (Costs(0.01, 0.0001, 0.01, slack=0.0105), 5),
        (Costs(0.01, 0.0001, 0.01, slack=0.009), 0),
        (Costs(0.01, 0.0, 0.01, slack=0.009), 0),
        (Costs(0.01, 0.0001, 0.01, slack=0.11), LEAST_CHUNK),  # more than the bound: one is tried
    ],
)
def test_the_largest_chunk(costs: Costs, tokens: int) -> None:
    """Guards against a formula that forgets the constant, a large first chunk, and a size that
    nobody measured."""
    assert costs.largest_chunk(LIMITS) == pytest.approx(tokens, abs=1)


@given(COSTS)
def test_a_chunk_is_expected_within_its_slack(costs: Costs) -> None:
    """Guards against a chunk that is expected to pass the bound."""
    tokens = costs.largest_chunk(LIMITS)
    assert 0 <= tokens <= LIMITS.chunk
    if tokens and costs.slope and costs.slack <= BOUND:
        assert (costs.constant or 0.0) + costs.slope * tokens <= costs.slack + 1e-9
        more = (costs.constant or 0.0) + costs.slope * (tokens + 1)
        assert tokens == LIMITS.chunk or more > costs.slack - 1e-9


@given(COSTS, st.floats(0, 0.1))
def test_less_slack_is_never_a_larger_chunk(costs: Costs, less: float) -> None:
    """Guards against feedback of the wrong sign."""
    costs = costs._replace(slack=min(costs.slack, BOUND))
    smaller = costs._replace(slack=max(costs.slack - less, 0.0))
    assert smaller.largest_chunk(LIMITS) <= costs.largest_chunk(LIMITS)


@pytest.mark.parametrize(
    ("limits", "least"),
    [
        (LIMITS, LEAST_CHUNK),
        (Limits(1000, chunk=32, page=16), 32),
        (Limits(1000, page=128), 128),
        (Limits(1000, chunk=32, page=64), 64),
    ],
)
def test_the_smallest_chunk(limits: Limits, least: int) -> None:
    """Guards against a chunk that ends inside of a page, and one that never fits."""
    assert limits.least == least
    bounded = dataclasses.replace(limits, max_itl=BOUND)
    assert Costs(0.0, 1e-6, slack=BOUND / 2).largest_chunk(bounded) >= least


# ---- the choice ----


def test_what_does_not_fit_goes_to_prefill() -> None:
    """Guards against a turn that would delay others beyond the bound, however slow prefill is; and
    against a bound that binds where nobody runs."""
    choice, costs = Choice(LIMITS), Costs(0.01, 0.0001, 0.01, slack=0.05)
    for chunk, tokens, reason in (
        (None, 200, "cheaper"),
        (400, 200, "cheaper"),
        (LEAST_CHUNK, 200, "cheaper"),
        (LEAST_CHUNK - 1, 200, "itl"),
        (20, 20, "cheaper"),
        (19, 20, "itl"),
        (0, 1, "itl"),
    ):
        decision = choice.decide(tokens, Load(running=1, chunk=chunk), costs, 9.0)
        assert (decision.local, decision.reason) == (reason != "itl", reason)
    behind = Load(running=1, queued=500, chunk=LEAST_CHUNK - 1)  # a turn that no chunk fits
    assert choice.decide(20, behind, costs, 9.0).reason == "itl"
    always = Choice(Limits(1000, always=True, max_itl=BOUND))
    assert always.decide(200, Load(running=1, chunk=0), costs, 9.0).local
    lost = Choice(Limits(0, when_lost=300, max_itl=BOUND))
    assert lost.without_prefill(200, Load(running=1, chunk=0), costs, "no_prefill").local


def test_small_chunks_are_weighed() -> None:
    """Guards against a turn in many small chunks that is taken to be as soon done as in one."""
    costs = Costs(0.01, 0.0001, 0.01)
    whole = expected_here(448, Load(running=1), costs, LIMITS)
    parts = expected_here(448, Load(running=1, chunk=64), costs, LIMITS)
    assert whole == pytest.approx(0.01 + 0.0548)
    work = 7 * 0.01 + 0.0448
    assert parts == pytest.approx(0.01 + work + 6 * work / 7)  # with as long between chunks


# ---- pace ----


def test_a_chunk_that_does_not_fit_runs_in_one_of_a_hundred_gaps() -> None:
    """Guards against a turn that began and is never computed to its end, and against one whose
    chunks pass the bound more often than at p99."""
    pace, chunks = Pace(0.5), 0
    for _ in range(1000):
        if pace.may_run(3, fits=False):
            pace.chunk(64, 3)
            chunks += 1
        pace.step()
    assert chunks == 1000 // STEPS_BEFORE_BREACH
    assert pace.may_run(0, fits=False)


# ---- what a gap takes beside its chunk ----


def test_gaps() -> None:
    """Guards against gaps that nobody waited for, and chunks that count in another's gap."""
    gaps = TokenGaps()
    assert gaps.step(1.0, A, True) is None
    assert gaps.step(1.5, A | B, True) == (0.5, False)
    gaps.chunks.append(0.3)
    assert gaps.step(2.25, B, True) == (0.75, True)
    gaps.chunks.append(None)
    assert gaps.step(9.0, A, True) is None  # those of before have ended
    assert gaps.step(9.5, A, True) == (0.5, False)
    assert gaps.slack is None


def test_who_has_ended_waits_for_nothing() -> None:
    gaps = TokenGaps(BOUND)
    gaps.step(1.0, A, True)
    assert gaps.step(9.0, frozenset(), True) is None
    assert gaps.step(9.1, A, True) is None
    assert gaps.slack == BOUND / 2


def test_the_rest_follows_late_chunks() -> None:
    """Guards against a margin that no breach widens, and against one that never narrows."""
    gaps = TokenGaps(BOUND)
    gaps.step(0.0, A, True)
    late = GAIN * BOUND
    at = 0.0
    for beside, change in ((0.06, -late), (0.04, late * TOLERATED), (None, 0.0)):
        before, at = gaps.slack, at + 0.02 + (beside or 0.5)
        gaps.chunks.append(None if beside is None else 0.02)
        gaps.step(at, A, True)
        assert gaps.slack - before == pytest.approx(change, abs=late * TOLERATED * 1.01)
    before = gaps.slack
    gaps.step(at + 5.0, A, True)  # no chunk: others' delays are none of theirs
    assert gaps.slack == before
    gaps.step(at + 10.0, A, False)  # no chunk fits
    assert gaps.slack == pytest.approx(before + late * TOLERATED)


@given(st.lists(st.tuples(TIMES, st.sampled_from([None, (), (0.02,), (0.02, 0.5)]), st.booleans())))
def test_the_slack_stays_in_its_limits(steps: list[tuple[float, object, bool]]) -> None:
    """Guards against a slack that no vote can carry, and one that takes minutes to come back."""
    measured, at = Measured(BOUND), 0.0
    for seconds, chunks, fits in steps:
        at += seconds
        measured.gaps.chunks.extend([None] if chunks is None else chunks)
        measured.gaps.step(at, A, fits)
        assert 0 <= measured.gaps.slack <= 2 * BOUND + 1e-9
        slack = read(measured.votes()).slack
        assert slack == pytest.approx(measured.gaps.slack, abs=1e-6)
    assert Measured().votes() == [UNKNOWN] * 4


def test_ranks_agree_on_the_least_slack() -> None:
    """Guards against ranks that take the largest: the smallest number of all is what is agreed."""
    ours, theirs = Measured(BOUND), Measured(BOUND)
    theirs.gaps.step(0.0, A, True)
    theirs.gaps.chunks.append(0.01)
    theirs.gaps.step(9.0, A, True)
    agreed = [*map(min, ours.votes(), theirs.votes())]
    assert read(agreed).slack == pytest.approx(theirs.gaps.slack, abs=1e-6)
    assert theirs.gaps.slack < ours.gaps.slack


def test_chunks_are_expected_by_those_before() -> None:
    """Guards against a chunk that is compared with an average that it is part of, and one that was
    compared before anything was known."""
    measured = Measured(BOUND)
    times = StepTimes(measured, blocking=True)
    for number in range(6):
        times.launched(100, number)
        times.hook(number + 0.02 * (1 + number // 5))
    assert [*measured.gaps.chunks][:4] == [None] * 4
    assert [*measured.gaps.chunks][4:] == pytest.approx([0.02, 0.02], rel=0.05)


# ---- all of it ----


class Server:
    """A decode server with an endless line of turns, as numbers. Seconds and tokens."""

    def __init__(self, seed: int, bound: float, constant: float, noise: float) -> None:
        self.limits = Limits(tokens=10_000, max_itl=bound, page=16)
        self.measured, self.pace = Measured(bound), Pace(0.5)
        self._random, self._noise, self.constant = random.Random(seed), noise, constant
        self._at = 0.0
        #: Gaps with a chunk and without; tokens of chunks.
        self.gaps: dict[bool, list[float]] = {True: [], False: []}
        self.tokens = 0

    def about(self, seconds: float) -> float:
        slow = 3.0 if self._random.random() < 0.003 else 1.0
        return slow * seconds * self._random.lognormvariate(0, self._noise)

    def run(self, steps: int) -> None:
        measured, pace, limits = self.measured, self.pace, self.limits
        for _ in range(steps):
            pace.costs = read(measured.votes())
            largest = pace.costs.largest_chunk(limits)
            fits = largest >= limits.least
            if pace.may_run(3, fits):
                tokens = max(largest if fits else 0, limits.least)
                seconds = self.about(self.constant + 0.0001 * tokens)
                measured.gaps.chunks.append(
                    measured.chunk.at(tokens) if measured.chunk.is_known else None
                )
                measured.chunk.add(tokens, seconds)
                pace.chunk(tokens, 3)
                self._at += seconds
                self.tokens += tokens
            seconds = self.about(0.01)
            self._at += seconds
            measured.step.add(seconds)
            pace.step()
            gap = measured.gaps.step(self._at, A, fits)
            if gap is not None:
                self.gaps[gap[1]].append(gap[0])


@pytest.mark.parametrize("noise", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("bound", [0.05, 0.1])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_bound_holds_at_p99(seed: int, bound: float, noise: float) -> None:
    """Guards against a margin that is too small for the spread, and against one that leaves no
    chunk where there is time for them."""
    server = Server(seed, bound, constant=0.005, noise=noise)
    server.run(4000)
    with_chunk = server.gaps[True][len(server.gaps[True]) // 10 :]
    passed = sum(gap > bound for gap in with_chunk)
    assert passed <= 0.015 * len(with_chunk) + 2
    assert quantiles(sum(server.gaps.values(), []), n=100)[98] <= bound
    assert len(with_chunk) > 300 and server.tokens / len(server.gaps[True]) > 50


def test_no_bound_that_can_be_kept() -> None:
    """Guards against a server whose chunks all pass the bound: one gap in a hundred may."""
    server = Server(1, bound=0.02, constant=0.03, noise=0.1)
    server.run(6000)
    every = len(server.gaps[True]) + len(server.gaps[False])
    assert 0 < sum(gap > 0.02 for gap in server.gaps[True]) <= 0.015 * every


def test_chunks_that_seem_to_take_several_bounds_are_tried_again() -> None:
    """Guards against a server that computes no turn any more while requests run."""
    gaps = TokenGaps(BOUND)
    for at in range(100_000):
        gaps.step(float(at), A, fits=gaps.slack is not None and gaps.slack >= 5 * BOUND)
    assert gaps.slack is not None and gaps.slack >= 5 * BOUND
    gaps.chunks.append(5 * BOUND)
    gaps.step(100_000.0 + 5 * BOUND, A, fits=False)
    assert gaps.slack == 2 * BOUND, "and it comes back soon"


def test_turns_without_a_decode_step_leave_nothing() -> None:
    """Guards against an entry for each chunk of a server whose turns all end at once."""
    gaps = TokenGaps()
    gaps.chunks.extend([0.1] * 1000)
    assert len(gaps.chunks) <= 64


def test_a_server_that_was_slow_for_a_while() -> None:
    """Guards against a bound that fits no chunk after one slow moment, and is never tried again."""
    server = Server(1, bound=0.05, constant=0.005, noise=0.1)
    server.run(500)
    server.constant = 0.2
    server.run(1000)
    server.constant = 0.005
    server.run(2000)
    before = server.tokens
    server.run(1000)
    assert server.tokens - before > 10_000
