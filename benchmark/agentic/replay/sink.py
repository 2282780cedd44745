"""The output file: one JSON line a request, appended as it ends; a run can go on after a crash.

The first line says what the file was made with. Each line is one write, so that a crash of this
process can tear the last one only; without its line end it is dropped, and its request sent again.
A crash of the whole machine may lose lines that the kernel had not written out.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmark.agentic.replay.outcome import Outcome

FORMAT = 1


class Header(msgspec.Struct, frozen=True):
    """First line. ``settings``: flag names without dashes, and what they were."""

    settings: dict[str, Any]
    trace_sha256: str
    format: int = FORMAT

    def differences(self, now: Header) -> list[str]:
        """What another run would do otherwise, a phrase each."""
        found = []
        if now.format != self.format:
            found.append(f"its format is {self.format}, this program writes {now.format}")
        if now.trace_sha256 != self.trace_sha256:
            found.append("the trace file has other contents")
        for name in sorted({*self.settings, *now.settings}):
            before, after = self.settings.get(name), now.settings.get(name)
            if before != after:
                found.append(f"--{name.replace('_', '-')} was {before}, is {after}")
        return found


class CannotResume(ValueError):
    """The file belongs to another run. The message names file and difference."""


@dataclass(frozen=True)
class Earlier:
    """What an output file holds."""

    header: Header | None = None
    """None for an empty file, or one whose first line was torn."""
    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    """By index; of a request that was sent twice, the later one."""
    whole_bytes: int = 0
    """Up to the end of the last whole line."""
    torn_bytes: int = 0
    """After it."""


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def load(path: Path) -> Earlier:
    """Read an output file.

    Raises:
        ValueError: a whole line is unreadable, so that it was not a crash of ours that damaged the
            file. The message names file and line.
    """
    header: Header | None = None
    outcomes: dict[int, Outcome] = {}
    whole = 0
    decode = msgspec.json.Decoder(Outcome).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return Earlier(header, outcomes, whole, len(line))
            try:
                if header is None:
                    header = msgspec.json.decode(line, type=Header)
                else:
                    outcome = decode(line)
                    outcomes[outcome.index] = outcome
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            whole += len(line)
    return Earlier(header, outcomes, whole)


class Sink:
    """Appends to an output file; a context manager. ``earlier``: what is in it already."""

    def __init__(self, path: Path, header: Header, earlier: Earlier | None = None) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # Never truncates: what was measured before is deleted by its owner only.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | (0 if earlier else os.O_EXCL)
        self._file = os.open(path, flags, 0o644)
        self._encode = msgspec.json.Encoder().encode
        if earlier is not None:
            os.ftruncate(self._file, earlier.whole_bytes)
        if earlier is None or earlier.header is None:
            self._line(header)

    def write(self, outcome: Outcome) -> None:
        """Raises ``OSError`` if not all of it was written, such as on a full disk."""
        self._line(outcome)

    def _line(self, content: msgspec.Struct) -> None:
        line = self._encode(content) + b"\n"
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(f"{self._path}: {written} of {len(line)} bytes were written")

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)


def resume(path: Path, header: Header) -> Earlier:
    """What is in the file, if ``header`` would write the same one.

    Raises:
        CannotResume: other settings, or another trace.
        FileNotFoundError: there is no such file.
        ValueError: see ``load``.
    """
    earlier = load(path)
    if earlier.header is not None and (found := earlier.header.differences(header)):
        raise CannotResume(f"{path} is of another run: " + "; ".join(found))
    return earlier
