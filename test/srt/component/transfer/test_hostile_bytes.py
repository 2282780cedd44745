"""Well-formed messages with values that cannot be, on the ports of prefill and decode ranks over
both backends; and HTTP on the bootstrap server.

The tests beside this one break frames; here the frames are whole, and what is in them is wrong.
"""

from __future__ import annotations

import copy
import http.client
import logging
import random
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from component.transfer.bare import ADDRESS, decode
from component.transfer.messages import ANNOUNCEMENTS, DIALECTS, MOONCAKE, Dialect
from effort import tries
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.delta import capability, observability, wire
from sglang.srt.disaggregation.delta.peer_messages import MessageReader
from sglang.srt.disaggregation.utils import DisaggregationMode

VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 5, 7, 2**31 - 1, 2**31, -(2**63), 2**63, 2**64 - 1, 1.5, float("nan"), None, True),
    *(
        "",
        "7",
        "D",
        "10.0.0.9",
        "x" * 3000,
        "\N{SUPERSCRIPT TWO}:\N{SUPERSCRIPT TWO}",
        "a:" + "9" * 5000,
    ),
    *(b"", b"\xff" * 9, [], [1] * 50, {}, {"a": {"b": [None]}}),
)
TEXTS = (
    *(b"", b"-1", b"0", b"1", b"7", b"+7", b" 7", b"7.5", b"None", b"nan", b"\xff", b"\0"),
    *(b"9" * 30, b"9" * 4299, b"9" * 5000, "\N{ARABIC-INDIC DIGIT FIVE}".encode(), b"D", b"E"),
)


#: Those of one backend.
OWN_TABLES = ("transfer_statuses", "_progress", "session_failures", "failed_sessions")

both = pytest.mark.parametrize("say", DIALECTS, ids=repr)


def wrong_map(rng: random.Random, message: Any) -> bytes:
    """A msgpack map with the fields of ``message``, some of them wrong, missing or new."""
    fields = msgspec.to_builtins(message)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*fields, "type", "extra"])
        if rng.random() < 0.2:
            fields.pop(name, None)
        else:
            fields[name] = rng.choice(VALUES)
    return msgspec.msgpack.encode(fields)


