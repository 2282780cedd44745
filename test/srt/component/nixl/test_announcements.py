"""Messages and notifications that only NIXL ranks get; those of both backends: ``transfer``."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest

from component.broken import broken
from component.transfer.bare import decode
from component.transfer.messages import NIXL
from effort import tries
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.nixl.decode import _refuse
from sglang.srt.disaggregation.delta.peer_messages import MessageReader


def test_a_peer_that_nixl_refuses_may_register_again() -> None:
    """Guards against a peer that is listed though NIXL knows nothing of it: its registration would
    be ignored from then on, and every transfer to it would fail."""
    manager, reader = NIXL.listener()
    reader.handle(NIXL.registration(metadata=b"torn"))
    with pytest.raises(ValueError):
        manager.peers.hold("D")
    assert manager.decode_kv_args_table == {}
    reader.handle(NIXL.registration())
    manager.peers.hold("D")
    assert list(manager.decode_kv_args_table) == ["D"]


def test_pages_of_state_come_as_an_array() -> None:
    """Guards against SGLang's list of numbers, of which the scheduler would make an array for each
    decode rank: 128k pages take 10 ms."""
    manager, reader = NIXL.acquainted()
    frames = NIXL.announcement(7, pages=(4, 5))
    frames[8] = np.array([6, 7], np.int32).tobytes()
    reader.handle(frames)
    (info,) = manager.rooms.destinations(7)
    assert isinstance(info.dst_state_indices, np.ndarray)
    assert info.dst_state_indices.tolist() == [6, 7] and info.dst_state_indices.dtype == np.int32


@pytest.mark.fuzz
def test_broken_messages_to_decode(caplog: pytest.LogCaptureFixture) -> None:
    """On a decode rank's port only rooms that wait may fail, by a message that is whole, and no
    entry is made."""
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(0)
    rooms = (5, 6)
    manager = decode("nixl", *rooms, 1007)
    reader = MessageReader(manager.servers.take, _refuse)
    kinds = (
        wire.encode_control(wire.Stopped(5, 0, "gone")),
        wire.encode_control(wire.Stopped(99, 1, "gone", unknown_peer=True)),
        wire.encode_control(wire.Pong("10.0.0.1:5", False)),
        wire.encode_control(wire.Ping("10.0.0.1:5", "D", "10.0.0.2", 4000)),
        NIXL.announcement(5),
    )
    for _ in range(tries(20_000)):
        reader.handle(broken(rng, rng.choice(kinds)))
    assert set(manager.request_status) == {*rooms, 1007}
    assert manager.request_status[6] == KVPoll.WaitingForInput
    assert set(manager.failure_records) <= {5} and not manager.servers.deferred_rooms()
    reader.handle(wire.encode_control(wire.Stopped(1007, 0, "gone")))
    assert manager.request_status[1007] == KVPoll.Failed


@pytest.mark.fuzz
def test_broken_notifications_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A notification that cannot be understood, or is of a room that is not here, must not end the
    scheduler that reads it, nor leave an entry."""
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(0)
    manager = decode("nixl", 5)
    texts = [b"5_kv_0_0_0", b"7_kv_0_1_0", b"5_state_1", b"9_aux_0"]
    for _ in range(tries(300)):
        notes = [b"_".join(broken(rng, rng.choice(texts).split(b"_"))) for _ in range(100)]
        manager.agent.notes = {"prefill": notes}
        manager.collect_arrivals(5)
    assert set(manager.transfer_statuses) <= {5} and set(manager.request_status) == {5}
