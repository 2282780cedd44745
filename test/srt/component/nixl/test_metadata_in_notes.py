"""Metadata that come in the note which completes a room, on a decode rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from component.transfer.bare import ADDRESS, decode
from sglang.srt.disaggregation.delta.wire import done

ROOM, SLOT = 7, 2
LENGTHS = (64, 8)


class Rank:
    """A decode rank that announced ``ROOM`` with metadata slot ``SLOT``."""

    def __init__(self, writers: int = 1, announced: bool = True) -> None:
        self.buffers = [np.zeros((4, length), np.uint8) for length in LENGTHS]
        self.manager: Any = decode("nixl", ROOM, writers=writers)
        self.manager.kv_args = SimpleNamespace(
            aux_data_ptrs=[buffer.ctypes.data for buffer in self.buffers],
            aux_item_lens=list(LENGTHS),
        )
        if announced:
            assert self.manager.expect_metadata(ROOM, SLOT)

    def take(self, *notes: bytes) -> None:
        """These arrive, and are read."""
        self.manager.agent.notes = {"prefill": list(notes)}
        self.manager.update_transfer_status()

    def slots(self) -> list[list[int]]:
        """The bytes of each buffer's slots, where they are all one number."""
        assert all((buffer == buffer[:, :1]).all() for buffer in self.buffers)
        return [buffer[:, 0].tolist() for buffer in self.buffers]

    @property
    def is_done(self) -> bool:
        return bool(self.manager.check_transfer_done(ROOM))


def note(
    value: int, writer: int = 0, room: int = ROOM, lengths: tuple[int, ...] = LENGTHS
) -> bytes:
    """A completion whose metadata are all ``value``."""
    return done(room, writer, [bytes([value]) * length for length in lengths])


def test_written_into_the_slot_of_the_room() -> None:
    """Guards against metadata in another request's slot."""
    rank = Rank()
    rank.take(note(9, room=8))  # of a room that is not here
    assert rank.slots() == [[0] * 4] * 2 and not rank.is_done
    rank.take(note(5))
    assert rank.slots() == [[0, 0, 5, 0]] * 2 and rank.is_done


def test_slots_that_are_not_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a copy to an address of the GPU, which ends the process: SGLang puts the slots
    there for one kind of memory pool. They are written by prefill then."""
    monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "INTRA_NODE_NVLINK")
    rank = Rank(announced=False)
    assert not rank.manager.expect_metadata(ROOM, SLOT)
    rank.take(note(5))
    assert rank.slots() == [[0] * 4] * 2 and not rank.is_done


def test_written_once() -> None:
    """Guards against a repeated note that is written into a slot which was given to another
    request when its room was complete."""
    rank = Rank()
    rank.take(note(5), note(6))
    assert rank.slots() == [[0, 0, 5, 0]] * 2 and rank.is_done


def test_each_writer_brings_its_own() -> None:
    """Guards against a room that is complete with the first of its writers."""
    rank = Rank(writers=2)
    rank.take(note(5))
    assert not rank.is_done
    rank.take(note(6, writer=1))
    assert rank.slots() == [[0, 0, 6, 0]] * 2 and rank.is_done


@pytest.mark.parametrize("lengths", [(), (64,), (8, 64), (64, 8, 8), (64, 9), (63, 8)])
def test_metadata_that_do_not_fit(lengths: tuple[int, ...]) -> None:
    """Guards against bytes beyond a slot, and against a room that is complete without them."""
    rank = Rank()
    rank.take(note(5, lengths=lengths))
    assert rank.slots() == [[0] * 4] * 2 and not rank.is_done
    text = rank.manager.failure_records[ROOM]
    assert f"metadata of {list(lengths)} bytes" in text and "expects [64, 8]" in text
    assert rank.manager.take_progress(ROOM).is_drained(1), "it writes no more"


def test_a_room_that_was_announced_without_a_slot() -> None:
    """Guards against a stranger's note that completes a room of a stock prefill server."""
    rank = Rank(announced=False)
    rank.take(note(5))
    assert rank.slots() == [[0] * 4] * 2 and not rank.is_done


def test_a_room_that_was_given_up() -> None:
    """Guards against metadata in the slot of a room whose client was answered; but its pages may
    be released, for all that prefill would write is here."""
    rank = Rank()
    manager = rank.manager
    deferred = manager.servers.defer_free(ROOM, ADDRESS, 1, 1)
    assert deferred is not None and not deferred.is_drained()
    rank.take(note(5))
    assert rank.slots() == [[0] * 4] * 2 and deferred.is_drained()
