"""Sockets to peers that listen, do not listen yet, are gone, or cannot be."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

import sglang.srt.utils.network  # noqa: F401  what every thread's first message imports
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.wire import PeerSockets
from unit.delta.fakes import Clock

PONG = wire.Pong("127.0.0.1:1", True)


@pytest.fixture
def pull() -> Iterator[Any]:
    """A peer's socket, not bound yet."""
    made = zmq.Context.instance().socket(zmq.PULL)
    made.setsockopt(zmq.RCVTIMEO, 30_000)
    yield made
    made.close(linger=0)


@pytest.fixture
def made() -> Iterator[PeerSockets]:
    """Sockets that are gone after the test: ZeroMQ waits for open ones at the end of a process."""
    peers = PeerSockets()
    yield peers
    peers.drop_unused(0)


def free_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_sent_and_read(made: PeerSockets, pull: Any) -> None:
    """Guards against messages that change order on their way to one peer."""
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    messages = [wire.Stopped(room, 0, "x") for room in range(100)]
    for message in messages:
        made.send("127.0.0.1", port, message)
    assert [wire.decode_control(pull.recv_multipart()) for _ in messages] == messages


def test_sending_to_nobody_never_blocks(made: PeerSockets) -> None:
    """A peer that died, or that its machine does not answer for. Guards against a full queue that
    stops the scheduler: more messages than ZeroMQ's own bound (1000) are taken at once."""
    done = threading.Event()

    def send() -> None:
        for host in ("127.0.0.1", "192.0.2.1"):  # refused; never answered (documentation's net)
            port = free_port()
            for _ in range(5000):
                made.send(host, port, PONG)
        done.set()

    threading.Thread(target=send, daemon=True).start()
    assert done.wait(60)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("127.0.0.1", 0),
        ("127.0.0.1", -1),
        ("127.0.0.1", 65536),
        ("127.0.0.1", 70000),
        ("127.0.0.1", 10**30),
        ("", 4000),
        ("*", 4000),
        ("decode-7.no-such-domain.invalid", 4000),  # ZeroMQ would hold up all while it resolves it
        ("localhost", 4000),
        ("two words", 4000),
        ("a\0b", 4000),
        ("\N{LATIN SMALL LETTER U WITH DIAERESIS}", 4000),
    ],
)
def test_addresses_that_cannot_be(made: PeerSockets, host: str, port: int) -> None:
    """Guards against an exception of another kind on a thread that serves all peers, and against a
    port that is cut to 16 bits, where it is somebody else's. Nothing is left behind."""
    with pytest.raises((OSError, ValueError)):
        made.send(host, port, PONG)
    assert not made._sockets


def test_attempts_to_connect_are_few(made: PeerSockets) -> None:
    """Anybody may name any address. Guards against a server that connects there ten times a
    second; the pause before a further attempt is at least a second."""
    made.send("127.0.0.1", free_port(), PONG)
    ((opened, _),) = made._sockets.values()
    assert opened.getsockopt(zmq.RECONNECT_IVL) >= 1000
    assert opened.getsockopt(zmq.RECONNECT_IVL_MAX) >= 30_000


def test_a_room_number_that_cannot_be_written(made: PeerSockets) -> None:
    """Guards against a client's huge ``bootstrap_room`` that ends a scheduler: an error of the
    kinds that every sender of messages expects."""
    with pytest.raises(ValueError):
        made.send("127.0.0.1", 4000, wire.Stopped(2**64, 0, ""))


def test_what_was_queued_goes_with_its_peer(made: PeerSockets, pull: Any) -> None:
    """A restarted server gets the address of the one before. Guards against its being told of rooms
    which it never had; what is queued anew arrives."""
    with socket.create_server(("127.0.0.1", 0)) as hung:  # takes connections, and says nothing
        port = hung.getsockname()[1]
        made.send("127.0.0.1", port, wire.Stopped(1, 0, "for the dead"))
        connection, _ = hung.accept()
    with connection:
        connection.settimeout(60)
        made.drop("127.0.0.1", port)
        made.drop("127.0.0.1", port)
        while part := connection.recv(4096):  # until it is closed
            assert b"dead" not in part
    made.send("127.0.0.1", port, wire.Stopped(2, 0, "for the living"))
    pull.bind(f"tcp://127.0.0.1:{port}")
    assert wire.decode_control(pull.recv_multipart()) == wire.Stopped(2, 0, "for the living")
    assert not pull.poll(0)


