"""What decode servers send to a prefill rank: registrations and rooms' announcements.

Stock SGLang asserts and parses on the thread that reads every decode server's messages, so that one
stray message ends it, and with it every later transfer. Here a message that cannot be understood is
dropped and logged, changes nothing, and the next one is read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_ANNOUNCEMENT_FRAMES = 8
_REGISTRATION_FRAMES = 12
#: A peer is complained about once in so many seconds.
COMPLAINT_INTERVAL_S = 5.0
#: Peers remembered for that; more than this many at once are not told apart.
_REMEMBERED_PEERS = 1024


class BadAnnouncement(ValueError):
    """A message that is not from a decode server, or not one we can serve."""


class FailedRooms:
    """Why rooms failed on this prefill rank, for the latest ones. Used by two threads.

    A decode rank may announce a room after it failed here; it is then told at once, instead of
    holding pages until its own deadline.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._reasons: OrderedDict[int, str] = OrderedDict()
        self._lock = threading.Lock()
        self._limit = limit

    def add(self, room: int, reason: str) -> None:
        """``room`` failed."""
        with self._lock:
            self._reasons[room] = reason
            while len(self._reasons) > self._limit:
                self._reasons.popitem(last=False)

    def discard(self, room: int) -> None:
        """A new request uses the number of ``room``."""
        with self._lock:
            self._reasons.pop(room, None)

    def reason(self, room: int) -> str | None:
        """Why ``room`` failed; None if it did not, as far as is remembered."""
        with self._lock:
            return self._reasons.get(room)


class AnnouncementReader:
    """Feeds one NIXL manager. All calls come from the one thread that reads its socket."""

    def __init__(self, manager: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._clock = clock
        self._complained: dict[str, float] = {}

    def handle(self, frames: list[bytes]) -> None:
        """Take one multipart message. Never raises."""
        try:
            self._dispatch(frames)
        except Exception as error:  # whatever a stranger's bytes made a parser raise
            self._complain(_sender(frames), error)

    def _dispatch(self, frames: list[bytes]) -> None:
        from sglang.srt.disaggregation.nixl import conn

        if not frames or frames[0] != conn.GUARD:
            raise BadAnnouncement("it does not start like a NIXL message of SGLang's")
        message = frames[1:]
        if len(message) < _ANNOUNCEMENT_FRAMES:
            raise BadAnnouncement(f"{len(message)} frames, at least {_ANNOUNCEMENT_FRAMES} wanted")
        if message[0] == b"None":
            if len(message) < _REGISTRATION_FRAMES:
                raise BadAnnouncement(
                    f"a registration of {len(message)} frames, {_REGISTRATION_FRAMES} wanted"
                )
            self._register(conn.KVArgsRegisterInfo.from_zmq(message))
        else:
            self._announce(conn.TransferInfo.from_zmq(message))

    def _register(self, info: Any) -> None:
        """Keep a decode rank's base addresses; they must cover the layers that we send."""
        ours = self._manager.kv_args
        if len(info.dst_kv_ptrs) < len(ours.kv_data_ptrs):
            raise BadAnnouncement(
                f"decode registered {len(info.dst_kv_ptrs)} KV buffers, "
                f"this prefill rank has {len(ours.kv_data_ptrs)}"
            )
        if len(info.dst_aux_ptrs) != len(ours.aux_data_ptrs):
            raise BadAnnouncement(
                f"decode registered {len(info.dst_aux_ptrs)} metadata buffers, "
                f"this prefill rank has {len(ours.aux_data_ptrs)}"
            )
        if info.decode_tp_size < 1 or not 0 <= info.decode_tp_rank < info.decode_tp_size:
            raise BadAnnouncement(
                f"decode rank {info.decode_tp_rank} of {info.decode_tp_size} cannot be"
            )
        self._manager._add_remote_peer(info)

    def _announce(self, info: Any) -> None:
        """Record one decode rank's announcement; the last one of a room makes it ready."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        if info.agent_name not in self._manager.decode_kv_args_table:
            raise BadAnnouncement(f"room {info.room}: peer {info.agent_name!r} never registered")
        if info.required_dst_info_num < 1 or info.dst_aux_index < 0:
            raise BadAnnouncement(f"room {info.room}: a count or an index is negative")
        if info.dst_kv_indices.size and int(info.dst_kv_indices.min()) < 0:
            raise BadAnnouncement(f"room {info.room}: a destination page is negative")
        reason = self._manager.failed_rooms.reason(info.room)
        if reason is not None:
            self._manager.notify_failure(info.room, reason, [info])
            return
        ranks = self._manager.transfer_infos.setdefault(info.room, {})
        ranks[info.agent_name] = info
        if len(ranks) == info.required_dst_info_num:
            self._manager.update_status(info.room, KVPoll.WaitingForInput)

    def _complain(self, sender: str, error: Exception) -> None:
        now = self._clock()
        last = self._complained.get(sender)
        if last is not None and now - last < COMPLAINT_INTERVAL_S:
            return
        if len(self._complained) >= _REMEMBERED_PEERS:
            self._complained.clear()
        self._complained[sender] = now
        logger.error("dropped a message from %s: %s", sender, error)


def _sender(frames: list[bytes]) -> str:
    """Who a message says it is from: decode's address and port, where it has them."""
    if len(frames) < 4:
        return "an unknown peer"
    host, port = (frame[:64].decode("ascii", "replace") for frame in frames[2:4])
    return f"{host}:{port}"
