"""The two loops that are measured: prefill's, made like SGLang's scheduler, and decode's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmark.kv_transfer.clocks import TurnClock, Work
from benchmark.kv_transfer.records import RoomPlan, RoomTimes, Round

_READY_S = 30.0


def prepare(end: Any, plans: Sequence[RoomPlan]) -> dict[int, Any]:
    """Senders of rooms that decode has announced; not part of any measurement.

    Raises:
        TimeoutError: a room is not announced; the text names it.
    """
    senders = {plan.room: end.sender(plan) for plan in plans}
    deadline = time.monotonic() + _READY_S
    for room, sender in senders.items():
        while not sender.ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"room {room} was not announced within {_READY_S:.0f} s")
            time.sleep(0.001)
    return senders


def run_round(
    end: Any,
    plans: Sequence[RoomPlan],
    senders: dict[int, Any],
    *,
    in_flight: int,
    limit_s: float,
    pause_s: float,
    page_bytes: int,
    work_s: float = 0.0,
) -> Round:
    """Send all rooms, at most ``in_flight`` of them under way, and wait for their ends.

    As in SGLang's event loop, one thread sends the chunks of the rooms whose turn it is, then looks
    at all rooms under way, then does something else (here: sleeps ``pause_s``). ``limit_s``: after
    so long, rooms without an end are ``stuck``. ``work_s``: so much Python work in each turn, which
    then sends one room at most; every turn is timed.
    """
    waiting = deque(plans)
    active: dict[int, RoomTimes] = {}
    ended: list[RoomTimes] = []
    work, clock = Work(work_s), TurnClock() if work_s else None
    cpu, began = time.process_time(), time.monotonic()
    while (waiting or active) and time.monotonic() - began < limit_s:
        turn = time.monotonic()
        while waiting and len(active) < in_flight:
            plan = waiting.popleft()
            times = active[plan.room] = RoomTimes(plan.room, plan.peer, began=turn)
            try:
                _send(senders[plan.room], plan, times)
            except Exception as error:  # libraries raise bare exceptions of several kinds
                times.error = f"send raised: {error!r}"
                ended.append(_end(times, senders, "failed"))
                del active[plan.room]
            if work_s:
                break
        end.step()
        for room in list(active):
            times = active[room]
            try:
                outcome = senders[room].poll()
            except Exception as error:  # it would end the stock scheduler
                times.error, outcome = f"poll raised: {error!r}", "failed"
            if outcome is not None:
                ended.append(_end(times, senders, outcome))
                del active[room]
        work()
        if active:
            time.sleep(pause_s)
        if clock is not None:
            clock.turn()
    wall, used = time.monotonic() - began, time.process_time() - cpu
    ended += [_end(times, senders, "stuck") for times in active.values()]
    ended += [RoomTimes(plan.room, plan.peer, error="never sent") for plan in waiting]
    sizes = {plan.room: len(plan.source) * page_bytes for plan in plans}
    moved = sum(sizes[times.room] for times in ended if times.outcome == "done")
    turns = clock.turns if clock is not None else []
    return Round(ended, wall, used, moved, turns=turns)


def _send(sender: Any, plan: RoomPlan, times: RoomTimes) -> None:
    sender.start()
    for pages in plan.parts():
        cpu, began = time.thread_time(), time.perf_counter()
        sender.send(pages)
        times.sends.append(time.perf_counter() - began)
        times.send_cpus.append(time.thread_time() - cpu)


def _end(times: RoomTimes, senders: dict[int, Any], outcome: str) -> RoomTimes:
    times.ended, times.outcome = time.monotonic(), outcome
    sender = senders.pop(times.room)
    sender.close(outcome)
    times.error = times.error or sender.error
    return times


def await_rooms(end: Any, rooms: Sequence[int], limit_s: float, pause_s: float) -> dict[int, float]:
    """When each room was seen complete; 0 for those that failed, or had no end within ``limit_s``
    (or where the library does not tell)."""
    deadline = time.monotonic() + limit_s
    arrived = dict.fromkeys(rooms, 0.0)
    left = list(rooms)
    while left and time.monotonic() < deadline:
        for room in list(left):
            outcome = end.poll(room)
            if outcome is None:
                continue
            if outcome == "done":
                arrived[room] = time.monotonic()
            left.remove(room)
            end.forget(room)
        if left:
            time.sleep(pause_s)
    return arrived
