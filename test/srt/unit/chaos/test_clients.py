"""Clients: every way to take a request back, and what is known of it afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from benchmark.harness.client import open_session
from chaos.bank import Bank, Question
from chaos.clients import Life, live, new_life
from chaos.plan import How, Leave
from chaos.tally import Outcome, judge
from unit.chaos.fake_pair import FakePair

ANSWER = tuple(range(100, 130))
BANK = Bank((Question(0, (1, 2, 3), ANSWER),), (1,))


@pytest.fixture
def pair() -> Iterator[FakePair]:
    with FakePair(BANK) as running:
        yield running


def ask(pair: FakePair, leave: Leave | None = None, **options: Any) -> Life:
    """Sends the question."""
    life = new_life(pair.addresses, 7, "t", BANK.questions[0])

    async def go() -> None:
        async with open_session(20) as session:
            await live(session, pair.addresses, life, leave, **options)

    asyncio.run(go())
    return life


def verdict(life: Life) -> Outcome:
    return judge(life.observed(0.0), []).outcome


def test_a_request_without_an_end_is_lost() -> None:
    """Guards against a run that hangs with the request that it should report as lost."""
    with FakePair(BANK, lambda body, tokens: "hang") as pair:
        life = ask(pair, deadline_s=0.3)
    assert life.late == ("decode",)
    assert verdict(life) is Outcome.LOST


def test_a_disconnected_client_knows_what_had_arrived(pair: FakePair) -> None:
    """Guards against wrong tokens that nobody looks at because the client left."""
    life = ask(pair, Leave(How.DISCONNECT, 0.08))
    assert life.left and not life.aborted_on
    assert list(ANSWER[: len(life.decode.output_ids)]) == life.decode.output_ids
    assert 0 < len(life.decode.output_ids) < len(ANSWER)
    assert verdict(life) is Outcome.ABORTED


@pytest.mark.parametrize(
    ("how", "roles"),
    [
        (How.ABORT_DECODE, ["decode"]),
        (How.ABORT_PREFILL, ["prefill"]),
        (How.ABORT_BOTH, ["decode", "prefill"]),
    ],
)
def test_aborts_go_where_they_should(pair: FakePair, how: How, roles: list[str]) -> None:
    """Guards against an abort that excuses a failure, and was sent to nobody."""
    life = ask(pair, Leave(how, 0.08))
    asked = [(role, body) for role, body in pair.seen if role.startswith("abort")]
    assert sorted(asked) == [(f"abort {role}", {"rid": life.rid}) for role in roles]
    assert life.aborted_on == roles and verdict(life) is Outcome.ABORTED


def test_a_late_abort_is_none(pair: FakePair) -> None:
    """Guards against a failure that is excused by an abort that was never sent."""
    life = ask(pair, Leave(How.ABORT_BOTH, 5.0))
    assert verdict(life) is Outcome.RIGHT and not life.aborted_on
