"""The thread that reads what peers send to a rank, and the checks of what they announce.

Stock SGLang asserts and parses on that thread, so that one stray message ends it, and with it every
later transfer. Here a message that cannot be understood is dropped and logged, changes nothing, and
the next one is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang.srt.disaggregation.delta import control
from sglang.srt.disaggregation.delta.logs import RateLimitedLog

logger = logging.getLogger(__name__)


class BadMessage(ValueError):
    """A message that is not from a peer of ours, or not one that can be served."""


class MessageReader:
    """Feeds one manager. All calls come from the one thread that reads its socket."""

    def __init__(
        self,
        take_control: Callable[[control.Message], None],
        take_other: Callable[[list[bytes]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``take_other`` gets the messages of SGLang's own kinds, and raises at bad ones."""
        self._take_control = take_control
        self._take_other = take_other
        self._log = RateLimitedLog(logger, clock=clock)

    def handle(self, frames: list[bytes]) -> None:
        """Take one multipart message. Never raises."""
        try:
            message = control.decode(frames)
            if message is not None:
                self._take_control(message)
            else:
                self._take_other(frames)
        except Exception as error:  # whatever a stranger's bytes made a parser raise
            sender = _sender(frames)
            self._log.error(sender, "dropped a message from %s: %s", sender, error)

    def serve(self, socket: Any, tick: Callable[[], None], interval_ms: int = 1000) -> None:
        """Read for ever; ``tick`` is called at least every interval. Both outlive any error."""
        ticked = time.monotonic()
        while True:
            if socket.poll(interval_ms):
                self.handle(socket.recv_multipart())
            if (time.monotonic() - ticked) * 1000 >= interval_ms:
                try:
                    tick()
                except Exception as error:
                    self._log.error(
                        "tick", "checks of deadlines failed (tried again in 1 s): %r", error
                    )
                ticked = time.monotonic()


def _sender(frames: list[bytes]) -> str:
    """Who a message says it is from: address and port, where it has them."""
    for start in (1, 2):  # Mooncake's messages have no guard in front
        if len(frames) > start + 1 and frames[start + 1].isdigit():
            host, port = (frame[:64].decode("ascii", "replace") for frame in frames[start:][:2])
            return f"{host}:{port}"
    return "an unknown peer"


def check_registration(
    manager: Any,
    *,
    kv_buffers: int,
    state_buffers: int,
    aux_buffers: int,
    tp_size: int,
    tp_rank: int,
    item_len: int | None,
) -> None:
    """Whether a decode rank's base addresses cover what this prefill rank sends.

    ``item_len``: bytes of a page in each of its buffers; None where its pages may differ.

    Raises:
        BadMessage: they do not; the text has the numbers.
    """
    ours = manager.kv_args
    if kv_buffers < len(ours.kv_data_ptrs):
        raise BadMessage(
            f"decode registered {kv_buffers} KV buffers, "
            f"this prefill rank has {len(ours.kv_data_ptrs)}"
        )
    if aux_buffers != len(ours.aux_data_ptrs):
        raise BadMessage(
            f"decode registered {aux_buffers} metadata buffers, "
            f"this prefill rank has {len(ours.aux_data_ptrs)}"
        )
    state = len(getattr(ours, "state_data_ptrs", None) or ())
    if state_buffers and state_buffers != state and manager.pp_size == 1:
        raise BadMessage(
            f"decode registered {state_buffers} buffers of state, this prefill rank has {state}: "
            "a later release of SGLang lists them in another way, and cannot be served with a "
            "model that has state (Mamba, sliding window, NSA)"
        )
    if tp_size < 1 or tp_rank < 0:
        raise BadMessage(f"decode rank {tp_rank} of {tp_size} cannot be")
    if item_len is None:
        return
    same_layout = manager.is_mla_backend or tp_size == manager.attn_tp_size
    if item_len < 1 or (same_layout and item_len != ours.kv_item_lens[0]):
        raise BadMessage(
            f"decode's KV pages have {item_len} bytes, this prefill rank's "
            f"{ours.kv_item_lens[0]}: model, page size or KV dtype differ"
        )


def check_announcement(info: Any) -> None:
    """Whether the numbers in a room's announcement can be; before any descriptor is made of them.

    Raises:
        BadMessage: they cannot; the text has the numbers.
    """
    pages, slot = info.dst_kv_indices, info.dst_aux_index
    if info.required_dst_info_num < 1 or (slot is not None and slot < 0):
        raise BadMessage(f"room {info.room}: a count or an index is negative")
    if pages.size and int(pages.min()) < 0:
        raise BadMessage(f"room {info.room}: a destination page is negative")
    if len(np.unique(pages)) != len(pages):
        raise BadMessage(f"room {info.room}: a destination page is listed twice")
    delta = info.delta
    if delta is None:
        return
    if delta.num_pages != len(pages):
        raise BadMessage(
            f"room {info.room}: {len(pages)} destination pages came, {delta.num_pages} were sent"
        )
    if delta.pool_pages and pages.size and int(pages.max()) >= delta.pool_pages:
        raise BadMessage(
            f"room {info.room}: destination page {int(pages.max())}, "
            f"but decode's pool has {delta.pool_pages}"
        )
    if delta.metadata_slots and slot is not None and slot >= delta.metadata_slots:
        raise BadMessage(
            f"room {info.room}: metadata slot {slot}, but decode has {delta.metadata_slots}"
        )
