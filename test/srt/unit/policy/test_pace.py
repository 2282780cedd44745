"""Times of chunks and steps, and when the next chunk may run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.policy.chunk_times import (
    ENOUGH,
    ChunkLine,
    Measured,
    StepTimes,
    agreed_costs,
)
from sglang.srt.disaggregation.policy.pace import (
    MAX_STEPS_BETWEEN,
    STEPS_BEFORE_BREACH,
    Costs,
    Limits,
    Pace,
)

#: A chunk of 100 tokens takes 20 ms, a decode step 10 ms.
COSTS = Costs(constant=0.01, slope=0.0001, step=0.01)
Samples = list[tuple[int, float]]
SAMPLES = st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-5, 100)), min_size=1)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        pytest.param(
            [(tokens, 0.1 + 0.001 * tokens) for tokens in (50, 400, 2000)] * 30,
            {0: 0.1, 100: 0.2, 1000: 1.1},
            id="small chunks do not take the time of large ones",
        ),
        pytest.param([(1000, 2.0)] * 5, {1000: 2.0, 0: 0.5}, id="equal samples"),
        pytest.param([], {100: 0.0}, id="kernels are compiled"),
        pytest.param([(200, 10.0)] * 50 + [(200, 0.5)] * 100, {200: 0.5}, id="it was slow"),
        pytest.param([(200, 0.001)] * 50 + [(200, 0.5)] * 100, {200: 0.5}, id="it was fast"),
        pytest.param([(100, 0.02)] * 20 + [(100, 2.0)], {100: 0.0215}, id="a spike"),
        pytest.param([(100, 0.02)] * 20 + [(100, 2.0)] * 90, {100: 2.0}, id="it stays slow"),
    ],
)
def test_what_samples_say(samples: Samples, expected: dict[int, float]) -> None:
    """Guards against a division by the variance of equal samples, a server that changed and is
    judged by its past, and one sample that hides the time of a chunk. The first one is dropped."""
    line = ChunkLine()
    for tokens, seconds in [(100, 60.0), *samples]:
        line.add(tokens, seconds)
    assert {tokens: line.at(tokens) for tokens in expected} == pytest.approx(expected, rel=0.1)
    assert line.is_known == (len(samples) >= ENOUGH)


@given(SAMPLES, st.integers(0, 20_000))
def test_a_line_is_never_negative_nor_beyond_its_samples(samples: Samples, tokens: int) -> None:
    """Guards against a fit through noise that makes chunks look free, or endless."""
    line = ChunkLine()
    for each in (samples[0], *samples):
        line.add(*each)
    longest = max(seconds for _, seconds in samples)
    smallest = min(size for size, _ in samples)
    assert min(line.coefficients) >= 0
    assert 0 <= line.at(tokens) <= longest * 1.01 * max(1, 20 * tokens / smallest)


@given(SAMPLES)
def test_votes_survive_the_wire(samples: Samples) -> None:
    """Guards against times that change by more than rounding on their way as integers."""
    measured = Measured()
    assert agreed_costs(measured.votes()) == Costs()
    for tokens, seconds in samples:
        measured.chunk.add(tokens, seconds)
        measured.add_step(seconds)
    costs = agreed_costs(measured.votes())
    assert costs.step == pytest.approx(measured.step, abs=1e-6)
    assert (costs.constant is not None) == (len(samples) > ENOUGH)
    if len(samples) > ENOUGH:
        assert costs.chunk(500) == pytest.approx(measured.chunk.at(500), abs=2e-6)


LAUNCHED, HOOK, RESULT, PAUSED = "launched", "hook", "result", "interrupted"


@pytest.mark.parametrize(
    ("blocking", "events", "chunk", "step"),
    [
        pytest.param(
            True,
            [(LAUNCHED, 100, 0.0), (HOOK, 2.0), (RESULT, 2.5), (LAUNCHED, 0, 2.5), (HOOK, 3.0)],
            2.0,
            0.5,
            id="the launch computes: a chunk is not counted as the step after it",
        ),
        pytest.param(
            False,
            [(LAUNCHED, 100, 0.0), (HOOK, 0.1), (LAUNCHED, 0, 0.1), (RESULT, 2.5), (RESULT, 3.0)],
            2.5,
            0.5,
            id="results come later: a step behind another one is not charged for both",
        ),
        pytest.param(
            False,
            [(LAUNCHED, 100, 0.0), (RESULT, 2.0), (LAUNCHED, 0, 9.0), (RESULT, 9.5)],
            2.0,
            0.5,
            id="nothing ran between",
        ),
        pytest.param(
            False,
            [(LAUNCHED, 100, 0.0), (PAUSED,), (RESULT, 100.0), (LAUNCHED, 0, 101.0), (PAUSED,)]
            + [(RESULT, 200.0), (LAUNCHED, 100, 201.0), (RESULT, 203.0)]
            + [(LAUNCHED, 0, 203.0), (RESULT, 203.5)],
            2.0,
            0.5,
            id="a pause is no part of a step",
        ),
    ],
)
def test_step_times(
    blocking: bool, events: list[tuple[str, float]], chunk: float, step: float
) -> None:
    """Guards against steps that are charged for what they waited for. What happens is repeated,
    250 s later each time."""
    measured = Measured()
    times = StepTimes(measured, blocking)
    for begin in range(0, 2500, 250):
        for what, *numbers in events:
            at = [begin + numbers[-1]] if numbers else []
            getattr(times, what)(*numbers[:-1], *at)
    assert measured.chunk.at(100) == pytest.approx(chunk, rel=0.1)
    assert measured.step == pytest.approx(step)


# ---- pace ----


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 100)), max_size=300), st.floats(0.05, 1))
def test_pace(steps: list[tuple[bool, int]], share: float) -> None:
    """Guards against two chunks without a step between, a share above the ceiling, and chunks that
    never run."""
    pace, waited = Pace(Limits(0, share=share)), 1
    pace.costs = COSTS
    chunks = decodes = 0.0
    for wanted, tokens in steps:
        assert pace.may_run(0) and (waited < MAX_STEPS_BETWEEN or pace.may_run(3))
        if wanted and pace.may_run(3):
            assert waited
            pace.chunk(tokens, 3)
            chunks, waited = chunks + 0.01 + 0.0001 * tokens, 0
        else:
            pace.step()
            decodes, waited = decodes + 0.01, waited + 1
        assert pace.debt >= 0
    # A chunk runs first and is made up for afterwards.
    if 0.02 * (1 - share) / share < 0.01 * MAX_STEPS_BETWEEN:
        assert chunks - 0.02 <= (decodes * share / (1 - share) if share < 1 else chunks) + 1e-6


def test_chunks_without_running_requests() -> None:
    """Guards against chunks that wait for decode steps that never come, or that are made up for
    although they delayed no request."""
    pace = Pace(Limits(0, share=0.1))
    pace.costs = COSTS
    for _ in range(5):
        pace.chunk(100, 0)
    assert pace.debt == 0 and not pace.may_run(1)
    pace.step()
    assert pace.may_run(1)


def test_a_chunk_that_does_not_fit_runs_in_one_of_a_hundred_gaps() -> None:
    """Guards against a turn that began and is never computed to its end, and against one whose
    chunks pass the bound on inter-token latency more often than at p99."""
    pace, chunks = Pace(Limits(0, share=0.5)), 0
    for _ in range(1000):
        if pace.may_run(3, fits=False):
            pace.chunk(64, 3)
            chunks += 1
        pace.step()
    assert chunks == 1000 // STEPS_BEFORE_BREACH
    assert pace.may_run(0, fits=False)


def test_a_turn_does_not_starve_behind_the_chunks_of_other_ranks() -> None:
    """Guards a rank that is out of slack and runs no request, beside ranks that compute chunks all
    the time. None of its chunks follows another rank's directly."""
    pace, allowed = Pace(Limits(0, share=0.5)), []
    for step in range(1, 1001):
        if pace.may_run(running=1, fits=False):
            allowed.append(step)
            pace.chunk(48, running=1)
        pace.step()
        if step % 5 == 0:
            pace.others_chunk()
            assert not pace.may_run(running=1, fits=True)
    assert len(allowed) == 1000 // STEPS_BEFORE_BREACH
