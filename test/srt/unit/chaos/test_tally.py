"""The account of a chaos run: each request has one outcome, and bugs are not explained away."""

from collections import Counter
from dataclasses import replace

import pytest

from chaos.tally import (
    AFTERMATH_S,
    EMPTY,
    Observed,
    Outcome,
    Tally,
    Verdict,
    Window,
    judge,
)

KILL = Window("kill prefill", 100.0, 110.0)
DIED = "Decode transfer failed for request rid=x bootstrap_room=7: prefill is gone"

GOOD = Observed(
    number=1,
    started_at=50.0,
    ended_at=52.0,
    expected=(5, 6, 7),
    tokens=(5, 6, 7),
    finishes=("length",),
    error=None,
)
ABORTED = replace(GOOD, tokens=(5,), finishes=("abort",), error="Aborted")
FAILED = replace(
    GOOD, started_at=99.0, ended_at=104.0, tokens=(5,), finishes=("abort",), error=DIED
)


def outcome(observed: Observed) -> Outcome:
    return judge(observed, [KILL]).outcome


def test_a_whole_equal_answer_is_right() -> None:
    """Guards the one outcome that all others are measured against."""
    assert judge(GOOD, []) == Verdict(Outcome.RIGHT)
    # Prefill was killed after it had sent everything: the client has its answer.
    assert outcome(replace(GOOD, prefill_error="ServerDisconnectedError")) is Outcome.RIGHT
    # The abort came too late.
    assert outcome(replace(GOOD, abort_sent=True)) is Outcome.RIGHT


@pytest.mark.parametrize(
    "observed",
    [
        replace(GOOD, tokens=(5, 6, 8)),
        replace(GOOD, tokens=(5, 6, 7, 8)),
        replace(GOOD, tokens=(5, 6)),
        replace(GOOD, tokens=()),
        replace(GOOD, finishes=("length", "length")),
        replace(ABORTED, finishes=("abort", "abort"), abort_sent=True),
        replace(ABORTED, tokens=(4,), abort_sent=True),
        replace(GOOD, tokens=(9,), finishes=(), left=True),
        replace(FAILED, tokens=(5, 5)),
        replace(FAILED, tokens=(9,), late=("decode",)),
    ],
)
def test_tokens_that_differ_are_wrong_however_the_request_ended(observed: Observed) -> None:
    """Guards against wrong tokens that hide behind an abort, a fault or a disconnected client;
    against a second answer; and against a partial answer that claims to be complete."""
    assert outcome(observed) is Outcome.WRONG


CUT = replace(GOOD, tokens=(5,), finishes=())


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        # Requests that the run aborted, and one that ended unasked: hit by the abort of another.
        (replace(GOOD, tokens=(5,), finishes=(), left=True), Outcome.ABORTED),
        (replace(ABORTED, abort_sent=True), Outcome.ABORTED),
        (
            replace(ABORTED, finishes=(), error="prefill reported: aborted", abort_sent=True),
            Outcome.ABORTED,
        ),
        (ABORTED, Outcome.UNEXPLAINED),
        # Hangs, which no fault excuses: every bound has passed by then.
        (replace(FAILED, late=("decode",)), Outcome.LOST),
        (replace(ABORTED, abort_sent=True, late=("prefill",)), Outcome.LOST),
        # A closed connection is no answer.
        (CUT, Outcome.UNEXPLAINED),
        (replace(CUT, started_at=99.0, ended_at=101.0), Outcome.FAILED),
    ],
)
def test_the_outcome_of_a_request(observed: Observed, expected: Outcome) -> None:
    """Guards against the servers' failures that count as the run's aborts, or as answers."""
    assert outcome(observed) is expected


@pytest.mark.parametrize(
    ("started_at", "ended_at", "expected"),
    [
        (99.0, 104.0, Outcome.FAILED),
        (90.0, 100.0, Outcome.FAILED),
        (105.0, 105.1, Outcome.FAILED),
        (99.0, 160.0, Outcome.FAILED),
        (110.0 + AFTERMATH_S, 120.0, Outcome.FAILED),
        (111.0 + AFTERMATH_S, 120.0, Outcome.UNEXPLAINED),
        (90.0, 99.9, Outcome.UNEXPLAINED),
    ],
)
def test_a_failure_needs_a_fault_in_its_lifetime(
    started_at: float, ended_at: float, expected: Outcome
) -> None:
    """Guards against failures long after a server is back, and before anything was broken."""
    assert outcome(replace(FAILED, started_at=started_at, ended_at=ended_at)) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("", Outcome.UNEXPLAINED),
        ("500 Internal Server Error", Outcome.UNEXPLAINED),
        ("KeyError: 17", Outcome.UNEXPLAINED),
        ("Decode handshake failed for request 1: Aborted by AbortReq.", Outcome.UNEXPLAINED),
        ("ServerDisconnectedError: Server disconnected", Outcome.FAILED),
        (
            "Cannot connect to host 127.0.0.1:30000 ssl:default [Connect call failed]",
            Outcome.FAILED,
        ),
        ("ClientPayloadError: Response payload is not completed", Outcome.FAILED),
        (DIED, Outcome.FAILED),
    ],
)
def test_an_error_must_name_its_cause(error: str, expected: Outcome) -> None:
    """Guards against errors without a usable cause, and against a lost server that is reported as
    an abort without a sender."""
    assert outcome(replace(FAILED, error=error)) is expected


def test_a_clean_run() -> None:
    """Guards against a run that passes with a bug in it, or without any answer."""
    good = Tally(Counter({Outcome.RIGHT: 5, Outcome.FAILED: 3}), Counter({"kill prefill": 1}), 1)
    assert good.clean and good.requests == 8
    for bug in (Outcome.LOST, Outcome.WRONG, Outcome.UNEXPLAINED):
        assert not (good + Tally(Counter({bug: 1}), Counter())).clean
    assert not replace(good, leaked_tokens=16).clean
    assert not replace(good, problems=("decode.1 died",)).clean
    assert not Tally(Counter({Outcome.FAILED: 3}), Counter()).clean
    assert not EMPTY.clean


def test_arms_add_up() -> None:
    """Guards the last line of a run, which sums its arms."""
    first = Tally(Counter({Outcome.RIGHT: 5}), Counter({"kill prefill": 1}), 1, 0, ("a",))
    second = Tally(Counter({Outcome.RIGHT: 2, Outcome.LOST: 1}), Counter({"kill prefill": 2}), 3, 7)
    both = first + second
    assert both.outcomes == {Outcome.RIGHT: 7, Outcome.LOST: 1}
    assert (both.faults["kill prefill"], both.restarts, both.leaked_tokens) == (3, 4, 7)
    assert both.problems == ("a",)
