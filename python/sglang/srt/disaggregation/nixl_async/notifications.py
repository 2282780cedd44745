"""Notifications that travel with (or beside) NIXL transfers, from prefill to decode.

The first three are stock SGLang's; ``fail`` is ours, and a stock decode server ignores it:

    <room>_kv_<chunk>_<is last>_<pp rank>
    <room>_aux
    <room>_state_<pp rank>
    <room>_fail_<reason>
"""

from __future__ import annotations

from typing import Any

import msgspec


class Notification(msgspec.Struct, frozen=True):
    """One parsed notification."""

    room: int
    kind: str
    chunk: int = 0
    is_last: bool = False
    pp_rank: int = 0
    reason: str = ""


def failure_text(room: int, reason: str) -> bytes:
    """The notification that fails ``room``."""
    return f"{room}_fail_{reason}".encode()


def parse(raw: bytes) -> Notification:
    """Parse one notification.

    Raises:
        ValueError: it has none of the known forms.
    """
    text = raw.decode()
    room_text, _, rest = text.partition("_")
    kind, _, detail = rest.partition("_")
    room = int(room_text)
    if kind == "kv":
        chunk, is_last, *pp_rank = detail.split("_")
        return Notification(
            room, kind, int(chunk), bool(int(is_last)), int(pp_rank[0]) if pp_rank else 0
        )
    if kind == "aux":
        return Notification(room, kind)
    if kind == "state":
        return Notification(room, kind, pp_rank=int(detail or 0))
    if kind == "fail":
        return Notification(room, kind, reason=detail)
    raise ValueError(f"unknown NIXL notification {text!r}")


def apply(status: Any, note: Notification, num_writers: int) -> None:
    """Update SGLang's ``TransferStatus`` of the room with one notification. Idempotent.

    ``num_writers`` is the number of prefill ranks that write for the room.
    """
    if note.kind == "kv":
        status.received_kvs_per_pp[note.pp_rank].add(note.chunk)
        if note.is_last:
            status.expected_kvs_per_pp[note.pp_rank] = note.chunk + 1
            if status.num_pp_ranks_expected is None:
                status.num_pp_ranks_expected = num_writers
    elif note.kind == "aux":
        status.received_aux = True
    elif note.kind == "state":
        status.received_state_per_pp.add(note.pp_rank)
    elif note.kind == "fail":
        status.is_failure = True
