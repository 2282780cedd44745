"""A whole arm on fake servers: lost or wrong answers and leaks are reported at the end."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from benchmark.harness.checks import Load
from benchmark.harness.process import ServerFailed
from chaos import clients, run
from chaos.bank import Bank, Question
from chaos.clients import Addresses, Life
from chaos.plan import Fault, FaultKind, Plan, Send
from chaos.run import Account, Chaos
from chaos.servers import Servers
from chaos.tally import Outcome

BANK = Bank(
    Path("model"), tuple(Question(i, (i, i), tuple(range(i, i + 20))) for i in range(8)), (4, 4)
)
#: All are sent at once. A busy machine may omit the last ones, as at the end of a run.
PLAN = Plan(1, 0, 1.0, tuple(Send(0.0, i, i % 8) for i in range(12)), ())
FIRST_RID = "1.0-000000"
"""Id of the first request of the plan."""
IDLE = Load(0, 0)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Servers without a fault; a test overrides single methods."""
    monkeypatch.setattr(run, "AFTERMATH_S", 0.0)
    monkeypatch.setattr(run, "SEEN_DEAD_AFTER_S", 0.1)
    healthy = Mock(spec=Servers, incarnations=[], master=None)
    healthy.addresses = Addresses("http://decode", "http://prefill", "127.0.0.1", 1)
    healthy.start.return_value, healthy.dead.return_value = 0.1, []
    healthy.settle.return_value = {"decode": IDLE, "prefill": IDLE}
    healthy.abort_reach_s = 0.0
    healthy.count_staged.return_value, healthy.count_turns.return_value = Counter(), None
    return healthy


Play = Callable[..., Account]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, servers: Any, tmp_path: Path) -> Play:
    """Run a plan. `bad`: decode's answer to requests whose id contains `to`. `live`: replaces the
    client's function that follows a request."""

    def carry_out(
        bad: list[int] | None = None,
        to: str = FIRST_RID,
        plan: Plan = PLAN,
        banks: Sequence[Bank] = (BANK,),
        live: Any = None,
    ) -> Account:
        async def answer(
            session: Any, addresses: Any, life: Life, *_: Any, **callbacks: Any
        ) -> None:
            tokens = bad if bad is not None and to in life.rid else life.question.answer
            life.decode.output_ids = list(tokens)
            life.decode.finish_reasons = [{"type": "length"}] if tokens else []
            life.decode.finished_at = time.monotonic()
            callbacks.get("on_answer", lambda: None)()

        monkeypatch.setattr(clients, "live", live or answer)
        with (tmp_path / "events.jsonl").open("wb", buffering=0) as events:
            return Chaos(servers, plan, banks, "made up", events).run()

    return carry_out


def test_a_clean_arm(play: Play, tmp_path: Path) -> None:
    """Guards against false alarms, against requests that are counted twice or never, and against a
    verdict without its events in the log."""
    tally = play().tally
    assert tally.clean and tally.outcomes == {Outcome.RIGHT: tally.requests}
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    for what in ("sent", "ended", "judged"):
        numbers = sorted(event["number"] for event in events if event["what"] == what)
        assert numbers == list(range(tally.requests))


@pytest.mark.parametrize(
    ("bad", "outcome"),
    [([0, 1, 99], Outcome.WRONG), ([0, 1], Outcome.WRONG), ([], Outcome.UNEXPLAINED)],
    ids=["another token", "too short", "no answer"],
)
def test_one_bad_answer_is_found(play: Play, bad: list[int], outcome: Outcome) -> None:
    """Guards the purpose of a run: one bad answer among good ones makes the run fail, and the
    report names the request."""
    account = play(bad)
    assert not account.tally.clean
    ((life, verdict),) = account.bugs
    assert (life.rid, verdict.outcome) == (FIRST_RID, outcome)


def test_a_server_broken_for_good_is_found(play: Play) -> None:
    """Guards against a pair that survives the faults and then answers no request right."""
    problems = play([5, 5], to=".last-").tally.problems
    assert len(problems) == run.LAST_QUESTIONS
    assert "asked again at the end" in problems[0]


@pytest.mark.parametrize(
    ("readings", "problem"),
    [
        (
            {"settle.return_value": {"decode": Load(0, 16), "prefill": IDLE}},
            "decode holds 16 tokens after the last request",
        ),
        ({"wait_balanced.side_effect": TimeoutError("unchecked")}, "TimeoutError: unchecked"),
        ({"wait_drained.side_effect": TimeoutError("a page")}, "TimeoutError: a page"),
        (
            {
                "master": "a store",
                "count_staged.return_value": Counter({"prefill store_read_pages": 19}),
            },
            "19 pages came from the store",
        ),
        (
            {"count_staged.return_value": Counter({"decode store_written_pages": 19})},
            "decode wrote 19 pages to the store",
        ),
        (
            {"count_turns.return_value": Counter({("local", "x"): 1, ("remote", "x"): 20})},
            "decode computed 1 of 21 turns",
        ),
    ],
    ids=[
        "leaked tokens",
        "invariants unchecked",
        "leaked stage",
        "store unread",
        "store unwritten",
        "turns unused",
    ],
)
def test_faults_that_no_client_sees_are_found(
    play: Play, servers: Any, readings: dict[str, Any], problem: str
) -> None:
    """Guards against memory and staging pages that are lost while all answers are right, and
    against a run that does not exercise the feature in its arm's name."""
    servers.configure_mock(**readings)
    tally = play().tally
    assert not tally.clean and problem in tally.problems
    assert (tally.leaked_tokens > 0) == ("holds" in problem)


