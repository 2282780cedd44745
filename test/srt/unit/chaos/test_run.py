"""A whole arm against a fake pair: what is lost, wrong or leaked comes out at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.harness.process import ServerFailed
from chaos import run
from chaos.bank import Bank, Question
from chaos.events import EventFile
from chaos.plan import Fault, FaultKind, How, Leave, Plan, Send
from chaos.run import Account, Chaos
from chaos.tally import Outcome
from unit.chaos.fake_pair import FakePair

pytestmark = pytest.mark.slow

BANK = Bank(tuple(Question(i, (i, i), tuple(range(i, i + 20))) for i in range(8)), (4, 4))
SENDS = tuple(
    Send(0.02 * i, i, i % 8, Leave(How.DISCONNECT, 0.05) if i == 3 else None) for i in range(12)
)
ONE = "1.0-000008"
"""A request of the plan."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "AFTERMATH_S", 0.0)
    monkeypatch.setattr(run, "SEEN_DEAD_AFTER_S", 0.1)


def play(
    folder: Path,
    tamper: Callable[[dict[str, Any], list[int]], Any] | None = None,
    faults: tuple[Fault, ...] = (),
    **pair_is: Any,
) -> Account:
    """Runs the plan; ``pair_is``: attributes of the ``FakePair``."""
    # Long enough for all to be sent on a busy machine.
    plan = Plan(1, 0, 2.0, SENDS, faults)
    with FakePair(BANK, tamper) as pair, EventFile(folder / "events.jsonl") as events:
        for name, value in pair_is.items():
            setattr(pair, name, value)
        servers: Any = pair
        return Chaos(servers, plan, BANK, "fake-1", events).run()


def test_a_clean_arm(tmp_path: Path) -> None:
    """Guards against false alarms, against requests that are counted twice or not at all, and
    against a verdict that the event log does not have."""
    account = play(tmp_path)
    assert account.tally.clean and account.tally.requests == 12
    assert account.tally.outcomes == {Outcome.RIGHT: 11, Outcome.ABORTED: 1}
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    for what in ("sent", "ended", "judged"):
        assert sorted(e["number"] for e in events if e["what"] == what) == list(range(12))


@pytest.mark.parametrize(
    ("bad", "outcome"),
    [([0, 1, 99], Outcome.WRONG), ([0, 1], Outcome.WRONG), ([], Outcome.UNEXPLAINED)],
    ids=["another token", "too short", "no answer"],
)
def test_one_bad_answer_is_found(tmp_path: Path, bad: list[int], outcome: Outcome) -> None:
    """Guards the point of it all: one bad answer among good ones makes the run fail, and the report
    names the request."""
    account = play(tmp_path, lambda body, tokens: bad if body["rid"] == ONE else tokens)
    assert not account.tally.clean
    assert account.tally.outcomes[outcome] == 1
    ((life, verdict),) = account.bugs
    assert (life.rid, verdict.outcome) == (ONE, outcome)


def test_abort_all_hits_those_under_way(tmp_path: Path) -> None:
    """Guards against an abort of everything that excuses requests sent before or after it."""
    account = play(tmp_path, faults=(Fault(0.15, FaultKind.ABORT_ALL_DECODE),))
    assert account.tally.clean
    aborted, right = (account.tally.outcomes[o] for o in (Outcome.ABORTED, Outcome.RIGHT))
    assert aborted > 1 and right > 1 and aborted + right == 12


def test_a_server_broken_for_good_is_found(tmp_path: Path) -> None:
    """Guards against a pair that survives the faults and then answers nobody right."""
    account = play(tmp_path, lambda body, tokens: [5, 5] if ".last-" in body["rid"] else tokens)
    assert len(account.tally.problems) == run.LAST_QUESTIONS
    assert "asked again at the end" in account.tally.problems[0]


@pytest.mark.parametrize(
    ("pair_is", "problem"),
    [
        ({"held": 16}, "decode holds 16 tokens after the last request"),
        ({"unbalanced": True}, "TimeoutError: {'decode': 5} is all that was logged"),
        ({"master": "a store", "staged": Counter(store_read_pages=19)}, "19 pages came from the"),
        ({"stuck": True}, "TimeoutError: the stage holds a page"),
        ({"turns": Counter({("local", "x"): 1, ("remote", "x"): 20})}, "decode computed 1 of 21"),
    ],
    ids=["leaked tokens", "invariants unchecked", "store unread", "leaked stage", "turns unused"],
)
def test_what_no_client_sees_is_found(
    tmp_path: Path, pair_is: dict[str, Any], problem: str
) -> None:
    """Guards against memory and staging pages that are lost while all answers are right, and
    against a run that does not try what its arm is called."""
    account = play(tmp_path, **pair_is)
    assert not account.tally.clean
    assert any(problem in found for found in account.tally.problems)
    assert (account.tally.leaked_tokens > 0) == ("held" in pair_is)


def test_errors_in_logs_are_found(tmp_path: Path) -> None:
    """Guards against a traceback that no client got to know of."""
    log = tmp_path / "decode.1.log"
    log.write_text("Traceback (most recent call last):\n  x\nKeyError: 7\n")
    server = SimpleNamespace(process=SimpleNamespace(log=log), killed_at=None)
    (problem,) = play(tmp_path, incarnations=[server]).tally.problems
    assert "KeyError: 7" in problem


def test_a_server_that_dies_by_itself_is_found(tmp_path: Path) -> None:
    """Guards against a crash that passes for one of our kills: it is named, and started again."""
    (log := tmp_path / "decode.1.log").write_text("up\n")
    failure = ServerFailed("decode", "it ended with status 3", log, "the last line")
    process = SimpleNamespace(failure=lambda: failure, log=log, stop=lambda: None)
    dead = SimpleNamespace(role="decode", name="decode.1", process=process, killed_at=None)
    account = play(tmp_path, died=[dead])
    assert not account.tally.clean and account.tally.restarts == 1
    (problem,) = account.tally.problems
    assert problem == "decode.1 died: it ended with status 3\nthe last line"
