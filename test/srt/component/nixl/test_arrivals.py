"""A decode rank's handling of NIXL's notifications: a room is complete, drained or failed, and the
metadata of the completing note are stored."""

from __future__ import annotations

import logging
import random
import time
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from component.broken import broken
from component.transfer.bare import ADDRESS, announced, decode
from effort import tries
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.nixl.backend import done
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver

ROOM, SLOT = 5, 2
LENGTHS = (64, 8)


class Rank:
    """A decode rank with a room that ``writers`` prefill ranks write to. Its metadata go to
    ``SLOT`` if the room was ``announced``."""

    def __init__(
        self, writers: int = 1, expects_state: bool = False, announced: bool = True
    ) -> None:
        self.buffers = [np.zeros((4, length), np.uint8) for length in LENGTHS]
        self.manager: Any = decode("nixl", ROOM, writers=writers)
        self.manager.waiting_timeout = 30.0
        self.manager.kv_args = SimpleNamespace(
            aux_data_ptrs=[buffer.ctypes.data for buffer in self.buffers],
            aux_item_lens=list(LENGTHS),
        )
        self.manager.transfer_statuses[ROOM].expects_state = expects_state
        if announced:
            assert self.manager.expect_metadata(ROOM, SLOT)

    def take(self, *notes: bytes) -> bool:
        """Let notes arrive, and read them; return True if the room is complete."""
        self.manager.agent.notes = {"prefill": list(notes)}
        self.manager.update_transfer_status()
        return bool(self.manager.check_transfer_done(ROOM))

    def slots(self) -> list[list[int]]:
        """Return the byte that fills each slot, for each buffer."""
        assert all((buffer == buffer[:, :1]).all() for buffer in self.buffers)
        return [buffer[:, 0].tolist() for buffer in self.buffers]

    def receiver(self, room: int = ROOM) -> Any:
        """Return the receiver of a request in transfer."""
        self.manager.update_status(room, KVPoll.WaitingForInput)
        made: Any = NixlKVReceiver.__new__(NixlKVReceiver)
        made.__dict__.update(
            kv_mgr=self.manager, bootstrap_room=room, bootstrap_addr=ADDRESS, conclude_state=None,
            started_transfer=True, init_time=time.time(), required_prefill_response_num=1,
        )  # fmt: skip
        return made


def note(
    value: int = 5, writer: int = 0, room: int = ROOM, lengths: tuple[int, ...] = LENGTHS
) -> bytes:
    """Return a completion note with metadata bytes that are all ``value``."""
    return done(room, writer, [bytes([value]) * length for length in lengths])


EMPTY, WRITTEN = [[0] * 4] * 2, [[0, 0, 5, 0]] * 2

# ---- complete rooms ----


@pytest.mark.hazard("chunks-overtake", "writers-confused")
@pytest.mark.parametrize(
    ("texts", "writers"),
    [
        ((b"5_kv_0_0_0", b"5_kv_1_1_0", b"5_aux_0"), 1),
        ((b"5_kv_0_0_0", b"5_kv_1_1_0", b"5_aux"), 1),  # from a stock prefill rank
        ((b"5_kv_0_1_0", b"5_kv_0_0_1", b"5_kv_1_1_1", b"5_aux_0", b"5_aux_1"), 2),
    ],
)
def test_every_order_ends_with_the_last_event(texts: tuple[bytes, ...], writers: int) -> None:
    """Guards against a room that is complete before its last chunk or its metadata have arrived, or
    as soon as its first writer is; in any order, with repetitions."""
    for order in permutations(texts):
        rank = Rank(writers)
        for text in order[:-1]:
            assert not rank.take(text, text)
        assert rank.take(order[-1]) and rank.take(*order)


@pytest.mark.hazard("writers-confused", "full-hit-without-metadata", "metadata-tied-to-state")
@pytest.mark.parametrize(
    ("texts", "writers", "expects_state", "is_complete"),
    [
        # A writer's note covers its own chunks, state and metadata, but no other writer's.
        ([note()], 1, False, True),
        ([note(), note(6)], 1, True, True),
        ([note(), note()], 2, False, False),
        ([note(6), note(5, 1)], 2, False, True),
        ([note(), b"5_kv_0_1_1", b"5_aux_1"], 2, False, True),  # with an older prefill rank
        # A stock prefill with two pipeline stages does not name the metadata's writer.
        ([b"5_kv_0_1_0", b"5_aux"], 2, False, False),
        ([b"5_kv_0_1_0", b"5_kv_0_1_1", b"5_aux"], 2, False, True),
        # "Nothing to send" from one rank does not cover the other rank's chunks.
        ([b"5_kv_0_1_0", b"5_aux_0", b"5_aux_1"], 2, False, False),
        ([b"5_kv_0_1_0", b"5_aux_0", b"5_aux_1", b"5_kv_0_1_1"], 2, False, True),
        # State is awaited only if it is expected; dense models have none.
        ([b"5_kv_0_1_0", b"5_aux_0"], 1, False, True),
        ([b"5_kv_0_1_0", b"5_aux_0"], 1, True, False),
        ([b"5_kv_0_1_0", b"5_aux_0", b"5_state_0"], 1, True, True),
    ],
)
def test_what_completes_a_room(
    texts: list[bytes], writers: int, expects_state: bool, is_complete: bool
) -> None:
    """Guards against a room that never ends, and against one that ends early: the request would
    start on missing KV or metadata; against metadata in another request's slot, and against a
    repeated note written into a slot that has been reused."""
    rank = Rank(writers, expects_state)
    assert rank.take(*texts) is is_complete
    assert rank.slots() == (WRITTEN if any(b"done" in text for text in texts) else EMPTY)


