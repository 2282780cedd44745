"""Bars for long work, on stderr and only where a person looks on."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")

_STEP = 500


def counted(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, counted on a bar; ``total`` where it is known."""
    with Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        task = progress.add_task(what, total=total)
        done = 0
        for done, item in enumerate(items, start=1):
            if done % _STEP == 0:
                progress.update(task, completed=done)
            yield item
        progress.update(task, completed=done)
