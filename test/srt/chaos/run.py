"""One arm of a chaos run: a pair, a plan, and the account of the results."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import msgspec

from benchmark.harness.client import open_session
from benchmark.harness.process import ServerFailed
from chaos import clients
from chaos.arms import Arm
from chaos.bank import Bank
from chaos.clients import Addresses, Life
from chaos.families import serve
from chaos.logs import log_problems
from chaos.plan import HEAVY, PAUSES, Fault, FaultKind, Plan, Send
from chaos.servers import HOLD_S, Servers, chaos_config, current_config
from chaos.tally import AFTERMATH_S, BUGS, Outcome, Tally, Verdict, Window, judge
from component.buffer_only.masters import Master

IN_FLIGHT = 16
"""Maximum number of concurrent requests; the next one waits for a place. More would exceed the
limit on waiting for admission."""
SEEN_DEAD_AFTER_S = 1.0
"""Interval of the checks whether a server has died."""
DOWN_EVERY_S = 1.5
"""Interval of requests while a server restarts and refuses them. Delayed requests follow when the
server is back."""
SETTLE_S = HOLD_S + 30.0
LAST_QUESTIONS = 6
MIN_READ_PAGES = 20
"""Minimum number of pages read from the store, if there is one; fewer would not exercise it."""
MIN_WRITTEN_PAGES = 20
"""Minimum number of pages that decode writes to the store, if it does."""
MIN_LOCAL_SHARE = 0.1
"""Minimum share of all turns that decode computes, if it may compute any."""


@dataclass
class Account:
    """An arm's result: the counts, and each request that is a bug."""

    tally: Tally
    bugs: list[tuple[Life, Verdict]] = field(default_factory=list)
    slowest_failure_s: float = 0.0
    """The longest time from a request's start to its error, over failures with a cause."""
    slowest_abort_s: float = 0.0
    """The longest time from an abort to the end of its request on decode."""


