"""Clients: both halves of a request, every way to take it back, and what is known afterwards."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmark.harness.client import open_session
from chaos.bank import Bank, Question
from chaos.clients import Life, abort, live, new_life
from chaos.plan import How, Leave
from chaos.tally import Outcome, judge
from unit.chaos.fake_pair import FakePair

ANSWER = tuple(range(100, 130))
BANK = Bank((Question(0, (1, 2, 3), ANSWER), Question(1, (4, 5), ANSWER[:3])), (2,))
LEAVE_S = 0.08


@pytest.fixture
def pair() -> Iterator[FakePair]:
    with FakePair(BANK) as running:
        yield running


def ask(pair: FakePair, leave: Leave | None = None, **options: Any) -> Life:
    """Sends the first question."""
    life = new_life(pair.addresses, 7, "t", BANK.questions[0])

    async def go() -> None:
        async with open_session(20) as session:
            await live(session, pair.addresses, life, leave, **options)

    asyncio.run(go())
    return life


def verdict(life: Life) -> Outcome:
    return judge(life.observed(0.0), []).outcome


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition, with a deadline."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def test_both_halves_carry_one_room_and_one_id(pair: FakePair) -> None:
    """Guards against halves that never meet, and against aborts by an id that no server knows."""
    answered = []
    life = ask(pair, on_answer=lambda: answered.append(True))
    assert verdict(life) is Outcome.RIGHT
    assert answered == [True]
    roles, bodies = zip(*sorted(pair.seen, key=lambda seen: seen[0]), strict=True)
    assert roles == ("decode", "prefill")
    assert bodies[0] == bodies[1]
    assert bodies[0]["rid"] == life.rid == "t-000007"
    assert bodies[0]["bootstrap_room"] == life.room
    assert bodies[0]["sampling_params"]["max_new_tokens"] == len(ANSWER)


def test_a_disconnected_client_knows_what_had_arrived(pair: FakePair) -> None:
    """Guards against wrong tokens that nobody looks at because the client left, and against a half
    that stays connected."""
    life = ask(pair, Leave(How.DISCONNECT, LEAVE_S))
    assert life.left and not life.aborted_on
    assert list(ANSWER[: len(life.decode.output_ids)]) == life.decode.output_ids
    assert 0 < len(life.decode.output_ids) < len(ANSWER)
    assert verdict(life) is Outcome.ABORTED
    until(lambda: pair.gone >= 1)


@pytest.mark.parametrize(
    ("how", "roles"),
    [
        (How.ABORT_DECODE, ["decode"]),
        (How.ABORT_PREFILL, ["prefill"]),
        (How.ABORT_BOTH, ["decode", "prefill"]),
    ],
)
def test_aborts_go_where_they_should(pair: FakePair, how: How, roles: list[str]) -> None:
    """Guards against an abort that is counted and was sent to nobody, or to the wrong server."""
    life = ask(pair, Leave(how, LEAVE_S))
    asked = [(role, body) for role, body in pair.seen if role.startswith("abort")]
    assert sorted(asked) == [(f"abort {role}", {"rid": life.rid}) for role in roles]
    assert life.aborted_on == roles and life.taken_back is how
    assert life.decode.error == "Aborted"
    assert verdict(life) is Outcome.ABORTED


def test_a_late_abort_is_none(pair: FakePair) -> None:
    """Guards against a failure that is excused by an abort that was never sent."""
    life = ask(pair, Leave(How.ABORT_BOTH, 5.0))
    assert verdict(life) is Outcome.RIGHT
    assert life.taken_back is None and not life.aborted_on


def test_a_request_without_an_end_is_given_up_at_its_deadline() -> None:
    """Guards against a run that hangs with the request that it should report as lost."""
    with FakePair(BANK, lambda body, tokens: "hang") as pair:
        life = ask(pair, deadline_s=0.3)
    assert life.late == ("decode",)
    assert verdict(life) is Outcome.LOST
    assert 0.2 < life.decode.latency_s < 5


def test_a_server_that_is_down_is_an_error_with_a_cause(pair: FakePair) -> None:
    """Guards against a client that raises, which would end the run instead of being counted."""
    life = new_life(pair.addresses, 1, "t", BANK.questions[0])
    down = type(pair.addresses)("http://127.0.0.1:9", "http://127.0.0.1:9", "127.0.0.1", 1)

    async def go() -> None:
        async with open_session(20) as session:
            await live(session, down, life, Leave(How.ABORT_DECODE, 0.0))
            await abort(session, down, ["decode"], [life], everything=True)

    asyncio.run(go())
    assert life.decode.error and "connect" in life.decode.error.lower()
    assert life.prefill.error


@pytest.mark.parametrize(("number", "drops"), [(7, True), (8, False)])
def test_a_request_that_prefill_refused_is_dropped_on_decode(
    pair: FakePair, number: int, drops: bool
) -> None:
    """Guards against a run in which decode is full of requests that no load balancer would leave
    there; some remain, as decode must get rid of them by itself."""
    life = new_life(pair.addresses, number, "t", BANK.questions[0])
    half_down = dataclasses.replace(pair.addresses, prefill="http://127.0.0.1:9")

    async def go() -> None:
        async with open_session(20) as session:
            await live(session, half_down, life)

    asyncio.run(go())
    assert life.prefill.error and not life.late
    assert ("dropped" in (life.decode.error or "")) is drops
    assert verdict(life) is (Outcome.UNEXPLAINED if drops else Outcome.RIGHT)


def test_ids_are_no_prefix_of_another(pair: FakePair) -> None:
    """Guards against aborting request 12 with request 1: SGLang compares only the start."""
    ids = [new_life(pair.addresses, n, "t", BANK.questions[0]).rid for n in (1, 10, 12, 100)]
    assert not any(a != b and b.startswith(a) for a in ids for b in ids)
