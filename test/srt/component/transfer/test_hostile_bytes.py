"""Invalid messages on the ports of prefill and decode ranks of both backends: frames that are cut,
dropped or random bytes, and whole frames with impossible values."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from component.broken import broken
from component.transfer.bare import ADDRESS, announced, decode
from component.transfer.messages import DIALECTS, MOONCAKE, NIXL, Dialect
from effort import tries
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import peer_messages, wire
from sglang.srt.disaggregation.delta.peer_messages import BadMessage, MessageReader

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


#: A manager's tables by room or by peer.
TABLES = (
    "request_status", "failure_records", "decode_kv_args_table", "prefill_info_table",
    "connection_pool", "transfer_statuses", "session_failures",
)  # fmt: skip


def wrong_map(rng: random.Random, message: Any) -> bytes:
    """Return a msgpack map with the fields of ``message``, some of them wrong, missing or new."""
    fields = msgspec.to_builtins(message)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*fields, "type", "extra"])
        if rng.random() < 0.2:
            fields.pop(name, None)
        else:
            fields[name] = rng.choice(VALUES)
    return msgspec.msgpack.encode(fields)


def wrong(rng: random.Random, message: list[bytes]) -> list[bytes]:
    """Return ``message`` with one to three impossible values."""
    if message[0] == wire.CONTROL_MAGIC:
        return [wire.CONTROL_MAGIC, wrong_map(rng, peer_messages.decode_control(message))]
    frames = list(message)
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


def tables(manager: Any) -> tuple[Any, ...]:
    """Return everything that a message may change on a rank."""
    rooms = [] if manager.rooms is None else manager.rooms.all()
    return (
        [(dict(vars(room)), dict(room.announcements)) for room in rooms],
        {name: list(numbers) for name, numbers in manager.open_rooms().items()},
        [dict(manager.__dict__.get(name, {})) for name in TABLES],
        set(manager.__dict__.get("failed_sessions", ())),
        manager.aux.tobytes(),
    )


class Port:
    """A rank's port. Its reader survives every message, so the violation is recorded: tables that
    changed although the message was refused."""

    def __init__(self, manager: Any, take_other: Callable[[list[bytes]], None]) -> None:
        self.manager = manager
        take_control = (manager.decode_ranks or manager.servers).take
        checked = self._checked(take_control), self._checked(take_other)
        self.read = MessageReader(*checked, clock=lambda: 0.0).handle
        self.refused = self.taken = 0
        self.half_taken: list[Any] = []

    def _checked(self, take: Callable[[Any], None]) -> Callable[[Any], None]:
        def checked(message: Any) -> None:
            before = tables(self.manager)
            try:
                take(message)
            except Exception:
                self.refused += 1
                # A withdrawal still ends its room if the sender cannot be answered.
                if not isinstance(message, wire.Withdraw) and tables(self.manager) != before:
                    self.half_taken.append(message)
                raise
            self.taken += 1

        return checked


@pytest.fixture
def complaints(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the log lines so far."""
    caplog.set_level(logging.ERROR)
    return lambda: [record.getMessage() for record in caplog.records]


spoiled = pytest.mark.parametrize("spoil", [broken, wrong])


