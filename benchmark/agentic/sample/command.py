"""What the commands share: the trace they are given, a bar, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmark.agentic.sample.survey import Survey, survey
from benchmark.traces.read import read
from benchmark.traces.record import Record
from benchmark.traces.sessions import annotate


@dataclass(frozen=True)
class Source:
    """A trace file whose every record names its session."""

    path: Path
    block_tokens: int

    def records(self, what: str, total: int | None = None) -> Iterable[Record]:
        return counted(annotate(read(self.path, self.block_tokens), self.block_tokens), what, total)

    def survey(self) -> Survey:
        """One pass.

        Raises:
            ValueError: no trace; the message names the file, and the line where it is one line's.
        """
        try:
            return survey(self.records("reading"), self.block_tokens)
        except ValueError as error:
            named = str(error).startswith(str(self.path))
            raise ValueError(str(error) if named else f"{self.path}: {error}") from error


def counted(records: Iterable[Record], what: str, total: int | None = None) -> Iterable[Record]:
    """The records, counted on a bar where a person looks on; ``total`` where it is known."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    return track(records, what, total, console=console, transient=True, disable=hidden)


@contextmanager
def reporting() -> Iterator[None]:
    """Ends a command with one line for what the user can put right, and status 1."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more: {text}")
    return value
