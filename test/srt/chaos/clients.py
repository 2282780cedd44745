"""One client: a request's two halves, its abort and its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmark.harness.client import Json, Request, Result, Target, send
from chaos.bank import Question
from chaos.plan import How, Leave
from chaos.tally import Observed

DEADLINE_S = 120.0
"""Seconds: the sum of the servers' limits (60 to be admitted on decode, 30 to be announced, 30 to
be transferred). Generation takes a few seconds, but no request uses up all three limits."""
CONTROL_TIMEOUT_S = 5.0
"""For requests that a stopped server may never answer, such as an abort."""

ROLES_OF = {
    How.ABORT_DECODE: ("decode",),
    How.ABORT_PREFILL: ("prefill",),
    How.ABORT_BOTH: ("decode", "prefill"),
}


@dataclass(frozen=True)
class Addresses:
    """Where the pair is reached; the same over restarts."""

    decode: str
    prefill: str
    bootstrap_host: str
    bootstrap_port: int

    def url(self, role: str) -> str:
        return self.decode if role == "decode" else self.prefill

    def route(self) -> Json:
        """Return the fields that connect a request's halves, with a new room."""
        target = Target(self.decode, self.prefill, self.bootstrap_host, self.bootstrap_port)
        return target.route()


@dataclass
class Life:
    """A request and the results of its halves. Times: the monotonic clock, seconds."""

    number: int
    rid: str
    room: int
    question: Question
    decode: Result
    prefill: Result
    left: bool = False
    aborted_on: list[str] = field(default_factory=list)
    """Servers that received an abort for it, by id or for all requests."""
    aborted_at: float = 0.0
    """Time of the first of these aborts."""
    taken_back: How | None = None
    """How the client took the request back, or None if the answer was complete first."""
    late: tuple[str, ...] = ()

    @property
    def answered(self) -> bool:
        """True if decode's half has ended, after which an abort has no effect."""
        return self.decode.finished_at > 0.0

    def observed(self, began: float) -> Observed:
        """Return the record to judge, with times relative to ``began``."""
        return Observed(
            number=self.number,
            started_at=self.decode.started_at - began,
            ended_at=self.decode.finished_at - began,
            expected=self.question.answer,
            tokens=self.decode.output_ids,
            finishes=[str(reason.get("type")) for reason in self.decode.finish_reasons],
            error=self.decode.error,
            prefill_error=self.prefill.error,
            left=self.left,
            abort_sent=bool(self.aborted_on),
            late=self.late,
        )


def new_life(addresses: Addresses, number: int, name: str, question: Question) -> Life:
    """Return a request that has not been sent. ``name`` distinguishes runs.

    Ids have equal lengths, because SGLang aborts every request whose id *starts* with the given id.
    """
    now = time.monotonic()
    decode, prefill = Result("decode", now), Result("prefill", now)
    room = int(addresses.route()["bootstrap_room"])
    return Life(number, f"{name}-{number:06d}", room, question, decode, prefill)


async def live(
    session: aiohttp.ClientSession,
    addresses: Addresses,
    life: Life,
    leave: Leave | None = None,
    deadline_s: float = DEADLINE_S,
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Send both halves and wait for their ends; the results are in ``life``.

    ``on_answer`` is called once, when decode's half ends. Prefill's half is awaited even if
    decode's has failed, because a server must end it by itself.
    """
    extra = {**addresses.route(), "bootstrap_room": life.room, "rid": life.rid}
    request = Request(life.question.prompt, len(life.question.answer), extra=extra)
    halves = {
        role: asyncio.create_task(_half(session, addresses.url(role), request, record))
        for role, record in (("prefill", life.prefill), ("decode", life.decode))
    }
    halves["decode"].add_done_callback(lambda half: on_answer())
    ends = time.monotonic() + deadline_s
    try:
        if leave is not None:
            await asyncio.wait([halves["decode"]], timeout=leave.after_s)
            if not life.answered:
                life.taken_back = leave.how
                if leave.how is How.DISCONNECT:
                    life.left = True
                    return
                await abort(session, addresses, ROLES_OF[leave.how], [life])
        await asyncio.wait(
            halves.values(),
            timeout=ends - time.monotonic(),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if _drops_decode(life):
            halves["decode"].cancel()
            await asyncio.wait([halves["decode"]])
            life.decode.error = f"dropped, as prefill's half failed: {life.prefill.error}"
        await asyncio.wait(halves.values(), timeout=ends - time.monotonic())
        life.late = tuple(sorted(role for role, half in halves.items() if not half.done()))
    finally:
        for half in halves.values():
            half.cancel()
        await asyncio.gather(*halves.values(), return_exceptions=True)


def _drops_decode(life: Life) -> bool:
    """Return True if the client cancels decode's half because prefill refused its own.

    A load balancer does so. Every fourth client does not, so that decode receives requests unknown
    to prefill, which only a timeout can end.
    """
    refused = life.prefill.error is not None and not life.prefill.finish_reasons
    return refused and not life.answered and life.number % 4 != 0


async def _half(session: aiohttp.ClientSession, url: str, request: Request, record: Result) -> None:
    try:
        await send(session, Target(url), request, record)
    except OSError as error:  # raised by the kernel; aiohttp passes it through while it writes
        record.error = f"{type(error).__name__}: {error}"
    finally:
        record.finished_at = time.monotonic()


async def abort(
    session: aiohttp.ClientSession,
    addresses: Addresses,
    roles: Sequence[str],
    lives: Sequence[Life],
    *,
    everything: bool = False,
) -> None:
    """Ask servers to abort the request of one life, or ``everything``, and mark ``lives``.

    The request to a server that is down or stopped is ignored.
    """
    for life in lives:
        life.aborted_on.extend(roles)
        life.aborted_at = life.aborted_at or time.monotonic()
    body: Json = {"abort_all": True} if everything else {"rid": lives[0].rid}
    await asyncio.gather(
        *(control(session, f"{addresses.url(role)}/abort_request", body) for role in roles)
    )


async def control(session: aiohttp.ClientSession, url: str, body: Json) -> None:
    """Send a request to a server and ignore the response."""
    timeout = aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S)
    try:
        async with session.post(url, json=body, timeout=timeout) as answer:
            await answer.read()
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
        pass
