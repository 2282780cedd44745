"""What was sent, moved and seen of a room: counters, and events for whoever reads the log."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang.srt.disaggregation.delta.events import Announced, Arrived, Moved, Sent, event_log, now
from sglang.srt.disaggregation.delta.harmless import harmless
from sglang.srt.disaggregation.delta.stats import STATS

#: Page indices into a pool, 1-D int32.
Pages = npt.NDArray[np.int32]


@harmless
def count_sent(room: int, peer: str, source: Pages, destination: Pages, moved: int) -> None:
    """``moved`` bytes of KV went from our ``source`` pages to ``destination`` pages of ``peer``."""
    STATS.add("kv_transfer_sent_bytes", moved)
    log = event_log("prefill")
    if log is not None:
        log.write(
            Sent(
                at=now(),
                room=room,
                peer=peer,
                source_pages=source.tolist(),
                destination_pages=destination.tolist(),
                bytes=moved,
            )
        )


@harmless
def count_moved(
    room: int, peer: str, *, chunk: int, is_last: bool, queue_s: float, build_s: float,
    post_s: float, wire_s: float, descriptors: int, moved: int,
) -> None:  # fmt: skip
    """A chunk is with ``peer``; see ``events.Moved``."""
    log = event_log("prefill")
    if log is not None:
        log.write(
            Moved(
                at=now(), room=room, peer=peer, chunk=chunk, is_last=is_last, queue_s=queue_s,
                build_s=build_s, post_s=post_s, wire_s=wire_s, descriptors=descriptors, bytes=moved,
            )
        )  # fmt: skip


@harmless
def log_announced(room: int) -> None:
    """Every decode rank has announced ``room``."""
    log = event_log("prefill")
    if log is not None:
        log.write(Announced(at=now(), room=room))


@harmless
def log_arrived(room: int) -> None:
    """Everything of ``room`` has arrived on this decode rank."""
    log = event_log("decode")
    if log is not None:
        log.write(Arrived(at=now(), room=room))
