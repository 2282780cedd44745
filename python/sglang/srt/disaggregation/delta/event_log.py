"""The event log: one JSON line for each step of a room, from its announcement to its arrival.

And one for each request that asked HiCache's store (``hicache-<pid>.jsonl``). It is off unless
``SGLANG_DISAGGREGATION_EVENT_LOG`` names a folder; each scheduler process appends to
``<folder>/<side>-<pid>.jsonl``. Times are seconds since the epoch, so that the files of two servers
on one host can be joined by room. ``observability.record`` writes to it.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import structs

from sglang.srt.patchset import environment


class Admitted(msgspec.Struct, frozen=True, tag="admitted", kw_only=True):
    """Decode reserved destination pages for a room and announced them."""

    at: float
    room: int | None
    rid: str
    prompt_tokens: int
    prefix_tokens: int
    pages: list[int]


class Sent(msgspec.Struct, frozen=True, tag="sent", kw_only=True):
    """Prefill posted one chunk of a room to one decode rank."""

    at: float
    room: int
    peer: str
    source_pages: list[int]
    destination_pages: list[int]
    bytes: int


class Announced(msgspec.Struct, frozen=True, tag="announced", kw_only=True):
    """Every decode rank of a room has announced its pages to this prefill rank."""

    at: float
    room: int


class Moved(msgspec.Struct, frozen=True, tag="moved", kw_only=True):
    """One chunk of a room, and with the last one the metadata, was seen to be with one decode rank.

    ``queue_s``: from ``send`` until a worker took it; then the descriptors were made (``build_s``),
    the transfers started (``post_s``), and waited for (``wire_s``). Bytes and descriptors are those
    of everything that went along.
    """

    at: float
    room: int
    peer: str
    chunk: int
    is_last: bool
    queue_s: float
    build_s: float
    post_s: float
    wire_s: float
    descriptors: int
    bytes: int


class Arrived(msgspec.Struct, frozen=True, tag="arrived", kw_only=True):
    """Decode saw that a room is complete."""

    at: float
    room: int


class Prefetched(msgspec.Struct, frozen=True, tag="prefetched", kw_only=True):
    """A request whose prefix was looked for in HiCache's store runs, or is gone.

    Milliseconds until the store had answered, until its pages were fetched, while they were, and
    from then on, in the stage; ``choice`` as in the metric ``prefetch_choices``.
    """

    at: float
    rid: str
    prompt_tokens: int
    hit_pages: int
    loaded_tokens: int
    choice: str | None
    query_ms: int
    wait_ms: int
    fetch_ms: int
    staged_ms: int


Event = Admitted | Sent | Announced | Moved | Arrived | Prefetched


class EventLog:
    """Appends events to one file; one line a write, so that lines of threads do not mix."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def write(self, event: Event) -> None:
        """Append one event."""
        try:
            line = self._encoder.encode(event)
        except UnicodeEncodeError:  # a client's request id with lone surrogates
            line = self._encoder.encode(
                structs.replace(event, rid=ascii(getattr(event, "rid", "")))
            )
        self._file.write(line + b"\n")


@functools.cache
def event_log(side: str) -> EventLog | None:
    """This process's log; None where the variable is not set. ``side``: prefill or decode."""
    folder = environment.EVENT_LOG.read()
    if not folder:
        return None
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return EventLog(open(path / f"{side}-{os.getpid()}.jsonl", "ab", buffering=0))  # noqa: SIM115


#: Seconds since the epoch.
now = time.time
