"""Local or remote: times that are measured, forgotten, agreed on and compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.decode.turn_choice import (
    MOST_STEPS_BETWEEN,
    STEPS_BEFORE_BREACH,
    Choice,
    Decision,
    Load,
    Pace,
    expected_here,
)
from sglang.srt.disaggregation.delta.decode.turn_costs import (
    ENOUGH,
    LEAST_CHUNK,
    NEVER,
    UNKNOWN,
    Costs,
    Limits,
    Line,
    Measured,
    StepTimes,
    read,
    read_there,
)

LIMITS = Limits(tokens=1000, chunk=100, share=0.5)
ALWAYS = Limits(tokens=1000, always=True, max_itl=0.1)
#: A chunk of 100 tokens takes 20 ms, a decode step 10 ms.
COSTS = Costs(constant=0.01, slope=0.0001, step=0.01)
NOTHING = Costs()
Samples = list[tuple[int, float]]
SAMPLES = st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-5, 100)), min_size=1)


# ---- measurements ----


@pytest.mark.parametrize(
    ("line", "samples", "expected"),
    [
        pytest.param(
            Line(constant=0.5),
            [(tokens, 0.1 + 0.001 * tokens) for tokens in (50, 400, 2000)] * 30,
            {0: 0.1, 100: 0.2, 1000: 1.1},
            id="short turns do not cost what long ones do",
        ),
        pytest.param(Line(0.5), [(1000, 2.0)] * 5, {1000: 2.0, 0: 1.0}, id="equal samples"),
        pytest.param(Line(0.25, dropped=1), [(100, 60.0)], {100: 0.0}, id="kernels are compiled"),
        pytest.param(Line(0.25, dropped=1), [(100, 60.0), (100, 0.02)], {100: 0.02}, id="once"),
        pytest.param(
            Line(0.5), [(200, 10.0)] * 50 + [(200, 0.5)] * 100, {200: 0.5}, id="it was slow"
        ),
        pytest.param(
            Line(0.5), [(200, 0.001)] * 50 + [(200, 0.5)] * 100, {200: 0.5}, id="it was fast"
        ),
        pytest.param(
            Line(0.25, most=2.0), [(100, 0.02)] * 20 + [(100, 2.0)], {100: 0.0215}, id="a spike"
        ),
        pytest.param(
            Line(0.25, most=2.0), [(100, 0.02)] * 20 + [(100, 2.0)] * 90, {100: 2.0}, id="it stays"
        ),
    ],
)
def test_what_samples_say(line: Line, samples: Samples, expected: dict[int, float]) -> None:
    """Guards against a division by the variance of equal samples; against a side that changed and
    is judged by old samples; and against one sample that hides a chunk's usual time."""
    mean = Line()
    for tokens, seconds in samples:
        line.add(tokens, seconds)
        mean.add(0, seconds)
    assert {tokens: line.at(tokens) for tokens in expected} == pytest.approx(expected, rel=0.1)
    assert line.is_known == any(expected.values())
    if samples[-50:] == [samples[-1]] * 50:
        assert mean.at(0) == pytest.approx(samples[-1][1], rel=0.01)


@given(SAMPLES, st.integers(0, 20_000))
def test_a_line_is_never_negative_nor_beyond_its_samples(samples: Samples, tokens: int) -> None:
    """Guards against a fit through noise that makes a side look free, or endlessly slow."""
    line = Line(constant=0.5)
    for each in samples:
        line.add(*each)
    most = max(seconds for _, seconds in samples)
    least = min(size for size, _ in samples)
    assert min(line.coefficients) >= 0
    assert 0 <= line.at(tokens) <= most * 1.01 * max(1, 20 * tokens / least)


