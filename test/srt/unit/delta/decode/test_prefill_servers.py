"""Prefill servers as a decode rank sees them: handshakes, rooms given up, servers lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import capability, wire
from sglang.srt.disaggregation.delta.capability import OURS, STOCK, Capabilities
from sglang.srt.disaggregation.delta.decode import heartbeat, prefill_servers
from sglang.srt.disaggregation.delta.decode.heartbeat import Liveness, Probe
from sglang.srt.disaggregation.delta.decode.prefill_servers import PrefillServers
from sglang.srt.disaggregation.delta.metrics import Reason
from unit.delta.fakes import Manager, Sockets

ADDRESS, ROOM = "10.0.0.1:8998", 7
RANKS = [{"rank_ip": "10.0.0.1", "rank_port": 4000}, {"rank_ip": "10.0.0.1", "rank_port": 4001}]


def incarnation(name: str | None) -> Capabilities:
    """A prefill server of ours, by the name of its run."""
    return Capabilities(delta=OURS.delta, control=OURS.control, incarnation=name)


class Side:
    """A decode rank, and prefill servers that answer as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.manager = Manager()
        self.manager.servers = self.servers = PrefillServers(self.manager, self.ask)
        self.servers._sockets = self.sockets = Sockets()  # type: ignore[assignment]
        self.capabilities: dict[str, Any] = {}
        self.asked = 0
        self.ask_gate = threading.Event()
        self.ask_gate.set()
        self.asking = threading.Event()
        self.problem: Exception | None = None
        monkeypatch.setattr(capability, "fetch_capabilities", self.capabilities.get)

    def ask(self, address: str) -> bool:
        """SGLang's own question."""
        self.asked += 1
        self.asking.set()
        assert self.ask_gate.wait(60)
        if self.problem is not None:
            raise self.problem
        self.manager.prefill_info_table[address] = object()
        return True

    def handshake(self, address: str = ADDRESS, name: str | None = "a", ranks: Any = RANKS) -> None:
        """Connect to a server."""
        self.capabilities[address] = incarnation(name)
        assert until_known(self.servers, address)
        self.servers.connected(address, ranks)
        self.manager.connection_pool[f"{address}_0_0_0"] = ranks

    def room(self, room: int = ROOM, address: str = ADDRESS) -> None:
        """A request that waits for a room."""
        self.manager.addr_to_rooms_tracker[address].add(room)
        self.manager.update_status(room, KVPoll.WaitingForInput)

    def hold(self, room: int = ROOM, address: str = ADDRESS, writers: int = 1, ago: int = 0) -> Any:
        """Give a room up; ``ago``: of that many servers before this one."""
        return self.servers.defer_free(room, address, self.servers.epoch(address) - ago, writers)


def until_known(servers: PrefillServers, address: str) -> bool:
    """Ask as the scheduler does, until the question in the background is answered."""
    known = servers.ensure(address)
    future = servers._asked.get(address)
    if not known and future is not None:
        future.exception(timeout=60)
        known = servers.ensure(address)
    return known


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    made = Side(monkeypatch)
    yield made
    made.ask_gate.set()


# ---- handshake ----


