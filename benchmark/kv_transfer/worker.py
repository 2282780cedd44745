"""One process of the benchmark: prefill, or one decode peer. Started by ``fleet.py``.

Given several sockets it imports SGLang once and forks a process for each, since importing takes
longer than measuring. With CUDA a process each is started, as a CUDA context outlives no fork.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmark.kv_transfer import loops
from benchmark.kv_transfer.clocks import ThreadUse, use_over
from benchmark.kv_transfer.records import Failure, Peer, RoomPlan, Setup


class _Process:
    """What both roles can do. Public methods are what ``Fleet.ask`` may name."""

    def __init__(self, setup: Setup) -> None:
        from benchmark.kv_transfer.pool import Pool

        self.setup = setup
        self.pool = Pool(setup.shape, setup.page_size, setup.pool_pages, setup.device)

    def idle(self, seconds: float) -> list[ThreadUse]:
        """CPU time of every thread while nothing is asked."""
        return use_over(seconds)


class _Prefill(_Process):
    def __init__(self, setup: Setup) -> None:
        from benchmark.kv_transfer.sglang_ends import Prefill

        super().__init__(setup)
        self.pool.fill()
        self._end = Prefill(setup, self.pool)
        self._plans: Sequence[RoomPlan] = ()
        self._senders: dict[int, Any] = {}

    def prepare(self, plans: Sequence[RoomPlan]) -> None:
        self._plans = plans
        self._senders = loops.prepare(self._end, plans)

    def round(self, in_flight: int, limit_s: float) -> Any:
        return loops.run_round(
            self._end,
            self._plans,
            self._senders,
            in_flight=in_flight,
            limit_s=limit_s,
            pause_s=self.setup.prefill_pause_s,
            page_bytes=self.pool.item_len * len(self.pool.buffers),
            work_s=self.setup.prefill_work_s,
        )


class _Decode(_Process):
    def __init__(self, setup: Setup) -> None:
        from benchmark.kv_transfer.sglang_ends import Decode

        super().__init__(setup)
        self.pool.blank()
        self._end = Decode(setup, self.pool)
        self._cpu = 0.0

    def describe(self) -> Peer:
        return self._end.describe(os.getpid())

    def announce(self, plans: Sequence[RoomPlan]) -> None:
        for plan in plans:
            self._end.announce(plan)
        self._cpu = time.process_time()

    def await_rooms(self, rooms: Sequence[int], limit_s: float) -> tuple[dict[int, float], float]:
        arrived = loops.await_rooms(self._end, rooms, limit_s, self.setup.decode_pause_s)
        return arrived, time.process_time() - self._cpu

    def wrong_pages(self, plans: Sequence[RoomPlan]) -> int:
        return sum(self.pool.wrong_pages(plan) for plan in plans)


def serve(connection: Connection) -> None:
    """Do what the benchmark asks, one thing at a time, until it is gone."""
    role: Any = None
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            if name == "start":
                (setup,) = arguments
                role = (_Prefill if setup.role == "prefill" else _Decode)(setup)
                reply = None
            else:
                reply = getattr(role, name)(*arguments)
        except Exception:
            traceback.print_exc()
            reply = Failure(traceback.format_exc())
        connection.send(reply)


def _look_without_a_pause() -> None:
    from sglang.srt.disaggregation.delta.prefill import send_queue

    send_queue.next_poll = lambda now, age, is_overdue=False: now


def main(arm: str, descriptors: Sequence[int]) -> None:
    importlib.import_module("benchmark.kv_transfer.sglang_ends").preload()
    if arm == "ours-spin":
        _look_without_a_pause()
    children = []
    for descriptor in descriptors[1:]:
        child = os.fork()
        if child == 0:
            descriptors = [descriptor]
            break
        children.append(child)
    try:
        serve(Connection(descriptors[0]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # NIXL crashes an interpreter without a GPU driver at exit, after all work is done.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], [int(argument) for argument in sys.argv[2:]])
