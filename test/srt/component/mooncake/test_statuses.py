"""Messages on a decode rank's port, from prefill servers and from unknown senders."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from component.transfer.bare import ITEM, SLOTS, announced, decode
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.peer_messages import MessageReader

LOGGER = "sglang.srt.disaggregation.delta.peer_messages"


def status(room: int, value: int = 4, writer: int = 0) -> list[bytes]:
    """Return one writer's status: 4 is success, 0 failure."""
    return [str(number).encode() for number in (room, value, writer)]


def metadata(
    room: int = 7, buffer: int = 0, slot: int = 7, data: bytes = b"\1" * ITEM,
    length: int | None = None,
) -> list[bytes]:  # fmt: skip
    """Return one metadata buffer of a room, sent beside the engine."""
    numbers = [str(number).encode() for number in (room, buffer, slot)]
    size = len(data) if length is None else length
    return [b"AUX_DATA", *numbers, size.to_bytes(4, "big"), data]


def reader_of(manager: Any) -> MessageReader:
    """Return the reader that the manager's reading thread runs."""
    return MessageReader(manager.servers.take, manager.take_status)


def test_a_room_is_complete_when_each_of_its_writers_is() -> None:
    """Guards against a writer that is counted twice, or that completes a room with other writers:
    the request would start on missing KV."""
    manager = decode("mooncake", 7, writers=2)
    reader = reader_of(manager)
    for _ in range(3):
        reader.handle(status(7, writer=1))
        assert manager.request_status[7] == KVPoll.WaitingForInput
    reader.handle(status(7, writer=0))
    assert manager.request_status[7] == KVPoll.Success


def test_a_failure_is_final() -> None:
    """Guards against a failed room that is revived, and against a lost reason."""
    manager = decode("mooncake", 7)
    reader = reader_of(manager)
    reader.handle(status(7, 0))
    reader.handle(status(7, 4))
    assert manager.request_status[7] == KVPoll.Failed
    assert "prefill could not deliver it" in manager.failure_records[7]


def test_words_of_unknown_rooms_leave_nothing() -> None:
    """Guards against tables that grow with every aborted room: its late completion, failure,
    metadata and notification are dropped."""
    manager = decode("mooncake")
    reader = reader_of(manager)
    for message in (
        status(7),
        status(7, 0),
        metadata(),
        wire.encode_control(wire.Stopped(7, 0, "gone")),
    ):
        reader.handle(message)
    assert not any(manager.open_rooms().values()) and not manager.aux.any()


def test_words_of_a_room_that_is_followed() -> None:
    """Guards against an abandoned room's pages that stay held although every writer has delivered
    or stopped, and against pages that are freed when only one of them has."""
    manager = decode("mooncake", 7, writers=2)
    reader = reader_of(manager)
    receiver = announced(manager, 7, writers=2)
    deferred = receiver.defer_free()
    receiver.clear()
    reader.handle(status(7, writer=0))
    assert not deferred.is_drained()
    reader.handle(wire.encode_control(wire.Stopped(7, 1, "aborted")))
    assert deferred.is_drained()


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ([], "a status has 3"),
        ([b"7", b"4"], "a status has 3"),
        (status(7, 3), "status 3 of writer 0 is invalid"),
        (status(7, 4, -1), "status 4 of writer -1 is invalid"),
        (metadata()[:5], "metadata of 5 frames, 6 expected"),
        (metadata(buffer=1), "metadata buffer 1 of 1"),
        (metadata(buffer=-1), "metadata buffer -1 of 1"),
        (metadata(slot=SLOTS), f"there is no metadata slot {SLOTS}"),
        (metadata(slot=-1), "there is no metadata slot -1"),
        (metadata(data=b"\1" * (ITEM + 1)), f"{ITEM + 1} bytes of metadata"),
        (metadata(length=3), "3 were sent"),
        ([b"CHUNK_READY", *[b"1"] * 6], "a status has 3"),
        (wire.encode_control(wire.Withdraw(7, "p", "h", 1, "no")), "not for a decode rank"),
    ],
)
def test_what_cannot_be_served_is_dropped_by_name(
    message: list[bytes], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a stray or broken message that ends the thread which reads for every room, or
    is written to memory; the log must name the fault."""
    manager = decode("mooncake", 7)
    with caplog.at_level(logging.ERROR, LOGGER):
        reader_of(manager).handle(message)
    assert manager.request_status == {7: KVPoll.WaitingForInput}
    assert not manager.aux.any()
    assert complaint in caplog.text


def test_metadata_go_to_the_rooms_own_slot_only() -> None:
    """Guards against a late message that overwrites the first token of another request."""
    manager = decode("mooncake", 7, 4)
    reader = reader_of(manager)
    reader.handle(metadata(room=4, slot=7))
    assert not manager.aux.any()
    reader.handle(metadata(room=7, slot=7, data=bytes(range(ITEM))))
    assert manager.aux[7].tolist() == list(range(ITEM)) and not manager.aux[:7].any()