def test_a_server_that_dies_by_itself_is_found(play: Play, servers: Any, tmp_path: Path) -> None:
    """Guards against a crash that passes for one of the run's kills: the server is named and
    started again; and against a traceback in a log that no client noticed."""
    (log := tmp_path / "decode.1.log").write_text("Traceback (most recent call last):\nKeyError: 7")
    failure = ServerFailed("decode", "it ended with status 3", log, "the last line")
    process = SimpleNamespace(failure=lambda: failure, log=log, stop=lambda: None)
    crashed = SimpleNamespace(role="decode", name="decode.1", process=process, killed_at=None)
    servers.incarnations = [crashed]
    servers.dead.side_effect = lambda: [] if crashed.killed_at else [crashed]
    tally = play().tally
    assert not tally.clean and tally.restarts == 1
    died, logged = tally.problems
    assert died == "decode.1 died: it ended with status 3\nthe last line"
    assert "KeyError: 7" in logged


def test_weights_change_between_requests(play: Play, servers: Any) -> None:
    """Guards against requests that meet both weights, or are judged by the other weights' answers;
    and against a server that keeps the old weights unnoticed."""
    others = tuple(replace(question, answer=question.answer[::-1]) for question in BANK.questions)
    banks = {bank.model: bank for bank in (BANK, Bank(Path("other"), others, BANK.threads))}
    serving = [BANK]

    def update(model: Path) -> list[str]:
        serving.append(banks[model])
        return []

    async def live(session: Any, addresses: Any, life: Life, *_: Any, **callbacks: Any) -> None:
        await asyncio.sleep(0.2)
        answer = serving[-1].questions[life.question.number].answer
        life.decode.output_ids, life.decode.finish_reasons = list(answer), [{"type": "length"}]
        life.decode.finished_at = time.monotonic()
        callbacks.get("on_answer", lambda: None)()

    servers.update.side_effect = update
    faults = tuple(Fault(at, FaultKind.NEW_WEIGHTS) for at in (0.1, 0.5, 0.6))
    sends = tuple(Send(0.05 * number, number, number % 8) for number in range(12))
    chaos_plan = Plan(1, 0, 2.0, sends, faults)
    tally = play(plan=chaos_plan, banks=tuple(banks.values()), live=live).tally
    assert tally.clean and tally.outcomes == {Outcome.RIGHT: tally.requests}
    assert tally.requests > 3, "no request after the first update"
    assert [str(bank.model) for bank in serving] == ["model", "other"] * 2

    servers.update.side_effect = lambda model: ["decode does not take new weights"]
    tally = play(plan=Plan(1, 0, 1.0, (), faults[:1]), banks=(BANK,)).tally
    assert "decode does not take new weights" in tally.problems


@pytest.mark.parametrize("reach_s", [0.3, 0.0])
def test_an_abort_of_all_may_reach_later_requests(
    play: Play, servers: Any, monkeypatch: pytest.MonkeyPatch, reach_s: float
) -> None:
    """Guards against a request that is called unexplained because SGLang handled an earlier abort
    after its arrival. Without the pause it is unexplained."""
    aborts: list[float] = []

    async def abort(_: Any, __: Any, roles: list[str], lives: list[Life], **___: Any) -> None:
        await asyncio.sleep(0)  # as a real one, after which every earlier request is known
        aborts.append(time.monotonic())
        for life in lives:  # sent before the abort, and perhaps not served yet on a busy machine
            life.aborted_on.extend(roles)
            life.aborted_at = aborts[0]

    async def live(session: Any, addresses: Any, life: Life, *_: Any, **callbacks: Any) -> None:
        is_reached = aborts and time.monotonic() < aborts[0] + (0.25 if reach_s else 60.0)
        life.decode.output_ids = [] if is_reached else list(life.question.answer)
        life.decode.finish_reasons = [{"type": "abort" if is_reached else "length"}]
        life.decode.error = "Aborted by AbortReq" if is_reached else None
        life.decode.finished_at = time.monotonic()
        callbacks.get("on_answer", lambda: None)()

    monkeypatch.setattr(clients, "abort", abort)
    servers.abort_reach_s = reach_s
    sends = tuple(Send(0.1 * number, number, number % 8) for number in range(12))
    chaos_plan = Plan(1, 0, 1.5, sends, (Fault(0.2, FaultKind.ABORT_ALL_DECODE),))
    tally = play(plan=chaos_plan, live=live).tally
    assert (tally.outcomes[Outcome.UNEXPLAINED] == 0) == tally.clean == bool(reach_s)