class Chaos:
    """Runs one plan against one pair.

    ``banks``: for the weights that the pair starts with, and for those that it is updated to, in
    turns. ``events`` gets a JSON line for each action and each ended request at once; ``show`` is
    called with progress messages.
    """

    def __init__(
        self,
        servers: Servers,
        plan: Plan,
        banks: Sequence[Bank],
        name: str,
        events: BinaryIO,
        show: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._servers, self._plan, self._name = servers, plan, name
        self._banks = list(banks)
        self._addresses: Addresses = servers.addresses
        self._events, self._show = events, show
        self._began = time.monotonic()
        self._lives: list[Life] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._may_send = asyncio.Lock()
        self._windows: list[Window] = []
        self._faults: Counter[str] = Counter()
        self._restarts = 0
        self._problems: list[str] = []
        self._leaked = 0
        self._down = False

    def run(self) -> Account:
        """Carry out the plan, wait until all requests have ended, and return the account."""
        asyncio.run(self._play())
        self._settle()
        return self._account()

    # ---- the plan ----

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _note(self, event_name: str, life: Life | None = None, **fields: Any) -> None:
        """Log an event; ``at`` is seconds since the arm's first request."""
        event: dict[str, Any] = {"what": event_name, "arm": self._name, "at": round(self._now(), 3)}
        if life is not None:
            event |= {"number": life.number, "rid": life.rid, "room": life.room}
        self._events.write(msgspec.json.encode(event | {"fields": fields}) + b"\n")

    async def _play(self) -> None:
        self._began = time.monotonic()
        for action in self._plan.actions():
            self._note("plan", action=action)
        async with open_session(2 * clients.DEADLINE_S, reuse=False) as session:
            sending = asyncio.create_task(self._send_all(session))
            await self._break_things(session)
            await sending

    async def _until(self, at: float) -> None:
        await asyncio.sleep(max(0.0, at - self._now()))

    async def _until_or_death(self, at: float) -> None:
        while self._now() < at:
            await self._revive()
            await asyncio.to_thread(self._servers.count_staged)  # the server may die by itself
            await asyncio.sleep(min(SEEN_DEAD_AFTER_S, max(0.0, at - self._now())))

    async def _send_all(self, session: aiohttp.ClientSession) -> None:
        places = asyncio.Semaphore(IN_FLIGHT)
        for send in self._plan.sends:
            await self._until(send.at)
            await places.acquire()
            if self._down:
                await asyncio.sleep(DOWN_EVERY_S)
            async with self._may_send:
                if self._now() > self._plan.seconds:
                    break  # the time is up, because all places were taken until now
                self._tasks.append(asyncio.create_task(self._one(session, send, places.release)))
        await asyncio.gather(*self._tasks)

    async def _one(
        self, session: aiohttp.ClientSession, send: Send, on_answer: Callable[[], None]
    ) -> None:
        name = f"{self._plan.seed}.{self._plan.arm}"
        question = self._banks[0].questions[send.question]
        life = clients.new_life(self._addresses, send.number, name, question)
        self._lives.append(life)
        self._note("sent", life, question=send.question, leave=send.leave)
        await clients.live(session, self._addresses, life, send.leave, on_answer=on_answer)
        self._note(
            "ended",
            life,
            seconds=[round(half.latency_s, 3) for half in (life.decode, life.prefill)],
            tokens=len(life.decode.output_ids),
            finishes=life.decode.finish_reasons,
            error=life.decode.error,
            prefill_error=life.prefill.error,
            late=life.late,
        )

    async def _break_things(self, session: aiohttp.ClientSession) -> None:
        for fault in self._plan.faults:
            await self._until_or_death(fault.at)
            self._note("fault", kind=fault.kind, for_s=fault.for_s)
            start = self._now()
            ended = sum(life.answered for life in self._lives)
            self._show(
                f"{start:6.1f} s  {fault.kind.value}; {len(self._lives)} sent, {ended} answered"
            )
            await self._break(session, fault)
            self._faults[fault.kind.value] += 1
            if fault.kind in HEAVY:
                self._windows.append(Window(fault.kind.value, start, self._now()))
            self._note("fault over", kind=fault.kind)
        await self._until_or_death(self._plan.seconds)
        await self._revive()

    async def _break(self, session: aiohttp.ClientSession, fault: Fault) -> None:
        role, servers = fault.kind.role, self._servers
        match fault.kind:
            case FaultKind.KILL_DECODE | FaultKind.KILL_PREFILL:
                await asyncio.to_thread(servers.kill, role)
                self._down = True
                await self._start(role)
                self._down = False
            case FaultKind.STOP_PREFILL | FaultKind.STOP_PREFILL_SCHEDULER:
                scheduler_only = fault.kind is FaultKind.STOP_PREFILL_SCHEDULER
                pids = await asyncio.to_thread(servers.pause, role, scheduler_only=scheduler_only)
                try:
                    await asyncio.sleep(fault.for_s)
                finally:
                    servers.resume(pids)
            case FaultKind.STOP_STORE:
                assert servers.master is not None
                await asyncio.to_thread(servers.master.freeze)
                try:
                    await asyncio.sleep(fault.for_s)
                finally:
                    servers.master.thaw()
            case FaultKind.KILL_STORE:
                assert servers.master is not None
                await asyncio.to_thread(servers.master.kill)
                await asyncio.sleep(fault.for_s)
                await asyncio.to_thread(servers.master.start)
            case FaultKind.NEW_WEIGHTS:
                await self._update()
            case FaultKind.FLUSH_DECODE:  # refused while there are requests
                await clients.control(session, f"{self._addresses.decode}/flush_cache", {})
            case FaultKind.PAUSE_DECODE | FaultKind.RETRACT_DECODE:
                url, how = self._addresses.decode, {"mode": PAUSES[fault.kind]}
                await clients.control(session, f"{url}/pause_generation", how)
                try:
                    await asyncio.sleep(fault.for_s)
                finally:
                    await clients.control(session, f"{url}/continue_generation", {})
            case FaultKind.ABORT_ALL_DECODE if reach_s := servers.abort_reach_s:
                async with self._may_send:
                    await self._abort_all(session, role)
                    await asyncio.sleep(reach_s)
            case _:
                await self._abort_all(session, role)

    async def _abort_all(self, session: aiohttp.ClientSession, role: str) -> None:
        waiting = [life for life in self._lives if not life.answered]
        sent = len(self._lives)
        await clients.abort(session, self._addresses, [role], waiting, everything=True)
        for life in self._lives[sent:]:  # sent during the abort, so it may be aborted or not
            life.aborted_on.append(role)
            life.aborted_at = life.aborted_at or time.monotonic()

    async def _update(self) -> None:
        """Update the weights between requests, so that no request is computed with both."""
        async with self._may_send:
            await asyncio.gather(*self._tasks)
            self._banks.append(self._banks.pop(0))
            self._problems += await asyncio.to_thread(self._servers.update, self._banks[0].model)

    async def _start(self, role: str) -> None:
        took = await asyncio.to_thread(self._servers.start, role)
        self._restarts += 1
        self._note("restarted", role=role, seconds=round(took, 1))

    async def _revive(self) -> None:
        """Record a problem for each server that died by itself, and start the server again."""
        for incarnation in self._servers.dead():
            start = self._now() - SEEN_DEAD_AFTER_S
            failure = incarnation.process.failure()
            self._problems.append(f"{incarnation.name} died: {failure.diagnosis}\n{failure.tail}")
            self._note("died", role=incarnation.role, diagnosis=failure.diagnosis)
            incarnation.killed_at = incarnation.process.log.stat().st_size
            await asyncio.to_thread(incarnation.process.stop)
            await self._start(incarnation.role)
            self._windows.append(Window(f"{incarnation.role} died", start, self._now()))

    # ---- afterwards ----

    def _settle(self) -> None:
        """Check that both servers are idle, balanced and empty, and still answer right."""
        if self._windows:
            time.sleep(max(0.0, self._windows[-1].end + AFTERMATH_S - self._now()))
        self._show(f"{self._now():6.1f} s  settling")
        try:
            self._count_leaks("after the last request")
            since = self._servers.log_sizes()
            self._ask_again()
            self._count_leaks("after the last questions")
            self._servers.wait_drained()
            # The flush also changes the state of a prefill server if decode computed all last
            # questions.
            self._servers.flush()
            self._servers.wait_balanced(since)
            self._count_leaks("after a flush")
            self._servers.wait_drained()
            self._check_staged()
            self._check_turns()
        except (ServerFailed, TimeoutError, RuntimeError, OSError) as error:
            self._problems.append(f"{type(error).__name__}: {str(error)[:2000]}")

    def _check_staged(self) -> None:
        """Record a problem if the store was too little used for a test."""
        staged = self._servers.count_staged()
        self._note("staged", **staged)
        read = staged["prefill store_read_pages"]
        if self._servers.master is not None and read < MIN_READ_PAGES:
            self._problems.append(f"{read} pages came from the store")
        written = staged.get("decode store_written_pages")
        if written is not None and written < MIN_WRITTEN_PAGES:
            self._problems.append(f"decode wrote {written} pages to the store")

    def _check_turns(self) -> None:
        """Record a problem if decode computed too few turns for a test."""
        turns = self._servers.count_turns()
        if turns is None:
            return
        self._note("turns", **{" ".join(key): count for key, count in turns.items()})
        local = sum(count for (where, _), count in turns.items() if where == "local")
        if local < MIN_LOCAL_SHARE * sum(turns.values()):
            self._problems.append(f"decode computed {local} of {sum(turns.values())} turns")

    def _count_leaks(self, when: str) -> None:
        for role, held in self._servers.settle(SETTLE_S).items():
            if held.tokens:
                self._leaked += held.tokens
                self._problems.append(f"{role} holds {held.tokens} tokens {when}")

    def _ask_again(self) -> None:
        """Send a few questions; each must be answered right, because the faults are over."""

        async def ask() -> list[Life]:
            lives = [
                clients.new_life(self._addresses, 900_000 + i, f"{self._plan.seed}.last", question)
                for i, question in enumerate(self._banks[0].questions[-LAST_QUESTIONS:])
            ]
            async with open_session(reuse=False) as session:
                await asyncio.gather(
                    *(clients.live(session, self._addresses, life) for life in lives)
                )
            return lives

        for life in asyncio.run(ask()):
            verdict = judge(life.observed(self._began), [])
            self._note("asked again", life, outcome=verdict.outcome, reason=verdict.reason)
            if verdict.outcome is not Outcome.RIGHT:
                self._problems.append(
                    f"asked again at the end, request {life.rid} (room {life.room}) is "
                    f"{verdict.outcome.value}: {verdict.reason}"
                )

    def _account(self) -> Account:
        outcomes: Counter[Outcome] = Counter()
        bugs = []
        failures, aborts = [0.0], [0.0]
        for life in self._lives:
            seen = life.observed(self._began)
            verdict = judge(seen, self._windows)
            outcomes[verdict.outcome] += 1
            waited = life.decode.finished_at - life.aborted_at if life.aborted_on else None
            self._note(
                "judged",
                life,
                outcome=verdict.outcome,
                reason=verdict.reason,
                aborted_on=life.aborted_on,
                after_abort_s=waited,
            )
            if verdict.outcome in BUGS:
                bugs.append((life, verdict))
            if verdict.outcome is Outcome.FAILED:
                failures.append(seen.ended_at - seen.started_at)
            if verdict.outcome is Outcome.ABORTED and life.aborted_on:
                aborts.append(life.decode.finished_at - life.aborted_at)
        for incarnation in self._servers.incarnations:
            self._problems += log_problems(incarnation.process.log, incarnation.killed_at)
        ways = Counter(life.taken_back.value for life in self._lives if life.taken_back)
        problems = tuple(self._problems)
        tally = Tally(outcomes, self._faults + ways, self._restarts, self._leaked, problems)
        return Account(tally, bugs, max(failures), max(aborts))


def run_arm(
    arm: Arm,
    plan: Plan,
    banks: Sequence[Bank],
    logs: Path,
    events: Path,
    show: Callable[[str], object] = lambda text: None,
) -> Account:
    """Start a pair for the arm, run the plan on it and stop it. Append to ``events``.

    Raises:
        ServerFailed: a server did not start.
    """
    model = banks[0].model
    master = Master() if arm.staged else None
    if arm.current:
        config = current_config(model, arm.backend, arm.page_size, stock=arm.current == "stock")
    else:
        config = chaos_config(
            model, logs, arm.backend, arm.page_size, master, local=arm.local, writes=arm.whole
        )
    config = serve(config, arm.family)
    events.parent.mkdir(parents=True, exist_ok=True)
    with (
        events.open("ab", buffering=0) as file,
        Servers(config, logs, master=master) as servers,
    ):
        return Chaos(servers, plan, banks, arm.name, file, show).run()