def test_a_server_that_hangs_does_not_stop_the_scheduler(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a scheduler that waits for a server's answer, and against asking anew at every
    step."""
    side.ask_gate.clear()
    side.capabilities[ADDRESS] = incarnation("a")
    monkeypatch.setattr(prefill_servers.Future, "result", lambda future: pytest.fail("it waits"))
    for _ in range(5):
        assert not side.servers.ensure(ADDRESS) and side.servers.is_asking(ADDRESS)
    assert side.asking.wait(60) and side.asked == 1


def test_other_servers_are_reached_meanwhile(side: Side) -> None:
    """Guards against one server that hangs in the way of all others."""
    side.ask_gate.clear()
    side.capabilities[ADDRESS] = incarnation("a")
    assert not side.servers.ensure(ADDRESS)
    side.ask_gate.set()
    side.handshake("10.0.0.2:8998")


def test_many_servers_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a pool that servers which hang fill: handshakes with all others waited for
    the timeouts of those, 14 s with 24 of them."""
    gate, table = threading.Event(), Manager()

    def ask(address: str) -> bool:
        if address != ADDRESS:
            assert gate.wait(60)
        table.prefill_info_table[address] = object()
        return True

    monkeypatch.setattr(capability, "fetch_capabilities", lambda address: incarnation("a"))
    servers = PrefillServers(table, ask)
    assert not any(servers.ensure(f"10.0.1.{number}:8998") for number in range(24))
    try:
        servers.ensure(ADDRESS)
        servers._asked[ADDRESS].result(timeout=10)
        assert servers.ensure(ADDRESS)
    finally:
        gate.set()


def test_a_server_is_known_when_the_handshake_is_over(side: Side) -> None:
    """SGLang lists a server before we know which one it is. Guards against a room that counts as
    one of the server before it, whose pages are given back while the new one writes."""
    side.handshake(name="a")
    side.servers.lost(ADDRESS, True, "gone")
    before = side.servers.epoch(ADDRESS)
    side.capabilities[ADDRESS] = incarnation("b")
    with side.servers._lock:  # the handshake cannot finish
        assert not side.servers.ensure(ADDRESS)
        while ADDRESS not in side.manager.prefill_info_table:
            assert side.asking.wait(60)
        assert not side.servers.ensure(ADDRESS)
    assert until_known(side.servers, ADDRESS) and side.servers.epoch(ADDRESS) == before + 1
    side.room()
    assert side.hold() is not None


def test_an_old_answer_is_not_used_again(side: Side) -> None:
    """Guards against a handshake of long ago that counts after its server was lost: the next room
    would find no server, and fail."""
    side.ask_gate.clear()
    side.capabilities[ADDRESS] = incarnation("a")
    assert not side.servers.ensure(ADDRESS)
    side.ask_gate.set()
    side.servers._asked[ADDRESS].result(timeout=60)
    assert side.servers.ensure(ADDRESS)
    side.servers.disconnect(ADDRESS)
    assert until_known(side.servers, ADDRESS) and ADDRESS in side.manager.prefill_info_table
    assert side.asked == 2


def test_a_server_lost_during_the_handshake(side: Side) -> None:
    """Guards against "known" about a server that is in no table."""
    side.ask_gate.clear()
    side.capabilities[ADDRESS] = incarnation("a")
    assert not side.servers.ensure(ADDRESS)
    side.ask_gate.set()
    side.servers._asked[ADDRESS].result(timeout=60)
    side.servers.disconnect(ADDRESS)
    assert not side.servers.ensure(ADDRESS)
    assert until_known(side.servers, ADDRESS)


def test_what_differs_is_said(side: Side) -> None:
    """SGLang raises where page sizes differ. Guards against that ending the scheduler, and against
    a client that is told of a timeout instead; it is forgotten when the server was replaced."""
    side.capabilities[ADDRESS] = incarnation("a")
    side.problem = RuntimeError("Page size mismatch: 16 and 64")
    assert not until_known(side.servers, ADDRESS)
    assert side.servers.refusals == {ADDRESS: "Page size mismatch: 16 and 64"}
    side.problem = None
    assert until_known(side.servers, ADDRESS) and side.servers.refusals == {}


def test_a_server_that_cannot_be_asked_is_asked_again(side: Side) -> None:
    """Guards against a server that is just starting and counts as stock for ever."""
    assert not until_known(side.servers, ADDRESS) and side.asked == 0
    assert "could not be reached" in side.servers.refusals[ADDRESS]
    assert side.servers.capabilities(ADDRESS) == STOCK
    side.handshake()
    assert side.servers.capabilities(ADDRESS).takes_delta
    assert side.servers.ensure(ADDRESS) and side.asked == 1, "known: not asked again"
    assert side.servers.refusals == {}, "a later abort must not say that it cannot be reached"


def test_a_restart_is_noticed_at_the_next_handshake(side: Side) -> None:
    """Guards against pages held for their whole bound for processes that another one replaced, and
    against giving them back where the same server was only connected to again."""
    side.handshake(name="a")
    side.room(7)
    deferred = side.hold(7)
    side.servers.disconnect(ADDRESS)
    side.handshake(name="a")
    assert not deferred.is_drained()
    side.servers.disconnect(ADDRESS)
    side.handshake(name="b")
    assert deferred.is_drained()
    side.room(8)
    assert side.hold(8, ago=1) is None, "a room of the old one"
    assert side.hold(8) is not None, "one of the new one"


# ---- servers that are lost ----


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_lost_server(side: Side, is_gone: bool) -> None:
    """Guards against rooms that wait for a dead server, and against pages given back because a
    server was silent: it may still write."""
    side.handshake()
    side.room(7)
    side.room(8)
    deferred = side.hold(8)
    side.servers.lost(ADDRESS, is_gone, "why")
    assert side.manager.request_status[7] == KVPoll.Failed
    assert side.manager.failure_records[7] == f"lost prefill server {ADDRESS}: why"
    assert deferred.is_drained() is is_gone and (side.hold(7) is None) is is_gone
    assert not side.manager.prefill_info_table and not side.manager.connection_pool
    ranks = [("10.0.0.1", 4000), ("10.0.0.1", 4001)]
    assert side.sockets.dropped == side.manager.dropped == (ranks if is_gone else [])
    side.servers.lost(ADDRESS, is_gone, "again")
    assert side.manager.failure_records[7].endswith("why")


def test_exactly_one_server_is_lost(side: Side) -> None:
    """Guards against "10.0.0.1:80" taking connections and rooms of "10.0.0.1:8000" with it."""
    short, long = "10.0.0.1:80", "10.0.0.1:8000"
    side.handshake(short)
    side.handshake(long, ranks=[{"rank_ip": "10.0.0.1", "rank_port": 4002}])
    side.room(7, short)
    side.room(8, long)
    side.room(9, long)
    deferred = side.hold(9, long)
    side.servers.lost(short, True, "gone")
    assert side.manager.request_status[8] == KVPoll.WaitingForInput
    assert list(side.manager.connection_pool) == [f"{long}_0_0_0"]
    assert list(side.manager.prefill_info_table) == [long]
    assert not deferred.is_drained() and ("10.0.0.1", 4002) not in side.sockets.dropped
    side.handshake(short, name="b")
    side.room(10, short)
    assert side.hold(10, short) is not None


def test_ended_rooms_keep_their_end(side: Side) -> None:
    """Guards against a finished room that fails, or a failed one that gets another reason, when its
    server is lost afterwards."""
    side.handshake()
    side.room(7)
    side.manager.update_status(7, KVPoll.Success)
    side.room(8)
    side.servers.fail(8, Reason.TIMEOUT, "too late")
    side.servers.lost(ADDRESS, False, "silent")
    assert side.manager.request_status == {7: KVPoll.Success, 8: KVPoll.Failed}
    assert side.manager.failure_records == {8: "too late"}


def test_a_look_says_nothing_of_a_later_server(side: Side) -> None:
    """A server was restarted and connected to while the heartbeat looked. Guards against its rooms
    failing, and their pages being given back, for what the look showed of the one before."""
    side.handshake(name="a")
    side.servers._known()
    side.servers.disconnect(ADDRESS)
    side.handshake(name="b")
    side.room(7)
    side.servers._given_up(ADDRESS, True, "it was restarted")
    assert side.manager.request_status[7] == KVPoll.WaitingForInput
    assert side.hold(7) is not None
    side.servers._known()
    side.servers._given_up(ADDRESS, False, "silent")
    assert ADDRESS not in side.manager.prefill_info_table


# ---- looks and pings ----


class Answer:
    """An HTTP answer."""

    def __init__(self, content: bytes = b"{}", status: int = 200) -> None:
        self.content, self.ok = content, status < 400


def refused() -> Exception:
    """What ``requests`` raises where nobody listens, as deep as it buries it."""
    cause = ConnectionRefusedError(111, "Connection refused")
    inner = Exception("Failed to establish a new connection")
    inner.__cause__ = cause
    outer = Exception("Max retries exceeded")
    outer.reason = inner  # type: ignore[attr-defined]
    return requests.ConnectionError(outer)


@pytest.mark.parametrize(
    ("answer", "probe"),
    [
        (Answer(b'{"incarnation": "a"}'), Probe(Liveness.ALIVE, "a")),
        (Answer(b'{"incarnation": "b"}'), Probe(Liveness.ALIVE, "b")),
        (Answer(b"<html>"), Probe(Liveness.ALIVE)),
        (Answer(b'{"incarnation": "\xff"}'), Probe(Liveness.ALIVE)),
        (Answer(status=503), Probe(Liveness.SILENT)),
        (refused(), Probe(Liveness.GONE)),
        (requests.ConnectionError("reset"), Probe(Liveness.SILENT)),
        (requests.Timeout(), Probe(Liveness.SILENT)),
        (requests.exceptions.InvalidURL(), Probe(Liveness.SILENT)),
    ],
)
def test_probes(side: Side, monkeypatch: pytest.MonkeyPatch, answer: Any, probe: Probe) -> None:
    """Guards against a server that hangs, or a network that does, being taken for one that is gone:
    only a refused connection says that nobody is there to write."""
    side.handshake()

    def get(url: str, timeout: float) -> Answer:
        assert url == f"http://{ADDRESS}{capability.ROUTE}" and timeout == 5.0
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(requests, "get", get)
    monkeypatch.setattr(prefill_servers, "refuses", lambda *_: True)
    assert side.servers._probe(ADDRESS) == probe


@pytest.mark.parametrize("listening", [[4000], [4001], [4000, 4001]])
def test_ranks_that_live_longer(
    side: Side, monkeypatch: pytest.MonkeyPatch, listening: list[int]
) -> None:
    """The bootstrap server is one process of one node, and its address may be that of a service.
    Guards against pages that are given back while a rank of another node still writes to them."""
    side.handshake()

    def get(url: str, timeout: float) -> Answer:
        raise refused()

    def refuses(host: str, port: int, timeout_s: float) -> bool:
        assert host == "10.0.0.1" and timeout_s == 5.0
        return port not in listening

    monkeypatch.setattr(requests, "get", get)
    monkeypatch.setattr(prefill_servers, "refuses", refuses)
    assert side.servers._probe(ADDRESS) == Probe(Liveness.SILENT)
    listening.clear()
    assert side.servers._probe(ADDRESS) == Probe(Liveness.GONE)


def test_a_port_is_asked() -> None:
    """Guards against an address without an answer that counts as one where nobody listens."""
    import socket

    with socket.socket() as here:
        here.bind(("127.0.0.1", 0))
        where = here.getsockname()
        assert heartbeat.refuses(*where, 5.0), "bound, not listening"
        here.listen()
        assert not heartbeat.refuses(*where, 5.0)
    assert not heartbeat.refuses("no such host", 1, 5.0)


def test_a_real_refusal_is_recognised() -> None:
    """Guards against a library that buries the cause elsewhere than the test above thinks."""
    import socket

    with socket.socket() as unused:  # bound, not listening
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(requests.ConnectionError) as error:
            requests.get(f"http://127.0.0.1:{unused.getsockname()[1]}/", timeout=5)
    assert heartbeat.is_refused(error.value)


def test_a_rank_that_does_not_answer_pings(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bootstrap server answers also when a scheduler hangs. Guards against rooms that wait for
    that one; one answer of each rank is enough to count as alive again."""
    side.handshake()
    monkeypatch.setattr(requests, "get", lambda url, timeout: Answer(b'{"incarnation": "a"}'))

    def look() -> Liveness:
        return side.servers._probe(ADDRESS).liveness

    assert look() is Liveness.ALIVE
    pings = side.sockets.take()
    assert [(host, port, it.to) for host, port, it in pings] == [
        ("10.0.0.1", 4000, "10.0.0.1:4000"),
        ("10.0.0.1", 4001, "10.0.0.1:4001"),
    ]
    side.servers.take(wire.Pong("10.0.0.1:4000", True))
    assert look() is Liveness.SILENT, "the other one did not answer"
    for port in (4000, 4001):
        side.servers.take(wire.Pong(f"10.0.0.1:{port}", True))
    assert look() is Liveness.ALIVE
    assert look() is Liveness.SILENT
    side.servers.lost(ADDRESS, False, "silent")
    side.handshake()
    assert look() is Liveness.ALIVE, "it starts anew"


def test_a_rank_that_cannot_be_pinged(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one unusable address that ends the look at a server."""
    side.handshake()
    side.sockets.refuse.add("10.0.0.1")
    monkeypatch.setattr(requests, "get", lambda url, timeout: Answer())
    assert side.servers._probe(ADDRESS).liveness is Liveness.ALIVE
    assert side.servers._probe(ADDRESS).liveness is Liveness.SILENT


def test_a_stock_server_is_asked_as_stock_asks(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against control messages to a stock prefill rank, whose thread they would end."""
    side.capabilities[ADDRESS] = STOCK
    assert until_known(side.servers, ADDRESS)
    side.servers.connected(ADDRESS, RANKS)
    asked: list[str] = []
    monkeypatch.setattr(requests, "get", lambda url, timeout: (asked.append(url), Answer())[1])
    assert side.servers._probe(ADDRESS) == Probe(Liveness.ALIVE)
    side.servers.withdraw(ADDRESS, RANKS, ROOM, "x")
    assert asked == [f"http://{ADDRESS}/health"] and side.sockets.take() == []


def test_a_rank_that_does_not_know_us(side: Side) -> None:
    """It was restarted, or forgot us. Guards against rooms announced to it which it must refuse:
    the next request registers again; other servers stay connected."""
    side.handshake()
    side.handshake("10.0.0.2:8998", ranks=[{"rank_ip": "10.0.0.2", "rank_port": 4000}])
    side.servers.take(wire.Pong("10.0.0.1:4001", True))
    side.servers.take(wire.Pong("10.7.7.7:4001", False))
    side.servers.take(wire.Pong("10.0.0.1", False))
    assert len(side.manager.prefill_info_table) == 2
    side.servers.take(wire.Pong("10.0.0.1:4001", False))
    assert list(side.manager.prefill_info_table) == ["10.0.0.2:8998"]
    assert list(side.manager.connection_pool) == ["10.0.0.2:8998_0_0_0"]


@pytest.mark.parametrize(
    "message", [wire.Ping("a:1", "p", "h", 1), wire.Withdraw(7, "p", "h", 1, "")]
)
def test_messages_for_prefill(side: Side, message: wire.Message) -> None:
    """Guards against a prefill rank's port and a decode rank's being mixed up in silence."""
    with pytest.raises(wire.ControlError):
        side.servers.take(message)