@given(SAMPLES)
def test_votes_survive_the_wire(samples: Samples) -> None:
    """Guards against numbers that are sent as integers and change by more than rounding, and
    against a prefill server that is judged by samples of its address's previous server."""
    measured = Measured()
    assert read(measured.votes()) == NOTHING
    for tokens, seconds in samples:
        measured.chunk.add(tokens, seconds)
        measured.step.add(0, seconds)
        measured.shown("a", tokens, seconds)
    costs = read(measured.votes())
    assert costs.step == pytest.approx(measured.step.at(0), abs=1e-6)
    assert (costs.constant is not None) == (len(samples) > ENOUGH)
    if len(samples) > ENOUGH:
        assert costs.chunks(1, 500) == pytest.approx(measured.chunk.at(500), abs=2e-6)
    there = read_there(measured.vote_there("a", 300))
    assert there == pytest.approx(measured.there("a", 300), abs=1e-6)
    measured.forget("a")
    for address in "ab":
        assert measured.vote_there(address, 300) == UNKNOWN
        assert measured.there(address, 300) is read_there(UNKNOWN) is None
    assert NEVER < UNKNOWN < 0  # the smallest value of all ranks counts


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
            id="idle between two steps",
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
    """Guards against steps that are charged for time spent waiting. The events are repeated every
    250 s."""
    measured = Measured()
    times = StepTimes(measured, blocking)
    for begin in range(0, 2500, 250):
        for what, *numbers in events:
            at = [begin + numbers[-1]] if numbers else []
            getattr(times, what)(*numbers[:-1], *at)
    assert measured.chunk.at(100) == pytest.approx(chunk, rel=0.1)
    assert measured.step.at(0) == pytest.approx(step)


# ---- expected local time ----


@pytest.mark.parametrize(
    ("tokens", "load", "limits", "seconds"),
    [
        (100, Load(), LIMITS, 0.02),
        (300, Load(), LIMITS, 0.06),
        (100, Load(queued=200), LIMITS, 0.06),
        # The step in flight; as long between chunks as in them.
        (300, Load(running=4), LIMITS, 0.01 + 0.06 + 2 * 0.02),
        (300, Load(running=4), Limits(1000, 100, share=1.0), 0.01 + 0.06 + 2 * 0.01),
        (100, Load(running=4, debt=0.5), Limits(1000, 100, share=0.25), 0.01 + 0.02 + 3 * 0.5),
        # Seven small chunks take longer than one.
        (448, Load(running=1), Limits(1000), 0.01 + 0.0548),
        (448, Load(running=1, chunk=64), Limits(1000), 0.01 + 0.1148 + 6 * 0.1148 / 7),
    ],
)
def test_expected_here(tokens: int, load: Load, limits: Limits, seconds: float) -> None:
    """Guards against a formula without the queue, the steps between chunks, or the share."""
    assert expected_here(tokens, load, COSTS, limits) == pytest.approx(seconds)
    assert expected_here(tokens, load, Costs(step=0.01), limits) is None


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
    for more, load in (
        (0, Load(queued + 100, running, debt)),
        (0, Load(queued, running + 1, debt)),
        (0, Load(queued, running, debt + 0.1)),
        (1, Load(queued, running, debt)),
    ):
        assert expected_here(tokens + more, load, COSTS, limits) >= base - 1e-9


# ---- the choice ----

FULL = Load(running=1, is_full=True)
BOUNDED = Limits(tokens=1000, chunk=512, max_itl=0.1, page=16)


@pytest.mark.parametrize(
    ("limits", "tokens", "load", "costs", "there", "local", "reason"),
    [
        (LIMITS, 1001, Load(), COSTS, 9.0, False, "long"),
        (LIMITS, 1000, Load(), COSTS, 9.0, True, "cheaper"),
        (LIMITS, 100, Load(), COSTS, 1.0, True, "cheaper"),
        (LIMITS, 100, Load(), COSTS, 0.015, False, "cheaper"),
        (LIMITS, 100, Load(queued=10_000), COSTS, 1.0, False, "cheaper"),
        # Stalled requests of a large batch count, too.
        (LIMITS, 100, Load(running=10), COSTS, 0.05, False, "cheaper"),
        (LIMITS, 100, Load(running=10), COSTS, 0.5, True, "cheaper"),
        # A start measures either side, and does not flood an unmeasured one.
        (LIMITS, 100, Load(), NOTHING, None, True, "unmeasured"),
        (LIMITS, 100, Load(queued=100), NOTHING, None, False, "unmeasured"),
        (LIMITS, 100, Load(), COSTS, None, False, "unmeasured"),
        # The first free place of a full batch is not left empty, not even for a trial.
        (LIMITS, 100, FULL, COSTS, 10.0, False, "no_place"),
        (LIMITS, 100, FULL, COSTS, None, False, "no_place"),
        (LIMITS, 100, FULL, NOTHING, None, False, "no_place"),
        # Independent of the cost.
        (ALWAYS, 1000, Load(queued=10**6), NOTHING, 0.001, True, "always"),
        (ALWAYS, 1001, Load(), NOTHING, 0.001, False, "long"),
        (ALWAYS, 100, FULL, COSTS, 10.0, True, "always"),
        (ALWAYS, 200, Load(running=1, chunk=0), COSTS, 9.0, True, "always"),
        # Turns that exceed the bound on inter-token latency, however slow prefill is.
        (BOUNDED, 200, Load(running=1), COSTS, 9.0, True, "cheaper"),
        (BOUNDED, 200, Load(running=1, chunk=400), COSTS, 9.0, True, "cheaper"),
        (BOUNDED, 200, Load(running=1, chunk=LEAST_CHUNK), COSTS, 9.0, True, "cheaper"),
        (BOUNDED, 200, Load(running=1, chunk=LEAST_CHUNK - 1), COSTS, 9.0, False, "itl"),
        (BOUNDED, 20, Load(running=1, chunk=20), COSTS, 9.0, True, "cheaper"),
        (BOUNDED, 20, Load(running=1, chunk=19), COSTS, 9.0, False, "itl"),
        (BOUNDED, 1, Load(running=1, chunk=0), COSTS, 9.0, False, "itl"),
        # Behind a turn that no chunk fits.
        (BOUNDED, 20, Load(500, 1, chunk=LEAST_CHUNK - 1), COSTS, 9.0, False, "itl"),
    ],
)
def test_the_choice(
    limits: Limits, tokens: int, load: Load, costs: Costs, there: float | None, local: bool,
    reason: str,
) -> None:  # fmt: skip
    """Guards against a turn that waits for prefill although it would be done sooner here, and the
    reverse; a repeated query changes nothing."""
    choice = Choice(limits)
    for _ in range(100):
        decision = choice.decide(tokens, load, costs, there)
        assert (decision.local, decision.reason) == (local, reason)
    here = None if reason == "long" else expected_here(tokens, load, costs, limits)
    assert decision.expected == (here if local else there)


