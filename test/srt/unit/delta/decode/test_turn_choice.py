"""Where a turn is computed: times that are measured, forgotten, agreed on and compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.decode.turn_choice import (
    ENOUGH,
    MOST_STEPS_BETWEEN,
    NEVER,
    UNKNOWN,
    Choice,
    Costs,
    Decision,
    Limits,
    Line,
    Load,
    Mean,
    Measured,
    Pace,
    StepTimes,
    expected_here,
    read,
    read_there,
)

LIMITS = Limits(tokens=1000, chunk=100, share=0.5)
#: A chunk of 100 tokens takes 20 ms, a decode step 10 ms.
COSTS = Costs(constant=0.01, slope=0.0001, step=0.01)
SAMPLES = st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-5, 100)), min_size=1)


# ---- what is measured ----


def test_a_line_finds_constant_and_slope() -> None:
    """Guards against short turns that are taken to cost what long ones do."""
    line = Line(constant=0.5)
    for _ in range(30):
        for tokens in (50, 400, 2000):
            line.add(tokens, 0.1 + 0.001 * tokens)
    constant, slope = line.coefficients
    assert constant == pytest.approx(0.1, rel=0.1) and slope == pytest.approx(0.001, rel=0.05)


@given(SAMPLES, st.integers(0, 20_000))
def test_a_line_is_never_negative_nor_beyond_its_samples(
    samples: list[tuple[int, float]], tokens: int
) -> None:
    """Guards against a fit through noise that makes a side look free, or endless."""
    line = Line(constant=0.5)
    for each in samples:
        line.add(*each)
    constant, slope = line.coefficients
    assert constant >= 0 and slope >= 0
    most = max(seconds for _, seconds in samples)
    least = min(size for size, _ in samples)
    assert 0 <= line.at(tokens) <= most * 1.01 * max(1, 20 * tokens / least)


def test_one_size_of_samples() -> None:
    """Guards against a division by the variance of equal samples."""
    line = Line(constant=0.5)
    for _ in range(5):
        line.add(1000, 2.0)
    assert line.at(1000) == pytest.approx(2.0, rel=0.06)
    assert line.at(0) == pytest.approx(1.0, rel=0.06)


def test_the_first_sample_does_not_count() -> None:
    """Guards against kernels that are compiled once and make this side look slow for long."""
    line = Line(constant=0.25, dropped=1)
    line.add(100, 60.0)
    assert not line.is_known
    line.add(100, 0.02)
    assert line.at(100) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("old", [0.001, 10.0])
def test_what_was_is_forgotten(old: float) -> None:
    """Guards against a side that changed and is judged by what it was."""
    mean, line = Mean(), Line(constant=0.5)
    for value in (old,) * 50 + (0.5,) * 100:
        mean.add(value)
        line.add(200, value)
    assert mean.value == pytest.approx(0.5, rel=0.01)
    assert line.at(200) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("seconds,is_local", [(0.06, False), (1.0, True)])
def test_a_burst_of_long_prompts_does_not_hide_what_short_turns_take(
    seconds: float, is_local: bool
) -> None:
    """Guards against a prefill server that first sent six long prompts together, and then looks too
    slow for any short turn: nobody asks it again, so that nothing would correct that."""
    measured, choice, load = Measured(), Choice(Limits(512)), Load(running=5)
    costs = Costs(constant=0.03, slope=0.0002, step=0.01)
    for _ in range(6):
        measured.shown("a", 1000, 0.7)
    decisions = []
    for _ in range(20):
        decisions.append(choice.decide(150, load, costs, measured.there("a", 150)))
        if not decisions[-1].local:
            measured.shown("a", 150, seconds)
    assert not decisions[0].local  # nobody knows yet
    assert all(decision.local == is_local for decision in decisions[2:])


def test_a_prefill_server_that_went_away_is_unknown() -> None:
    """Guards against another one at its address that is judged by what it did."""
    measured = Measured()
    measured.shown("a", 200, 1.0)
    assert measured.there("a", 200) == pytest.approx(1.0, rel=0.1)
    assert measured.there("b", 200) is None
    measured.forget("a")
    assert measured.there("a", 200) is None


@given(SAMPLES)
def test_votes_survive_the_wire(samples: list[tuple[int, float]]) -> None:
    """Guards against numbers that are integers on the way and change by more than rounding."""
    measured = Measured()
    assert read(measured.votes()) == Costs()
    for tokens, seconds in samples:
        measured.chunk.add(tokens, seconds)
        measured.step.add(seconds)
        measured.shown("a", tokens, seconds)
    costs = read(measured.votes())
    assert costs.step == pytest.approx(measured.step.value, abs=1e-6)
    assert (costs.constant is not None) == (len(samples) > ENOUGH)
    if len(samples) > ENOUGH:
        assert costs.chunks(1, 500) == pytest.approx(measured.chunk.at(500), abs=2e-6)
    there = read_there(measured.vote_there("a", 300))
    assert there == pytest.approx(measured.there("a", 300), abs=1e-6)
    assert measured.vote_there("b", 300) == UNKNOWN and read_there(UNKNOWN) is None
    assert NEVER < UNKNOWN < 0  # the smallest of all ranks' counts


# ---- what is expected here ----


def test_expected_here() -> None:
    """Guards against a formula that forgets the queue, the steps between, or the share."""
    assert expected_here(100, Load(), COSTS, LIMITS) == pytest.approx(0.02)
    assert expected_here(300, Load(), COSTS, LIMITS) == pytest.approx(0.06)
    assert expected_here(100, Load(queued=200), COSTS, LIMITS) == pytest.approx(0.06)
    busy = expected_here(300, Load(running=4), COSTS, LIMITS)
    assert busy == pytest.approx(0.01 + 0.06 + 2 * 0.02)  # as long between chunks as in them
    steps = expected_here(300, Load(running=4), COSTS, Limits(1000, 100, share=1.0))
    assert steps == pytest.approx(0.01 + 0.06 + 2 * 0.01)
    assert expected_here(100, Load(), Costs(step=0.01), LIMITS) is None


@given(
    st.integers(1, 1000), st.integers(0, 5000), st.integers(0, 50), st.floats(0, 1),
    st.floats(0.05, 1),
)  # fmt: skip
def test_more_load_is_never_sooner(
    tokens: int, queued: int, running: int, debt: float, share: float
) -> None:
    """Guards against a load that attracts turns."""
    limits = Limits(1000, 100, share)
    base = expected_here(tokens, Load(queued, running, debt), COSTS, limits)
    for load in (
        Load(queued + 100, running, debt),
        Load(queued, running + 1, debt),
        Load(queued, running, debt + 0.1),
    ):
        assert expected_here(tokens, load, COSTS, limits) >= base - 1e-9
    assert expected_here(tokens + 1, Load(queued, running, debt), COSTS, limits) >= base


# ---- the choice ----


def test_the_choice() -> None:
    """Guards against a turn that waits for prefill although it would be done here, and the other
    way round."""
    choice = Choice(LIMITS)
    assert choice.decide(1001, Load(), COSTS, 9.0)[:2] == (False, "long")
    assert choice.decide(100, Load(), COSTS, 1.0)[:2] == (True, "cheaper")
    assert choice.decide(100, Load(), COSTS, 0.015)[:2] == (False, "cheaper")
    assert choice.decide(100, Load(queued=10_000), COSTS, 1.0)[:2] == (False, "cheaper")
    # Many who would stand still count, too.
    assert choice.decide(100, Load(running=10), COSTS, 0.05)[:2] == (False, "cheaper")
    assert choice.decide(100, Load(running=10), COSTS, 0.5)[:2] == (True, "cheaper")
    assert choice.decide(100, Load(), COSTS, 1.0).expected == pytest.approx(0.02)
    assert choice.decide(100, Load(), COSTS, 0.015).expected == pytest.approx(0.015)


def test_before_anything_was_measured() -> None:
    """Guards against a start that never measures one side, or floods one that nobody knows."""
    choice = Choice(LIMITS)
    assert choice.decide(100, Load(), Costs(), None)[:2] == (True, "unmeasured")
    assert choice.decide(100, Load(queued=100), Costs(), None)[:2] == (False, "unmeasured")
    assert choice.decide(100, Load(), COSTS, None)[:2] == (False, "unmeasured")


def test_without_a_place() -> None:
    """Guards against a turn that leaves the first free place of a full batch empty while it is
    computed; to try a side is no reason for that either."""
    full = Load(running=1, is_full=True)
    for costs, there in ((COSTS, 10.0), (COSTS, None), (Costs(), None)):
        assert Choice(LIMITS).decide(100, full, costs, there)[:2] == (False, "no_place")
    assert Choice(Limits(1000, always=True)).decide(100, full, COSTS, 10.0).local


def test_always() -> None:
    choice = Choice(Limits(tokens=1000, always=True))
    assert choice.decide(1000, Load(queued=10**6), Costs(), 0.001)[:2] == (True, "always")
    assert choice.decide(1001, Load(), Costs(), 0.001)[:2] == (False, "long")


def choose(choice: Choice, there: float, turns: int) -> list[Decision]:
    """So many turns in a row, of which prefill is expected to take ``there``; 20 ms here."""
    made = []
    for _ in range(turns):
        made.append(choice.decide(100, Load(), COSTS, there))
        choice.made(made[-1])
    return made


@pytest.mark.parametrize(("there", "every"), [(0.02, 9), (0.03, 11), (0.1, 81), (0.01, 21)])
def test_some_explore(there: float, every: int) -> None:
    """Guards against a side that recovered, and that nobody notices. How often it is tried is a
    matter of what that is expected to lose: of 20 ms a turn, a twentieth may be lost."""
    made = choose(Choice(LIMITS), there, 3 * every)
    explored = [at for at, each in enumerate(made) if each.reason == "explore"]
    assert explored == [every - 1, 2 * every - 1, 3 * every - 1]
    assert {made[at].local for at in explored} == {there <= 0.02}
    assert {each.local for each in made if each.reason == "cheaper"} == {there > 0.02}


def test_what_exploring_loses_is_bounded() -> None:
    """Guards against turns that wait for seconds behind others' prompts each time that prefill is
    tried again, where a turn takes milliseconds."""
    made = choose(Choice(LIMITS), 4.0, 10_000)
    lost = 4.0 * sum(not each.local for each in made)
    assert 0 < lost <= 0.05 * 0.02 * 10_000


def test_a_slow_moment_is_not_believed_for_long() -> None:
    """Guards against a machine that stood still for a moment while the first turns were computed
    here, and then leaves all of them to prefill: seen for 35 of 54 turns."""
    measured, choice = Measured(), Choice(LIMITS)
    for seconds in (0.02, 0.2, 0.02, 0.2, 0.02):  # the first does not count
        measured.chunk.add(100, seconds)
    measured.step.add(0.01)
    local = 0
    for _ in range(60):
        decision = choice.decide(100, Load(running=2), read(measured.votes()), 0.06)
        choice.made(decision)
        local += decision.local
        if decision.local:
            measured.chunk.add(100, 0.02)
    assert local > 40


def test_one_sample_counts_as_twice_the_expected_at_most() -> None:
    """Guards against a spike that hides what a chunk takes; and against one that does take longer
    now, and is never believed."""
    measured = Measured()
    for _ in range(20):
        measured.chunk.add(100, 0.02)
    measured.chunk.add(100, 2.0)
    assert measured.chunk.at(100) < 0.023
    for _ in range(60):
        measured.chunk.add(100, 2.0)
    assert measured.chunk.at(100) > 1.5


def test_asking_again_explores_nothing() -> None:
    """Guards against ranks or requests that are tried often and use up the exploring ones."""
    choice = Choice(LIMITS)
    reasons = {choice.decide(100, Load(), COSTS, 1.0).reason for _ in range(100)}
    assert reasons == {"cheaper"}


@given(
    st.lists(
        st.tuples(
            st.integers(1, 1200), st.integers(0, 300), st.integers(0, 9),
            st.one_of(st.none(), st.floats(0.0001, 10)), st.booleans(),
        )
    )
)  # fmt: skip
def test_ranks_that_read_the_same_decide_the_same(
    turns: list[tuple[int, int, int, float | None, bool]],
) -> None:
    """Guards against a choice that depends on anything but what the ranks agreed on."""
    ranks = Choice(LIMITS), Choice(LIMITS)
    for tokens, queued, running, there, known in turns:
        costs = COSTS if known else Costs()
        first, second = (r.decide(tokens, Load(queued, running), costs, there) for r in ranks)
        assert first == second
        for rank in ranks:
            rank.made(first)


# ---- pace ----


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 100)), max_size=300), st.floats(0.05, 1))
def test_pace(steps: list[tuple[bool, int]], share: float) -> None:
    """Guards against two chunks without a step between, a share above the ceiling, and chunks that
    never run."""
    pace, last, waited = Pace(share), "step", 0
    pace.costs = COSTS
    chunks = decodes = 0.0
    for wanted, tokens in steps:
        if wanted and pace.may_run(3):
            assert last == "step"
            pace.chunk(tokens, 3)
            chunks += 0.01 + 0.0001 * tokens
            last, waited = "chunk", 0
            continue
        pace.step()
        decodes += 0.01
        last, waited = "step", waited + 1
        assert waited < MOST_STEPS_BETWEEN or pace.may_run(3)
        assert pace.debt >= 0
    # A chunk runs first and is made up for afterwards.
    if 0.02 * (1 - share) / share < 0.01 * MOST_STEPS_BETWEEN:
        assert chunks - 0.02 <= (decodes * share / (1 - share) if share < 1 else chunks) + 1e-6


def test_nobody_runs() -> None:
    """Guards against chunks that wait for decode steps that never come."""
    pace = Pace(0.1)
    pace.costs = COSTS
    for _ in range(5):
        assert pace.may_run(0)
        pace.chunk(100, 0)
    assert pace.debt == 0
    assert not pace.may_run(1)
    pace.step()
    assert pace.may_run(1)


# ---- times ----


def test_a_launch_that_computes() -> None:
    """Guards against a chunk on the CPU that is counted as the step after it."""
    measured = Measured()
    times = StepTimes(measured, blocking=True)
    for at in range(0, 40, 4):
        times.launched(100, at)
        times.hook(at + 2.0)
        times.result(at + 2.5)
        times.launched(0, at + 2.5)
        times.hook(at + 3.0)
    assert measured.chunk.at(100) == pytest.approx(2.0, rel=0.1)
    assert measured.step.value == pytest.approx(0.5)


def test_results_that_come_later() -> None:
    """Guards against a step that is launched behind another one and is charged for both."""
    measured = Measured()
    times = StepTimes(measured, blocking=False)
    times.launched(100, 0.0)
    times.hook(0.1)
    times.launched(0, 0.1)
    for at in range(2, 40, 4):
        times.result(at)  # the chunk
        times.launched(100, at + 0.1)
        times.result(at + 1)  # the decode step
        times.launched(0, at + 1.1)
    times.result(42)
    assert measured.chunk.at(100) == pytest.approx(3.0, rel=0.1)
    assert measured.step.value == pytest.approx(1.0)


@pytest.mark.parametrize("tokens", [0, 100])
def test_a_pause_is_no_part_of_a_step(tokens: int) -> None:
    """Guards against a step under way that counts as having taken as long as the pause."""
    measured = Measured()
    times = StepTimes(measured, blocking=False)
    for at in [*range(10), 100]:
        times.launched(tokens, at)
        times.result(at + 0.5)
    times.launched(tokens, 101)
    times.interrupted()
    times.result(200)
    expected = measured.chunk.at(100) if tokens else measured.step.value
    assert expected == pytest.approx(0.5)
