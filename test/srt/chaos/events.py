"""The log of a chaos run: one JSON line for each thing that was done or that ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """``at``: seconds since the arm's first request; ``what`` tells which other fields are set."""

    what: str
    arm: str
    at: float
    number: int | None = None
    rid: str = ""
    room: int | None = None
    fields: dict[str, Any] = {}


class EventFile:
    """Appends events to a file, each as soon as it is known. A context manager."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._encoder = msgspec.json.Encoder()

    def write(self, event: Event) -> None:
        self._file.write(self._encoder.encode(event) + b"\n")

    def __enter__(self) -> EventFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
