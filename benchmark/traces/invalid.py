"""Lines of a trace that cannot be read: the end of it, or left out and counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Invalid:
    """``skip``: leave such lines out. Without it the first one is an error."""

    def __init__(self, skip: bool = False) -> None:
        self._skip = skip
        self.count = 0
        """Of those left out."""
        self.first = ""
        """What was wrong with the first of them; it names file and line."""

    @contextmanager
    def at(self, path: Path | str, place: str) -> Iterator[None]:
        """Around what reads one line.

        Raises:
            ValueError: the line is wrong and is not left out. The message names file and line.
        """
        try:
            yield
        except ValueError as error:  # msgspec's errors are ValueErrors too
            text = f"{path}, {place}: {error}"
            if not self._skip:
                raise ValueError(text) from error
            self.count += 1
            self.first = self.first or text

    def told(self) -> list[str]:
        """One line where something was left out."""
        if not self.count:
            return []
        lines = "line was" if self.count == 1 else "lines were"
        return [f"{self.count:,} invalid {lines} left out; the first: {self.first}"]
