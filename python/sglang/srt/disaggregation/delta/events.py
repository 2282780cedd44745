"""The event log: one JSON line for each admission on decode and each send on prefill.

Off unless ``SGLANG_DISAGGREGATION_EVENT_LOG`` names a folder; each scheduler process appends to
``<folder>/<side>-<pid>.jsonl``. Times are seconds since the epoch, so that the files of two servers
on one host can be joined by room.
"""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec

ENV = "SGLANG_DISAGGREGATION_EVENT_LOG"


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


class EventLog:
    """Appends events to one file; one line a write, so that lines of threads do not mix."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def write(self, event: Admitted | Sent) -> None:
        """Append one event."""
        self._file.write(self._encoder.encode(event) + b"\n")


@cache
def event_log(side: str) -> EventLog | None:
    """This process's log; None where the variable is not set. ``side``: prefill or decode."""
    folder = os.environ.get(ENV)
    if not folder:
        return None
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return EventLog(open(path / f"{side}-{os.getpid()}.jsonl", "ab", buffering=0))  # noqa: SIM115


def now() -> float:
    """Seconds since the epoch."""
    return time.time()
