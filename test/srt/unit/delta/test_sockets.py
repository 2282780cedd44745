"""Sockets to peers that listen, do not listen yet, have ended, or have invalid addresses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

import sglang.srt.utils.network  # noqa: F401  what every thread's first message imports
from sglang.srt.disaggregation.delta import peer_messages, wire
from sglang.srt.disaggregation.delta.wire import PeerSockets
from unit.delta.fakes import Clock

HOST = "127.0.0.1"
PONG = wire.Pong("127.0.0.1:1", True)


class Peers:
    """The sockets under test, one socket of a peer, and all open sockets of ZeroMQ."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.peer = zmq.Context.instance().socket(zmq.PULL)
        self.peer.setsockopt(zmq.RCVTIMEO, 30_000)
        self._opened: list[Any] = []
        opens = zmq.Context.socket

        def socket(context: Any, kind: Any) -> Any:
            self._opened.append(opens(context, kind))
            return self.last

        patch.setattr(zmq.Context, "socket", socket)
        self.clock = Clock()
        self.sockets = PeerSockets(self.clock)

    @property
    def last(self) -> Any:
        """The socket that was opened last."""
        return self._opened[-1]

    @property
    def count(self) -> int:
        """The number of open sockets."""
        return sum(not socket_.closed for socket_ in self._opened)

    def bind(self, port: int | None = None) -> int:
        """Bind the peer's socket; return its port."""
        if port is not None:
            self.peer.bind(f"tcp://{HOST}:{port}")
        return port or self.peer.bind_to_random_port(f"tcp://{HOST}")

    def send(self, port: int, message: wire.Message = PONG, host: str = HOST) -> None:
        self.sockets.send(host, port, message)

    def received(self, count: int = 1) -> list[wire.Message | None]:
        """Return the next messages that reach the peer."""
        return [peer_messages.decode_control(self.peer.recv_multipart()) for _ in range(count)]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    made = Peers(monkeypatch)
    yield made
    made.peer.close(linger=0)
    made.sockets.drop_unused(0)  # ZeroMQ waits for open sockets at exit


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def stopped(room: int, reason: str = "", writer: int = 0) -> wire.Stopped:
    return wire.Stopped(room, writer, reason)


def test_sending_to_a_dead_peer_never_blocks(peers: Peers) -> None:
    """A peer that died, or whose machine does not answer. Guards against a full queue that stops
    the scheduler: more messages than ZeroMQ's own bound (1000) are accepted at once. Since any
    client may name any address, ZeroMQ must wait at least a second before it connects again."""
    done = threading.Event()

    def send() -> None:
        for host in (HOST, "192.0.2.1"):  # refused; never answered (documentation's net)
            port = free_port()
            for _ in range(5000):
                peers.send(port, host=host)
        done.set()

    threading.Thread(target=send, daemon=True).start()
    assert done.wait(60)
    assert peers.last.getsockopt(zmq.RECONNECT_IVL) >= 1000
    assert peers.last.getsockopt(zmq.RECONNECT_IVL_MAX) >= 30_000


@pytest.mark.parametrize(
    ("host", "port"),
    [
        (HOST, 0),
        (HOST, -1),
        (HOST, 65536),
        (HOST, 70000),
        (HOST, 10**30),
        ("", 4000),
        ("*", 4000),
        ("decode-7.no-such-domain.invalid", 4000),  # ZeroMQ would block all while it resolves it
        ("localhost", 4000),
        ("two words", 4000),
        ("a\0b", 4000),
        ("\N{LATIN SMALL LETTER U WITH DIAERESIS}", 4000),
    ],
)
def test_invalid_addresses(peers: Peers, host: str, port: int) -> None:
    """Guards against an exception of another kind on a thread that serves all peers, and against a
    port that is cut to 16 bits and then belongs to another server. No socket is left behind."""
    with pytest.raises((OSError, ValueError)):
        peers.send(port, host=host)
    assert peers.count == 0


def test_queued_messages_are_dropped_with_their_peer(peers: Peers) -> None:
    """A restarted server gets its predecessor's address. Guards against messages about rooms that
    it never had, and against dropping "10.0.0.1:8000" together with "10.0.0.1:80"."""
    late = free_port()
    peers.send(late, stopped(0, "for a late peer"))
    with socket.create_server((HOST, 0)) as hung:  # accepts connections and never answers
        port = hung.getsockname()[1]
        peers.send(port, stopped(1, "for the dead peer"))
        connection, _ = hung.accept()
    with connection:
        connection.settimeout(60)
        for dead_port in (port, port, late // 10):
            peers.sockets.drop(HOST, dead_port)
        while part := connection.recv(4096):  # until it is closed
            assert b"dead" not in part
    peers.send(port, stopped(2, "for the new peer"))
    for bound_port in (port, late):
        peers.bind(bound_port)
    received = sorted(peers.received(2), key=lambda message: message.room)
    assert received == [stopped(0, "for a late peer"), stopped(2, "for the new peer")]
    assert not peers.peer.poll(0)


def test_many_addresses(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer names its own address, and restarted ones have new addresses. Guards against
    running out of sockets, after which no peer gets an answer; a socket in use stays open."""
    monkeypatch.setattr(wire, "_MAX_SOCKETS", 8)
    port = peers.bind()
    for number in range(200):
        peers.send(port, stopped(number))
        peers.send(4000, host=f"10.0.0.{number}")
        assert peers.count <= 8
    assert peers.received(200) == [stopped(number) for number in range(200)]


def test_unsent_messages_are_kept(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """More peers than sockets. Guards against messages that are lost when their socket is closed
    for the next peer's: here before its peer listens."""
    monkeypatch.setattr(wire, "_MAX_SOCKETS", 1)
    late = free_port()
    for port in (late, free_port()):
        peers.send(port)
    assert peers.count == 1
    peers.bind(late)
    assert peers.received() == [PONG]


def test_unused_sockets_are_closed(peers: Peers) -> None:
    """Guards against a socket for each decode rank that ever registered, with which ZeroMQ would
    try to connect for ever; a socket in use stays open, and a dropped one opens again."""
    port = peers.bind()
    for used_port in (free_port(), port, free_port()):
        peers.send(used_port)
    peers.clock.now += 60
    peers.send(port)
    assert peers.received(2) == [PONG] * 2
    for passed_s, open_sockets in ((59, 3), (1, 1), (59, 1), (1, 0)):
        peers.clock.now += passed_s
        peers.sockets.drop_unused(120)
        assert peers.count == open_sockets
    peers.send(port)
    assert peers.received() == [PONG]


def test_threads_share_a_peer(peers: Peers) -> None:
    """Guards against two threads in one ZeroMQ socket, which would mix their frames, and against
    messages to one peer that change order."""
    port = peers.bind()

    def send(writer: int) -> None:
        for room in range(500):
            peers.send(port, stopped(room, "x" * writer, writer))

    threads = [threading.Thread(target=send, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    received = peers.received(2000)
    for thread in threads:
        thread.join()
    received.sort(key=lambda message: message.writer)  # each writer's stay in order
    assert received == [stopped(n, "x" * writer, writer) for writer in range(4) for n in range(500)]