def wrong_frames(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """SGLang's own message with one to three values that cannot be."""
    frames = list(frames)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(1, len(frames))
        how = rng.randrange(4)
        if frames[at].startswith(b"sglang-delta:"):
            frame = msgspec.msgpack.decode(frames[at][13:], type=wire.DeltaFrame, strict=False)
            frames[at] = b"sglang-delta:" + wrong_map(rng, frame)
            return frames
        if how == 0:
            indices = [rng.choice((-1, 0, 3, 3, 2**31 - 1, -(2**31))) for _ in range(3)]
            frames[at] = np.array(indices, dtype=np.int32).tobytes()
        elif how == 1:
            frames[at] = rng.randbytes(rng.choice((1, 3, 5, 7, 9, 63)))  # odd lengths
        else:
            frames[at] = rng.choice(TEXTS)
    return frames


def announced(manager: Any) -> dict[int, dict[str, Any]]:
    """What decode ranks have announced, by room and decode rank."""
    rooms = {} if manager.rooms is None else manager.rooms._rooms
    return {number: dict(room.announcements) for number, room in rooms.items()}


class Rank(conn.CommonKVManager):
    """A prefill rank with SGLang's own socket, and nothing else."""

    moves_deltas = True

    def register_to_bootstrap(self) -> None: ...


def test_a_frame_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a stranger that has a rank reserve memory without a bound; a frame of the
    longest prompt is taken, and others' connections stay."""
    for name in ("tp_size", "tp_rank", "cp_size", "cp_rank", "dp_size", "dp_rank"):
        monkeypatch.setattr(conn, f"get_attention_{name}", lambda: 1)
    monkeypatch.setattr(conn, "get_local_ip_auto", lambda: "127.0.0.1")
    monkeypatch.setattr(conn, "get_pp_group", lambda: None)
    monkeypatch.setattr(Rank, "__abstractmethods__", frozenset())
    stock = conn.get_zmq_socket_on_host
    server = SimpleNamespace(
        host="", disaggregation_bootstrap_port=0, dist_init_addr=None, dp_size=1, pp_size=1,
        enable_dp_attention=False,
    )  # fmt: skip
    args = SimpleNamespace(system_dp_rank=0, pp_rank=0)
    manager: Any = Rank(args, DisaggregationMode.PREFILL, server)
    assert conn.get_zmq_socket_on_host is stock
    context = zmq.Context.instance()
    near, far = (context.socket(zmq.PUSH) for _ in range(2))
    closed = far.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        for each in (near, far):
            each.setsockopt(zmq.LINGER, 0)
            each.connect(f"tcp://127.0.0.1:{manager.rank_port}")

        def arrived() -> int:
            assert manager.server_socket.poll(20_000)
            return len(manager.server_socket.recv())

        near.send(b"before")
        assert arrived() == len(b"before")
        far.send(bytes(wire.MOST_FRAME + 1))
        assert closed.poll(20_000), "the connection is closed"
        near.send(bytes(wire.MOST_FRAME))
        assert arrived() == wire.MOST_FRAME
    finally:
        for each in (near, far, manager.server_socket):
            each.close(0)


def tables(manager: Any) -> tuple[Any, ...]:
    """Everything that a message may change on a rank."""
    rooms, ranks = manager.rooms, manager.decode_ranks
    return (
        dict(manager.request_status),
        dict(manager.failure_records),
        announced(manager),
        dict(manager.decode_kv_args_table),
        dict(manager.prefill_info_table),
        dict(manager.connection_pool),
        copy.deepcopy([manager.__dict__.get(name) for name in OWN_TABLES]),
        None if rooms is None else {r: copy.copy(it.__dict__) for r, it in rooms._rooms.items()},
        None if ranks is None else dict(ranks._heard),
        None if manager.servers is None else copy.deepcopy(dict(manager.servers._ranks)),
        None if manager.servers is None else dict(manager.servers._deferred),
    )


class Checked:
    """Takes messages, and compares all tables before and after one that is refused."""

    def __init__(self, manager: Any, take: Callable[[Any], None]) -> None:
        self._manager, self._take = manager, take
        self.refused = self.taken = 0

    def __call__(self, message: Any) -> None:
        before = tables(self._manager)
        try:
            self._take(message)
        except Exception:
            self.refused += 1
            # A withdrawal whose sender cannot be answered still ends its room: nobody wants it.
            if not isinstance(message, wire.Withdraw):
                assert tables(self._manager) == before, message
            raise
        self.taken += 1


def complained(caplog: pytest.LogCaptureFixture) -> int:
    """Lines about peers so far."""
    return sum("dropped a message" in record.getMessage() for record in caplog.records)


def forget_rooms(manager: Any) -> None:
    """Keep the tables small, so that comparing them stays fast."""
    manager.rooms._rooms.clear()
    manager.decode_ranks._sockets.sent.clear()


@pytest.mark.fuzz
@both
def test_wrong_values_to_prefill(say: Dialect, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a value that no peer of ours would send (a negative page, a number of 5000
    digits, bytes of odd length, a string for a number) which ends the reader's thread, is half
    taken, or is logged so often that it fills the disk."""
    rng, now, total = random.Random(1), 0.0, tries(20_000)
    manager, _ = say.listener()
    take_control = Checked(manager, manager.decode_ranks.take)
    take_other = Checked(manager, ANNOUNCEMENTS[say.backend](manager).take)
    reader = MessageReader(take_control, take_other, lambda: now)
    reader.handle(say.registration())
    messages = (
        wire.Withdraw(7, say.peer, "10.0.0.2", 4000, "gone"),
        wire.Ping("10.0.0.1:5", say.peer, "10.0.0.2", 4000),
        wire.Stopped(7, 0, "gone"),
    )
    with caplog.at_level(logging.ERROR):
        for count in range(total):
            if rng.random() < 0.4:
                body = wrong_map(rng, rng.choice(messages))
                reader.handle([wire.CONTROL_MAGIC, body])
            else:
                kinds = (say.registration(), say.announcement(), say.announcement(9, (), 3))
                reader.handle(wrong_frames(rng, rng.choice(kinds)))
            for infos in announced(manager).values():
                for peer, info in infos.items():
                    assert peer in manager.decode_kv_args_table
                    assert info.required_dst_info_num >= 1
                    # Over Mooncake a rank to which nothing goes may name no slot.
                    assert say is MOONCAKE and info.is_dummy or info.dst_aux_index >= 0
                    assert not info.dst_kv_indices.size or info.dst_kv_indices.min() >= 0
            if count % 50 == 0:
                forget_rooms(manager)
    assert take_control.refused > 0.01 * total and take_control.taken > 0.01 * total
    assert take_other.refused > 0.2 * total and take_other.taken > 0.005 * total
    assert complained(caplog) <= observability._REMEMBERED_KEYS + 1, "time stood still"
    assert max(len(record.getMessage()) for record in caplog.records) < 1000
    assert manager.request_status == {} and len(manager.rooms._ended) <= 4096
    forget_rooms(manager)
    manager.rooms._ended._rooms.clear()
    manager.update_status(123456789, KVPoll.Bootstrapping)
    reader.handle(say.announcement(room=123456789))
    assert manager.request_status == {123456789: KVPoll.WaitingForInput}


@pytest.mark.fuzz
@both
def test_wrong_values_to_decode(say: Dialect, caplog: pytest.LogCaptureFixture) -> None:
    """The same on a decode rank's port, where a wrong value could give pages back too early: only
    a whole message about a waiting or a watched room counts, and only for that room."""
    rng, now, total = random.Random(2), 0.0, tries(20_000)
    manager = decode(say.backend, 5, 6, 1007)
    servers = manager.servers
    servers.connected(ADDRESS, [{"rank_ip": "10.0.0.1", "rank_port": 5}])
    deferred = servers.defer_free(6, ADDRESS, 1, 1)
    take = Checked(manager, servers.take)
    reader = MessageReader(take, pytest.fail, lambda: now)
    messages = (
        wire.Stopped(5, 0, "gone"),
        wire.Stopped(99, 1, "gone", unknown_peer=True),
        wire.Pong("10.0.0.1:5", False),
        wire.Withdraw(5, "D", "10.0.0.2", 4000, "gone"),
    )
    with caplog.at_level(logging.ERROR):
        for _ in range(total):
            reader.handle([wire.CONTROL_MAGIC, wrong_map(rng, rng.choice(messages))])
            assert not deferred.is_drained(), "nobody spoke of room 6"
    assert take.refused > 0.01 * total and take.taken > 0.1 * total
    assert complained(caplog) <= observability._REMEMBERED_KEYS + 1
    assert set(manager.request_status) == {5, 6, 1007} and servers._deferred == {6: deferred}
    assert manager.request_status[1007] == manager.request_status[6] == KVPoll.WaitingForInput
    assert not deferred.is_drained()
    reader.handle(wire.encode_control(wire.Stopped(6, 0, "done")))
    assert deferred.is_drained()


@pytest.fixture
def server() -> Iterator[int]:
    """SGLang's bootstrap server with our route; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    made = conn.CommonKVBootstrapServer("127.0.0.1", port)
    for _ in range(400):  # its thread is starting; refused connections return at once
        if capability.fetch_capabilities(f"127.0.0.1:{port}") is not None:
            break
        threading.Event().wait(0.05)
    yield port
    made.close()


def test_broken_requests_to_the_bootstrap_server(server: int) -> None:
    """Guards against a request of any method, path and body, or one that is cut off, that ends the
    thread by which all decode servers connect, or changes what it says of itself."""
    rng = random.Random(3)
    before = capability.fetch_capabilities(f"127.0.0.1:{server}")
    paths = (
        "/route",
        "/register_dp_rank",
        "/query_dp_ranks",
        "/health",
        capability.ROUTE,
        "/",
        "/x",
    )
    queries = (
        "",
        "?prefill_dp_rank=x",
        "?prefill_dp_rank=-1&prefill_cp_rank=" + "9" * 5000,
        "?%ff",
    )
    bodies = (b"", b"{", b"[]", b"null", b'{"bootstrap_rooms": 3}', b'{"bootstrap_room": "x"}')
    bodies += (b"[" * 5000, b'{"rank_port": "x", "page_size": null}', b"\xff" * 100)
    answered = 0
    for number in range(400):
        with socket.create_connection(("127.0.0.1", server), timeout=30) as raw:
            if number % 8 == 0:
                raw.sendall(rng.randbytes(rng.randrange(200)))
                continue  # not HTTP, and closed without waiting for an answer
            body = rng.choice((*bodies, rng.randbytes(50)))
            line = f"{rng.choice(('GET', 'PUT', 'POST', 'DELETE', 'HEAD'))} {rng.choice(paths)}"
            length = len(body) + (1000 if number % 8 == 1 else 0)  # cut off
            head = (
                f"{line}{rng.choice(queries)} HTTP/1.1\r\nHost: p\r\nContent-Length: {length}\r\n"
            )
            raw.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            if length == len(body):
                answer = http.client.HTTPResponse(raw, method=line.split()[0])
                answer.begin()
                answered += 1
    assert answered == 300
    assert capability.fetch_capabilities(f"127.0.0.1:{server}") == before
