"""Stock's staging buffers (``SGLANG_DISAGG_STAGING_BUFFER``) beside the delta protocol.

They gather head slices on the GPU, and their worker is SGLang's own. Here it is fed from a queue
that enters and leaves the gate around every chunk, so that rooms end early as with our worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.delta.manager import is_failed
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.peer_messages import BadMessage

logger = logging.getLogger(__name__)

_WATERMARK = b"WATERMARK"
_REPLY = b"STAGING_RSP"
MESSAGES = (_WATERMARK, _REPLY)


def take(manager: Any, frames: list[bytes]) -> None:
    """A message of decode's about its staging buffer.

    Raises:
        BadMessage: staging is off here, or the room is unknown.
        ValueError, IndexError: it cannot be parsed.
    """
    if not manager.enable_staging:
        raise BadMessage(f"{frames[0]!r}, but SGLANG_DISAGG_STAGING_BUFFER is not set here")
    if frames[0] == _WATERMARK:
        mark = int(frames[1]), int(frames[2])
        session = frames[3].decode("ascii") if len(frames) > 3 else ""
        _raise_watermark(manager._staging_ctx, session, mark)
    else:
        room, chunk, offset, round_, end = (int(frame) for frame in frames[1:6])
        _place_chunk(manager, room, frames[6].decode("ascii"), (chunk, offset, round_, end))


def _raise_watermark(context: Any, session: str, mark: tuple[int, int]) -> None:
    """Decode has consumed its ring up to ``mark`` (round, tail)."""
    with context.watermark_cv:
        if mark > context.remote_watermarks.get(session, (0, 0)):
            context.remote_watermarks[session] = mark
            context.watermark_cv.notify_all()


def _place_chunk(manager: Any, room: int, session: str, place: tuple[int, int, int, int]) -> None:
    """Decode has reserved a place for a chunk: (chunk, offset, round, end)."""
    from sglang.srt.disaggregation.mooncake.conn import StagingTransferInfo

    info = manager.transfer_infos.get(room, {}).get(session)
    if info is None:
        raise BadMessage(f"a staging place for room {room}, which is not announced here")
    if not 0 <= place[0] <= len(info.dst_kv_indices):  # a table of that length is made
        raise BadMessage(f"room {room}: a staging place for chunk {place[0]}")
    if info.staging is None:
        info.staging = StagingTransferInfo()
    info.staging.set_chunk(*place)


class GatedQueue:
    """Chunks of rooms that may still be written; a room is busy from its chunk to the next one."""

    def __init__(self, queue: Any, manager: Any) -> None:
        self._queue = queue
        self._manager = manager
        self._room: int | None = None
        self._is_put_back = False

    def get(self) -> Any:
        """Leave the room of the chunk before, and wait for one whose room may be entered."""
        self.leave(None)
        while True:
            chunk = self._queue.get()
            self._manager.being_sent.add(chunk.room)
            if self._manager.rooms.enter(chunk.room):
                self._room = chunk.room
                return chunk
            self._manager.being_sent.discard(chunk.room)
            self._manager.chunk_deadlines.over(chunk.room)

    def put(self, chunk: Any) -> None:
        """A chunk that decode has no place for yet, to be tried again; its deadline stays."""
        self._is_put_back = True
        self._queue.put(chunk)

    def leave(self, error: BaseException | None) -> None:
        """The worker is done with the last chunk; ``error``: what it raised, if it did."""
        room, self._room = self._room, None
        is_put_back, self._is_put_back = self._is_put_back, False
        if room is None:
            return
        manager = self._manager
        if error is not None:
            manager.rooms.fail(room, Reason.TRANSPORT, f"room {room}: {error}")
        elif is_failed(manager.request_status.get(room)):
            text = manager.failure_records.get(room, f"room {room}: a transfer failed")
            manager.rooms.fail(room, Reason.TRANSPORT, text)
        manager.rooms.gate.leave(room)
        manager.being_sent.discard(room)
        if not is_put_back:
            manager.chunk_deadlines.over(room)


def serve(manager: Any, queue: Any, worker: Callable[[Any], None]) -> None:
    """Run SGLang's ``worker`` on ``queue`` for ever. It ends with an exception at the first
    unexpected thing; that fails one room, and it starts again."""
    gated = GatedQueue(queue, manager)
    while True:
        try:
            worker(gated)
        except Exception as error:
            logger.exception("staging transfer worker")
            gated.leave(error)