def test_dropping_another_peer_changes_nothing(made: PeerSockets, pull: Any) -> None:
    """Guards against "10.0.0.1:80" taking "10.0.0.1:8000" with it."""
    port = free_port()
    made.send("127.0.0.1", port, PONG)
    for other in (port // 10, port + 1):
        made.drop("127.0.0.1", other)
    pull.bind(f"tcp://127.0.0.1:{port}")
    assert wire.decode_control(pull.recv_multipart()) == PONG


def test_many_addresses(made: PeerSockets, monkeypatch: pytest.MonkeyPatch, pull: Any) -> None:
    """Every peer names its own address, and restarted ones have new ones. Guards against running
    out of sockets, after which nobody can be answered; one in use stays."""
    monkeypatch.setattr(wire, "_MAX_SOCKETS", 8)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    for number in range(200):
        made.send("127.0.0.1", port, wire.Pong(str(number), True))
        made.send(f"10.0.0.{number}", 4000, PONG)
        assert len(made._sockets) <= 8
    received = [wire.decode_control(pull.recv_multipart()) for _ in range(200)]
    assert received == [wire.Pong(str(number), True) for number in range(200)]


def test_nothing_unsent_is_thrown_away(
    made: PeerSockets, monkeypatch: pytest.MonkeyPatch, pull: Any
) -> None:
    """More peers than sockets. Guards against messages that are lost as their socket makes room for
    the next peer's: here before its peer listens."""
    monkeypatch.setattr(wire, "_MAX_SOCKETS", 1)
    late = free_port()
    made.send("127.0.0.1", late, wire.Stopped(1, 0, "first"))
    made.send("127.0.0.1", free_port(), PONG)
    assert len(made._sockets) == 1
    pull.bind(f"tcp://127.0.0.1:{late}")
    assert wire.decode_control(pull.recv_multipart()) == wire.Stopped(1, 0, "first")


def test_two_thousand_peers(made: PeerSockets) -> None:
    """Guards against a bound below the number of decode ranks that a server may have."""
    for number in range(2000):
        made.send(f"127.1.{number // 250}.{number % 250 + 1}", 9, PONG)
    assert len(made._sockets) == 2000


def test_sockets_that_nobody_uses_any_more(pull: Any) -> None:
    """Guards against a socket for each decode rank that ever was, with which ZeroMQ would try to
    connect for ever; one in use stays, and one that was dropped opens again."""
    clock = Clock()
    made = PeerSockets(clock)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    rest = [free_port() for _ in range(2)]
    for each in (rest[0], port, rest[1]):
        made.send("127.0.0.1", each, PONG)
    assert wire.decode_control(pull.recv_multipart()) == PONG
    clock.now += 60
    made.send("127.0.0.1", port, PONG)
    clock.now += 59
    made.drop_unused(120)
    assert len(made._sockets) == 3
    clock.now += 1
    made.drop_unused(120)
    assert list(made._sockets) == [f"127.0.0.1:{port}"]
    clock.now += 120
    made.drop_unused(120)
    assert not made._sockets
    made.send("127.0.0.1", port, PONG)
    assert [wire.decode_control(pull.recv_multipart()) for _ in range(2)] == [PONG, PONG]


def test_threads_share_a_peer(made: PeerSockets, pull: Any) -> None:
    """Guards against two threads in one ZeroMQ socket, which mixes their frames."""
    port = pull.bind_to_random_port("tcp://127.0.0.1")

    def send(writer: int) -> None:
        for room in range(500):
            made.send("127.0.0.1", port, wire.Stopped(room, writer, "x" * writer))

    threads = [threading.Thread(target=send, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    received = [wire.decode_control(pull.recv_multipart()) for _ in range(2000)]
    for thread in threads:
        thread.join()
    for writer in range(4):
        ours = [it.room for it in received if isinstance(it, wire.Stopped) and it.writer == writer]
        assert ours == list(range(500))