@pytest.mark.hazard("other-side-not-told")
@pytest.mark.fuzz
@spoiled
@pytest.mark.parametrize("say", DIALECTS, ids=repr)
def test_to_prefill(say: Dialect, spoil: Any, complaints: Any) -> None:
    """Guards against bytes or a value (a negative page, a number of 5000 digits, a string for a
    number) that end the reader's thread, are applied in part, or fill the disk with log lines; and
    against a rank that serves no room after them."""
    rng, total, refused, taken = random.Random(1), tries(10_000), 0, 0
    kinds = [
        say.registration(),
        say.announcement(),
        say.announcement(9, (), 3),
        say.announcement(10, ours=False),
        wire.encode_control(wire.Withdraw(7, say.peer, "10.0.0.2", 4000, "gone")),
        wire.encode_control(wire.Ping("10.0.0.1:5", say.peer, "10.0.0.2", 4000)),
        wire.encode_control(wire.Stopped(7, 0, "gone")),
    ]
    for _ in range(total // 500 or 1):
        manager, _ = say.listener()
        port = Port(manager, manager.announcements().take)
        port.read(say.registration())
        for _ in range(500):
            port.read(spoil(rng, rng.choice(kinds)))
        refused, taken = refused + port.refused, taken + port.taken
        assert port.half_taken == [] and manager.request_status == {}
        for room in manager.rooms.all():
            for peer, info in room.announcements.items():
                assert peer in manager.decode_kv_args_table
                assert info.required_dst_info_num >= 1
                # Over Mooncake a dummy may name no slot.
                assert say is MOONCAKE and info.is_dummy or info.dst_aux_index >= 0
                assert not info.dst_kv_indices.size or info.dst_kv_indices.min() >= 0
        manager.update_status(123456789, KVPoll.Bootstrapping)
        port.read(say.announcement(room=123456789))
        assert manager.request_status == {123456789: KVPoll.WaitingForInput}
    assert refused > 0.1 * total and taken > 0.02 * total
    assert len(complaints()) < 0.5 * refused and max(map(len, complaints())) < 1000


ROOM, WATCHED, OTHER = 5, 1006, 1007
#: Messages of Mooncake's prefill ranks beside control messages; over NIXL an announcement.
SAID = {
    "nixl": [NIXL.announcement(ROOM)],
    "mooncake": [
        [b"5", b"4", b"0"],
        [b"5", b"0", b"0"],
        [b"99", b"4", b"3"],
        [b"AUX_DATA", b"5", b"0", b"5", (64).to_bytes(4, "big"), b"\1" * 64],
        [b"AUX_DATA", b"99", b"0", b"1", (64).to_bytes(4, "big"), b"\1" * 64],
    ],
}


def refuse(frames: list[bytes]) -> None:
    """Refuse frames: over NIXL a decode rank's port only gets control messages."""
    raise BadMessage("it is none")


@pytest.mark.fuzz
@spoiled
@pytest.mark.parametrize("backend", SAID)
def test_to_decode(backend: str, spoil: Any, complaints: Any) -> None:
    """Guards against the same on a decode rank's port, where pages could be freed too early, or
    another request's metadata be overwritten: only a whole message about a waiting or a watched
    room counts, and only for that room."""
    rng, total = random.Random(2), tries(10_000)
    manager = decode(backend, ROOM, WATCHED, OTHER, writers=2)
    servers = manager.servers
    servers.connected(ADDRESS, [{"rank_ip": "10.0.0.1", "rank_port": 5}])
    deferred = announced(manager, WATCHED).defer_free()
    port = Port(manager, refuse if backend == "nixl" else manager.take_status)
    kinds = SAID[backend] + [
        wire.encode_control(message)
        for message in (
            wire.Stopped(ROOM, 0, "gone"),
            wire.Stopped(99, 1, "gone", unknown_peer=True),
            wire.Pong("10.0.0.1:5", False),
            wire.Ping("10.0.0.1:5", "D", "10.0.0.2", 4000),
            wire.Withdraw(ROOM, "D", "10.0.0.2", 4000, "gone"),
        )
    ]
    for _ in range(total):
        port.read(spoil(rng, rng.choice(kinds)))
    assert port.half_taken == [] and port.refused > 0.1 * total and port.taken
    assert len(complaints()) < 0.5 * port.refused
    assert set(manager.request_status) == {ROOM, WATCHED, OTHER}
    assert manager.request_status[OTHER] == KVPoll.WaitingForInput
    assert set(manager.failure_records) <= {ROOM}
    followed = [room for room, each in manager.transfer_statuses.items() if each.is_deferred]
    assert followed == [WATCHED]
    assert not deferred.is_drained(), "no message named this room"
    assert not np.delete(manager.aux, ROOM, 0).any()
    for room in (WATCHED, OTHER):
        port.read(wire.encode_control(wire.Stopped(room, 0, "done")))
    assert deferred.is_drained() and manager.request_status[OTHER] == KVPoll.Failed
