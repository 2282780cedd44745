"""What prefill has sent: one counter and one event for each chunk and destination."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang.srt.disaggregation.delta.events import Sent, event_log, now
from sglang.srt.disaggregation.delta.stats import STATS

#: Page indices into a pool, 1-D int32.
Pages = npt.NDArray[np.int32]


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