# ---- metadata in a note ----


@pytest.mark.parametrize(
    "why", ["of another room", "announced without a slot", "not in host memory"]
)
def test_a_note_whose_metadata_go_nowhere(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against metadata in a slot of another room, against an unknown sender's note that
    completes a room of a stock prefill server, and against a copy to a GPU address, which ends the
    process: SGLang keeps the slots there for one kind of memory pool."""
    if why == "not in host memory":
        monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "INTRA_NODE_NVLINK")
        assert not Rank(announced=False).manager.expect_metadata(ROOM, SLOT)
    rank = Rank(announced=why == "of another room")
    assert not rank.take(note(room=8 if why == "of another room" else ROOM))
    assert rank.slots() == EMPTY


@pytest.mark.parametrize("lengths", [(), (64,), (8, 64), (64, 8, 8), (64, 9), (63, 8)])
def test_metadata_that_do_not_fit(lengths: tuple[int, ...]) -> None:
    """Guards against bytes beyond a slot, and a room that is complete without its metadata."""
    rank = Rank()
    assert not rank.take(note(lengths=lengths)) and rank.slots() == EMPTY
    text = rank.manager.failure_records[ROOM]
    assert f"metadata of {list(lengths)} bytes" in text and "expects [64, 8]" in text
    assert rank.manager.transfer_statuses[ROOM].is_drained(1), "the writer has stopped"


# ---- drained rooms ----


@pytest.mark.hazard("writers-confused")
@pytest.mark.parametrize("last", [note(6, 1), wire.Stopped(ROOM, 1, "aborted")])
def test_a_room_that_was_given_up(last: Any) -> None:
    """Guards against pages freed when one of two writers has delivered or stopped, against pages
    that stay held when both have, and against metadata in the slot of a room whose client was
    already answered."""
    rank = Rank(writers=2)
    servers = rank.manager.servers
    deferred = announced(rank.manager, ROOM, writers=2).defer_free()
    for _ in range(2):
        rank.take(note(), b"5_kv_0_0_1")
        servers.take(wire.Stopped(ROOM, 0, "aborted"))
        assert not deferred.is_drained()
    servers.take(last) if isinstance(last, wire.Stopped) else rank.take(last)
    assert deferred.is_drained() and rank.slots() == EMPTY


# ---- faults ----


@pytest.mark.hazard("dead-peer-leftovers")
@pytest.mark.parametrize(
    ("arrived", "polls"),
    [
        ([], [KVPoll.WaitingForInput, KVPoll.Failed]),
        ([b"5_kv_0_0_0", b"5_aux_0"], [KVPoll.WaitingForInput, KVPoll.Failed]),
        ([b"5_kv_0_1_0", b"5_aux_0"], [KVPoll.Success] * 2),
    ],
    ids=["nothing", "a part", "everything"],
)
def test_a_poll_between_the_two_words_of_a_heartbeat(
    arrived: list[bytes], polls: list[int]
) -> None:
    """Guards against a dead server's rooms that are reported as delivered, and against a complete
    room that fails. Without the radix flag SGLang's heartbeat fails a room in two steps, and the
    scheduler may poll after the failure record and before the status."""
    rank, seen = Rank(), []
    manager, receiver = rank.manager, rank.receiver()
    manager.servers = None
    rank.take(*arrived)
    update = manager.update_status

    def poll_first(room: int, status: Any) -> None:
        manager.update_status = update
        seen.append(receiver.poll())
        update(room, status)

    manager.update_status = poll_first
    manager._handle_node_failure(ADDRESS)
    assert [*seen, receiver.poll()] == polls


def test_notifications_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against an error of the transport that ends the polling scheduler: rooms end by their
    deadline, pages of abandoned rooms stay held, and the log does not fill up."""
    rank = Rank()

    def broken_off() -> Any:
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(rank.manager.agent, "get_new_notifs", broken_off)
    receiver = rank.receiver()
    for _ in range(100):
        assert receiver.poll() == KVPoll.WaitingForInput
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith("could not read NIXL notifications: RuntimeError('NIXL_ERR_BACKEND')")
    receiver.init_time -= 31
    assert receiver.poll() == KVPoll.Failed
    assert "WAITING_TIMEOUT" in rank.manager.failure_records[ROOM]
    assert not announced(rank.manager, ROOM).defer_free().is_drained()


@pytest.mark.hazard("drained-per-request")
def test_many_rooms_are_read_once_a_step() -> None:
    """Guards against one call of the agent for each of a decode server's rooms in every step, also
    for abandoned rooms that may still be written to."""
    rank, drains = Rank(), []
    agent = rank.manager.agent
    read = agent.get_new_notifs
    agent.get_new_notifs = lambda: drains.append(1) or read()
    deferred = [announced(rank.manager, room).defer_free() for room in range(10, 15)]
    receivers = [rank.receiver(room) for room in (ROOM, 6, 7)]
    for _ in range(5):
        for receiver in receivers:
            assert receiver.poll() == KVPoll.WaitingForInput
        assert not any(each.is_drained() for each in deferred)
    assert len(drains) == 5


@pytest.mark.fuzz
def test_broken_notifications_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an invalid notification, or one for an unknown room, that ends the scheduler
    or leaves an entry."""
    caplog.set_level(logging.CRITICAL)
    rng, rank = random.Random(0), Rank()
    texts = [b"5_kv_0_0_0", b"7_kv_0_1_0", b"5_state_1", b"9_aux_0"]
    for _ in range(tries(30_000)):
        rank.take(b"_".join(broken(rng, rng.choice(texts).split(b"_"))))
    assert set(rank.manager.transfer_statuses) <= {ROOM}
    assert set(rank.manager.request_status) == {ROOM}
