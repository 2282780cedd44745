"""A decode rank without a transport, and prefill servers whose answers a test sets."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import requests

from component.transfer import bare
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.decode import heartbeat
from sglang.srt.disaggregation.delta.decode.heartbeat import WatchedServers
from sglang.srt.disaggregation.delta.decode.prefill_servers import Tables
from unit.delta.fakes import Sockets

ADDRESS, ROOM = "10.0.0.1:8998", 7
#: A server's answer: a status and a body, an error, or a function that returns one of them; None:
#: no process listens there.
Answer = Any


def run_of_ours(name: str | None) -> Answer:
    """Return the answer of a prefill server of this release; ``name``: names this run of it."""
    return 200, msgspec.json.encode(msgspec.structs.replace(wire.OURS, incarnation=name))


class Beats:
    """The heartbeat's thread: sleeps until a test lets it probe once."""

    #: Number of failed probes after which a server is lost.
    failures = 1

    def __init__(self, servers: WatchedServers) -> None:
        self._servers, self._runs = servers, False
        self._go, self._asleep = threading.Semaphore(0), threading.Semaphore(0)

    def sleep(self, seconds: float) -> None:
        """Block as the thread does between two probes."""
        self._asleep.release()
        self._go.acquire()

    def __call__(self) -> None:
        """Let the thread probe each server once."""
        if not self._runs:
            self._runs = True
            self._servers.start_heartbeat(7.0, self.failures)
            assert self._asleep.acquire(timeout=60)
        self._go.release()
        assert self._asleep.acquire(timeout=60)


class Prefills:
    """A decode rank with its ``manager`` and ``servers``. A prefill server has two ranks, without
    listeners at their ports."""

    def __init__(self, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        self.sockets = Sockets()
        patch.setattr(wire, "PeerSockets", lambda: self.sockets)
        self._get = requests.get
        patch.setattr(requests, "get", self.get)
        self.manager = bare.decode("nixl", local_ip="10.9.9.9")
        #: Closed sockets of SGLang's receivers.
        self.dropped: list[tuple[str, int]] = []
        self.servers = self.manager.servers = WatchedServers(
            self.manager.rank,
            self.manager.statuses,
            Tables.of(self.manager),
            self.manager.server_args,
            ask=self.topology,
            peer_name=lambda: "decode",
            drop_socket=lambda *address: self.dropped.append(address),
        )
        self.beat = Beats(self.servers)
        patch.setattr(heartbeat, "time", self.beat)
        #: Answers by address.
        self.answers: dict[str, Answer] = {}
        #: Called during each query or probe of a server.
        self.meanwhile: Callable[[], None] = lambda: None
        #: Topology queries by address, and servers that hang.
        self.asked: Counter[str] = Counter()
        self.hung: set[str] = set()
        self.problem: Exception | None = None
        self._go_on = threading.Event()
        stack.callback(self._go_on.set)
        self.urls: list[str] = []
        self.ports = [stack.enter_context(socket.socket()) for _ in range(3)]
        for port in self.ports:
            port.bind(("127.0.0.1", 0))
        *ranks, nobody = [
            {"rank_ip": "127.0.0.1", "rank_port": port.getsockname()[1]} for port in self.ports
        ]
        self.ranks, self._nobody = ranks, f"http://127.0.0.1:{nobody['rank_port']}/"

    # ---- answers of prefill servers ----

    def get(self, url: str, timeout: float) -> Any:
        """Stand in for ``requests.get``."""
        assert timeout == 5.0
        self.urls.append(url)
        self.meanwhile()
        answer = self.answers[url.split("/")[2]]
        if callable(answer):
            answer = answer()
        if answer is None:
            return self._get(self._nobody, timeout=timeout)
        if isinstance(answer, Exception):
            raise answer
        status, body = answer
        return SimpleNamespace(status_code=status, ok=status < 400, content=body)

    def topology(self, address: str) -> bool:
        """Stand in for SGLang's own topology query."""
        self.asked[address] += 1
        if self.problem is not None:
            raise self.problem
        self.manager.prefill_info_table[address] = object()
        self.meanwhile()
        assert address not in self.hung or self._go_on.wait(60)
        return True

    def go_on(self) -> None:
        """Let all hung servers answer."""
        self._go_on.set()

    # ---- calls of the scheduler ----

    def ask(self, address: str = ADDRESS) -> bool:
        """Query as at each step, until the answer is there; return True if the server is known
        then."""
        known, until = self.servers.connections.ensure(address), time.monotonic() + 30
        while not known and self.servers.connections.is_asking(address):
            assert time.monotonic() < until
            known = self.servers.connections.ensure(address)
        return known

    def connect(self, address: str = ADDRESS, name: str | None = "a", ranks: Any = None) -> None:
        """Connect to the run ``name`` of a server."""
        self.answers[address] = run_of_ours(name)
        assert self.ask(address)
        self.servers.connected(address, self.ranks if ranks is None else ranks)
        self.manager.connection_pool[f"{address}_0_0_0"] = ranks

    def room(self, room: int = ROOM, address: str = ADDRESS) -> None:
        """Add a request that waits for a room."""
        self.manager.addr_to_rooms_tracker[address].add(room)
        self.manager.transfer_statuses[room].address = address
        self.manager.update_status(room, KVPoll.WaitingForInput)

    def give_up(self, room: int = ROOM, address: str = ADDRESS) -> Any:
        """Give a room up; return the deferred release, or None."""
        return bare.announced(self.manager, room, address).defer_free()

    def end_of(self, room: int = ROOM) -> str | None:
        """Return the reason for a room's failure, or None."""
        has_failed = self.manager.request_status[room] == KVPoll.Failed
        return self.manager.failure_records[room] if has_failed else None
