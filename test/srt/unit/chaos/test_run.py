"""A whole arm against a fake pair: what is planned is done, and every bug comes out at the end."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos import run
from chaos.bank import Bank, Question
from chaos.events import EventFile, read_events
from chaos.plan import Fault, FaultKind, How, Leave, Plan, Send
from chaos.run import Account, Chaos
from chaos.tally import Outcome
from unit.chaos.fake_pair import FakeMaster, FakePair, incarnation

pytestmark = pytest.mark.slow

BANK = Bank(tuple(Question(i, (i, i), tuple(range(i, i + 20))) for i in range(8)), (4, 4))
SENDS = tuple(
    Send(0.02 * i, i, i % 8, Leave(How.DISCONNECT, 0.05) if i == 3 else None) for i in range(12)
)
FAULTS = (
    Fault(0.1, FaultKind.KILL_PREFILL),
    Fault(0.2, FaultKind.STOP_PREFILL, 0.05),
    Fault(0.3, FaultKind.STOP_PREFILL_SCHEDULER, 0.05),
    Fault(0.4, FaultKind.KILL_DECODE),
)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "AFTERMATH_S", 0.0)
    # A request that waited for a restart would be due after the end of so short a plan.
    monkeypatch.setattr(run, "DOWN_EVERY_S", 0.0)


def play(
    folder: Path,
    tamper: Callable[[dict[str, Any], list[int]], Any] | None = None,
    faults: tuple[Fault, ...] = (),
    log: str = "",
    held: int = 0,
    staged: int | None = None,
    stuck: bool = False,
    turns: tuple[int, int] | None = None,
) -> tuple[Account, FakePair]:
    """Runs the plan; ``log``: what a server wrote, ``held``: tokens that decode keeps, ``staged``:
    pages that came from a store, where there is one, ``stuck``: the stage keeps one, ``turns``:
    computed by decode and by prefill, where decode may."""
    (folder / "decode.1.log").write_text(log)
    # Long enough for all to be sent on a busy machine.
    plan = Plan(1, 0, 2.0, SENDS, faults)
    with FakePair(BANK, tamper) as pair, EventFile(folder / "events.jsonl") as events:
        pair.incarnations = [incarnation(folder / "decode.1.log")]
        pair.held, pair.stuck = held, stuck
        if turns is not None:
            names = ("local", "cheaper"), ("remote", "long")
            pair.turns = Counter(dict(zip(names, turns, strict=True)))
        if staged is not None:
            pair.master = FakeMaster(pair.done)
            pair.staged["store_read_pages"] = staged
        servers: Any = pair
        return Chaos(servers, plan, BANK, "fake-1", events).run(), pair


def test_a_clean_arm(tmp_path: Path) -> None:
    """Guards against false alarms, and against requests that are counted twice or not at all."""
    account, pair = play(tmp_path)
    assert account.tally.clean and account.tally.requests == 12
    assert account.tally.outcomes == {Outcome.RIGHT: 11, Outcome.ABORTED: 1}
    assert account.tally.faults == {"disconnect": 1}
    # Idle, asked again, idle, flushed, invariants checked, idle.
    assert pair.done == ["settle", "settle", "flush", "balanced", "settle"]
    assert sum(role == "decode" for role, _ in pair.seen) == 12 + run.LAST_QUESTIONS


def test_faults_are_carried_out_in_turn(tmp_path: Path) -> None:
    """Guards against a fault that is counted and was not done, a server that stays stopped, and one
    that is not started again."""
    account, pair = play(tmp_path, faults=FAULTS)
    assert pair.done[:8] == [
        "kill prefill",
        "start prefill",
        "pause prefill",
        "resume [17]",
        "pause prefill scheduler",
        "resume [17]",
        "kill decode",
        "start decode",
    ]
    assert account.tally.restarts == 2
    assert {fault.kind.value: 1 for fault in FAULTS}.items() <= account.tally.faults.items()


def test_the_store_is_stopped_and_killed_and_excuses_nothing(tmp_path: Path) -> None:
    """Guards against a store that stays away, and against a request that may fail of it."""
    faults = (Fault(0.1, FaultKind.STOP_STORE, 0.02), Fault(0.2, FaultKind.KILL_STORE, 0.02))

    def tamper(body: dict[str, Any], tokens: list[int]) -> list[int]:
        return [] if body["rid"] == "1.0-000008" else tokens

    account, pair = play(tmp_path, tamper, faults, staged=run.LEAST_READ_PAGES)
    assert pair.done[:4] == ["stop store", "continue store", "kill store", "start store"]
    assert {fault.kind.value: 1 for fault in faults}.items() <= account.tally.faults.items()
    assert account.tally.outcomes[Outcome.UNEXPLAINED] == 1


def test_decode_is_flushed_and_paused_and_that_excuses_nothing(tmp_path: Path) -> None:
    """Guards against a server that stays paused, and against a request that may fail of it."""
    faults = (
        Fault(0.1, FaultKind.FLUSH_DECODE),
        Fault(0.2, FaultKind.PAUSE_DECODE, 0.02),
        Fault(0.3, FaultKind.RETRACT_DECODE, 0.02),
    )

    def tamper(body: dict[str, Any], tokens: list[int]) -> list[int]:
        return [] if body["rid"] == "1.0-000008" else tokens

    account, pair = play(tmp_path, tamper, faults, turns=(5, 20))
    assert pair.done[:5] == [
        "flush_cache on decode",
        "pause_generation in_place on decode",
        "continue_generation on decode",
        "pause_generation retract on decode",
        "continue_generation on decode",
    ]
    assert account.tally.outcomes[Outcome.UNEXPLAINED] == 1 and account.tally.problems == ()


@pytest.mark.parametrize(
    ("left", "problem"),
    [
        ({"staged": run.LEAST_READ_PAGES - 1}, "19 pages came from the store"),
        ({"staged": 5, "stuck": True}, "TimeoutError: the stage holds a page"),
        ({"turns": (1, 20)}, "decode computed 1 of 21 turns"),
        ({"held": 16}, "decode holds 16 tokens after the last request"),
        ({"log": "Traceback (most recent call last):\n  x\nKeyError: 7\n"}, "KeyError: 7"),
    ],
)
def test_what_no_client_sees_is_found(tmp_path: Path, left: dict[str, Any], problem: str) -> None:
    """Guards against a run that says nothing of the way from the store, against staging pages and
    memory that are lost while all answers are right, and against errors in a log."""
    account, _ = play(tmp_path, **left)
    assert not account.tally.clean
    assert any(problem in found for found in account.tally.problems)
    assert (account.tally.leaked_tokens > 0) == ("held" in left)


def test_abort_all_hits_those_under_way(tmp_path: Path) -> None:
    """Guards against an abort of everything that excuses requests sent before or after it."""
    account, _ = play(tmp_path, faults=(Fault(0.15, FaultKind.ABORT_ALL_DECODE),))
    assert account.tally.clean
    aborted, right = (account.tally.outcomes[o] for o in (Outcome.ABORTED, Outcome.RIGHT))
    assert aborted > 1 and right > 1 and aborted + right == 12


@pytest.mark.parametrize(
    ("bad", "outcome"),
    [
        ([0, 1, 99], Outcome.WRONG),
        ([0, 1], Outcome.WRONG),
        ([], Outcome.UNEXPLAINED),
    ],
)
def test_one_bad_answer_is_found(tmp_path: Path, bad: list[int], outcome: Outcome) -> None:
    """Guards the point of it all: one bad answer among good ones makes the run fail, and the report
    names the request."""

    def tamper(body: dict[str, Any], tokens: list[int]) -> list[int]:
        return bad if body["rid"] == "1.0-000008" else tokens

    account, _ = play(tmp_path, tamper)
    assert not account.tally.clean
    assert account.tally.outcomes[outcome] == 1
    ((life, verdict),) = account.bugs
    assert (life.rid, verdict.outcome) == ("1.0-000008", outcome)


def test_a_server_broken_for_good_is_found(tmp_path: Path) -> None:
    """Guards against a pair that survives the faults and then answers nobody right."""

    def tamper(body: dict[str, Any], tokens: list[int]) -> list[int]:
        return [5, 5] if ".last-" in body["rid"] else tokens

    account, _ = play(tmp_path, tamper)
    assert len(account.tally.problems) == run.LAST_QUESTIONS
    assert "asked again at the end" in account.tally.problems[0]


def test_the_event_log_tells_each_request_from_start_to_verdict(tmp_path: Path) -> None:
    """Guards the file that one has left when a run of the night failed."""
    play(tmp_path, faults=FAULTS[:1])
    events = read_events(tmp_path / "events.jsonl")
    for what in ("sent", "ended", "judged"):
        assert sorted(e.number for e in events if e.what == what and e.number is not None) == list(
            range(12)
        )
    assert [e.fields["kind"] for e in events if e.what == "fault"] == ["kill prefill"]