@pytest.mark.parametrize(("tokens", "local"), [(300, True), (301, False)])
def test_a_turn_without_prefill(tokens: int, local: bool) -> None:
    """Guards against a turn within its own limit that fails because no chunk fits now."""
    limits = Limits(0, when_lost=300, max_itl=0.1)
    decision = Choice(limits).without_prefill(tokens, Load(1, 1, chunk=0), COSTS, "no_prefill")
    assert decision[:2] == (local, "no_prefill")


def choose(there: float, turns: int) -> list[Decision]:
    """Decide ``turns`` turns in a row; prefill is expected to take ``there`` seconds, decode 20
    ms."""
    choice, made = Choice(LIMITS), list[Decision]()
    for _ in range(turns):
        made.append(choice.decide(100, Load(), COSTS, there))
        choice.made(made[-1])
    return made


@pytest.mark.parametrize(
    ("there", "every"), [(0.02, 9), (0.03, 11), (0.1, 81), (0.01, 21), (1.02, 1001)]
)
def test_some_explore(there: float, every: int) -> None:
    """Guards against a side whose recovery is never noticed, and against turns that wait for
    seconds at each trial. A twentieth of 20 ms per turn may be lost."""
    made = choose(there, 3 * every)
    explored = [at for at, each in enumerate(made) if each.reason == "explore"]
    assert explored == [every - 1, 2 * every - 1, 3 * every - 1]
    assert {made[at].local for at in explored} == {there <= 0.02}
    assert {each.local for each in made if each.reason == "cheaper"} == {there > 0.02}


@pytest.mark.parametrize(("seconds", "is_local"), [(0.06, False), (1.0, True)])
def test_a_burst_of_long_prompts_does_not_hide_what_short_turns_take(
    seconds: float, is_local: bool
) -> None:
    """Guards against a prefill server that first got six long prompts together, and then looks too
    slow for any short turn: without further turns no sample would correct that."""
    measured, choice = Measured(), Choice(Limits(512))
    costs = Costs(constant=0.03, slope=0.0002, step=0.01)
    for _ in range(6):
        measured.shown("a", 1000, 0.7)
    local = []
    for _ in range(20):
        local.append(choice.decide(150, Load(running=5), costs, measured.there("a", 150)).local)
        if not local[-1]:
            measured.shown("a", 150, seconds)
    assert not local[0] and set(local[2:]) == {is_local}  # unknown at first


