"""Notifications that travel with (or beside) NIXL transfers, from prefill to decode.

They are stock SGLang's, with one change: stock names only the pipeline stage of the sender, ours
the *writer*, a number that no other prefill rank of the room has. Where several ranks write for one
decode rank (tensor parallelism), the first one to finish would otherwise count for all. A stock
decode server reads both alike.

    <room>_kv_<chunk>_<is last>_<writer>
    <room>_aux_<writer>          stock: <room>_aux
    <room>_state_<writer>
"""

from __future__ import annotations

import msgspec


class Notification(msgspec.Struct, frozen=True):
    """One parsed notification; ``writer`` is None in a stock prefill's ``aux``."""

    room: int
    kind: str
    chunk: int = 0
    is_last: bool = False
    writer: int | None = None


def from_writer(text: str, writer: int) -> str:
    """The stock notification ``text``, as the one of ``writer``."""
    note = parse(text.encode())
    if note.kind == "kv":
        return f"{note.room}_kv_{note.chunk}_{int(note.is_last)}_{writer}"
    return f"{note.room}_{note.kind}_{writer}"


def parse(raw: bytes) -> Notification:
    """Parse one notification.

    Raises:
        ValueError: it has none of the known forms.
    """
    text = raw.decode("ascii")
    room, kind, *numbers = text.split("_")
    fields = [int(number) for number in numbers]
    if min([int(room), *fields]) < 0:
        raise ValueError(f"negative numbers in NIXL notification {text[:80]!r}")
    if kind == "kv" and 2 <= len(fields) <= 3 and fields[1] <= 1:
        writer = fields[2] if len(fields) == 3 else 0
        return Notification(int(room), kind, fields[0], bool(fields[1]), writer)
    if kind == "aux" and len(fields) <= 1:
        return Notification(int(room), kind, writer=fields[0] if fields else None)
    if kind == "state" and len(fields) <= 1:
        return Notification(int(room), kind, writer=fields[0] if fields else 0)
    raise ValueError(f"unknown NIXL notification {text[:80]!r}")
