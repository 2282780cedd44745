"""Metadata slots, where prefill writes the first token: cleared when taken, checked when polled.

Whether the metadata of a room have landed must be known *before* the ranks agree that its transfer
is complete. A rank that found out afterwards would keep the request while the others run it.
"""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.disaggregation.decode_radix.eligibility import is_fake

EMPTY = 0


def take_slot(allocator: Any, buffers: Any) -> int:
    """A free slot that says of no room that its metadata are there; the caller knows one is free.

    It is cleared here too: a transfer that was given up may have written since it was freed.
    """
    index: int | None = allocator.alloc()
    assert index is not None, "a free metadata slot was checked before"
    buffers.bootstrap_room[index, 0] = EMPTY
    return index


def free_slot(allocator: Any, buffers: Any, index: int) -> None:
    """Give a slot back; what it says of its room is forgotten."""
    buffers.bootstrap_room[index, 0] = EMPTY
    allocator.free(index)


class Arrival:
    """One transfer as the ranks poll it: complete when its KV *and* its metadata are here."""

    def __init__(self, decode_req: Any, buffers: Any) -> None:
        self._decode_req = decode_req
        self._buffers = buffers

    def poll(self) -> int:
        """The receiver's state; Success only with this room's metadata.

        Failed with another room's, or without any for as long as a transfer may take.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll

        entry, req = self._decode_req, self._decode_req.req
        state = int(entry.kv_receiver.poll())
        if state != KVPoll.Success or is_fake(req):
            return state
        expected = req.bootstrap_room or EMPTY
        found = int(self._buffers.bootstrap_room[entry.metadata_buffer_index, 0].item())
        if expected == EMPTY:
            entry.arrived = True
            entry.failure = "room 0 cannot be told from an empty metadata slot"
            return int(KVPoll.Failed)
        if found == EMPTY:
            return int(KVPoll.Failed if self._is_overdue() else KVPoll.Transferring)
        entry.arrived = True  # on this rank prefill has nothing left to write
        if found != expected:
            entry.failure = (
                f"metadata slot {entry.metadata_buffer_index} holds the metadata of room {found}"
            )
            return int(KVPoll.Failed)
        return state

    def _is_overdue(self) -> bool:
        """Whether the metadata did not come in the time that a transfer may take.

        Prefill says that it delivered everything, so nothing else would end the wait.
        """
        from sglang.srt.environ import envs

        entry, now = self._decode_req, time.monotonic()
        if getattr(entry, "without_metadata_since", None) is None:
            entry.without_metadata_since = now
        waited = now - entry.without_metadata_since
        if waited < envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get():
            return False
        entry.failure = (
            f"its KV has arrived, but no metadata in metadata slot {entry.metadata_buffer_index} "
            f"within {waited:.0f} s (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)"
        )
        return True