def test_a_slow_moment_is_not_believed_for_long() -> None:
    """Guards against a machine that stalled for a moment while the first turns were computed here,
    and then leaves all of them to prefill: seen for 35 of 54 turns."""
    measured, choice, local = Measured(), Choice(LIMITS), 0
    for seconds in (0.02, 0.2, 0.02, 0.2, 0.02):  # the first sample is dropped
        measured.chunk.add(100, seconds)
    measured.step.add(0, 0.01)
    for _ in range(60):
        decision = choice.decide(100, Load(running=2), read(measured.votes()), 0.06)
        choice.made(decision)
        if decision.local:
            measured.chunk.add(100, 0.02)
            local += 1
    assert local > 40


def test_a_prefill_server_that_hung_once_is_used_again() -> None:
    """Guards against turns that hung with a prefill server and keep short turns from it long after
    it has recovered, because it is hardly measured in between."""
    measured, choice, local = Measured(), Choice(LIMITS), list[bool]()
    costs = Costs(constant=0.03, slope=0.0002, step=0.01)
    for seconds in [0.02] * 20 + [20.0] * 6:
        measured.shown("a", 100, seconds)
    for _ in range(60):
        decision = choice.decide(100, Load(running=2), costs, measured.there("a", 100))
        choice.made(decision)
        local.append(decision.local)
        if not decision.local:
            measured.shown("a", 100, 0.02)
    assert sum(local) <= 5  # includes trials of the other side


TURNS = st.tuples(
    st.integers(1, 1200), st.integers(0, 300), st.integers(0, 9),
    st.one_of(st.none(), st.floats(0.0001, 10)), st.booleans(),
)  # fmt: skip


@given(st.lists(TURNS))
def test_ranks_that_read_the_same_decide_the_same(
    turns: list[tuple[int, int, int, float | None, bool]],
) -> None:
    """Guards against a choice that depends on values on which the ranks did not agree."""
    ranks = Choice(LIMITS), Choice(LIMITS)
    for tokens, queued, running, there, known in turns:
        costs = COSTS if known else NOTHING
        first, second = (r.decide(tokens, Load(queued, running), costs, there) for r in ranks)
        assert first == second
        for rank in ranks:
            rank.made(first)


# ---- pace ----


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 100)), max_size=300), st.floats(0.05, 1))
def test_pace(steps: list[tuple[bool, int]], share: float) -> None:
    """Guards against two chunks without a step between, a share above the ceiling, and chunks that
    never run."""
    pace, waited = Pace(share), 1
    pace.costs = COSTS
    chunks = decodes = 0.0
    for wanted, tokens in steps:
        assert pace.may_run(0) and (waited < MOST_STEPS_BETWEEN or pace.may_run(3))
        if wanted and pace.may_run(3):
            assert waited
            pace.chunk(tokens, 3)
            chunks, waited = chunks + 0.01 + 0.0001 * tokens, 0
        else:
            pace.step()
            decodes, waited = decodes + 0.01, waited + 1
        assert pace.debt >= 0
    # A chunk runs first; its time is compensated afterwards.
    if 0.02 * (1 - share) / share < 0.01 * MOST_STEPS_BETWEEN:
        assert chunks - 0.02 <= (decodes * share / (1 - share) if share < 1 else chunks) + 1e-6


def test_chunks_while_nobody_runs() -> None:
    """Guards against chunks that wait for decode steps that never come, or that are compensated
    although no request was stalled by them."""
    pace = Pace(0.1)
    pace.costs = COSTS
    for _ in range(5):
        pace.chunk(100, 0)
    assert pace.debt == 0 and not pace.may_run(1)
    pace.step()
    assert pace.may_run(1)


def test_a_chunk_that_does_not_fit_runs_in_one_of_a_hundred_gaps() -> None:
    """Guards against a turn that began and never completes, and against one whose chunks exceed the
    bound on inter-token latency more often than at p99."""
    pace, chunks = Pace(0.5), 0
    for _ in range(1000):
        if pace.may_run(3, fits=False):
            pace.chunk(64, 3)
            chunks += 1
        pace.step()
    assert chunks == 1000 // STEPS_BEFORE_BREACH
    assert pace.may_run(0, fits=False)


def test_a_turn_does_not_starve_behind_the_chunks_of_other_ranks() -> None:
    """Guards a rank without slack that runs no request, beside ranks that compute chunks all the
    time. None of its chunks follows another rank's directly."""
    pace, allowed = Pace(0.5), []
    for step in range(1, 1001):
        if pace.may_run(running=1, fits=False):
            allowed.append(step)
            pace.chunk(48, running=1)
        pace.step()
        if step % 5 == 0:
            pace.others_chunk()
            assert not pace.may_run(running=1, fits=True)
    assert len(allowed) == 1000 // STEPS_BEFORE_BREACH
