"""Presentation of numbers: percentiles, a summary in JSON, a short table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Spread:
    """A quantity in its unit; NaN if there are no values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Verdict:
    """A bound, and True if it held."""

    text: str
    holds: bool

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.text}"


def percentile(values: Sequence[float], p: float) -> float:
    """Return the ``p``-th percentile (0-100), interpolated; NaN if there are no values."""
    return float(np.percentile(values, p)) if len(values) else math.nan


def spread(values: Iterable[float | None]) -> Spread:
    """Return the spread of the values that are not None."""
    known = [float(value) for value in values if value is not None]
    mean = sum(known) / len(known) if known else math.nan
    return Spread(len(known), mean, *(percentile(known, p) for p in (50, 90, 99)))


def write_summary(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON; dataclasses become objects, NaN becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain(content), separators=(",", ":")) + "\n")


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console
) -> None:
    """Print one row a quantity and one column an arm."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the same as Markdown; rows without values are left out."""
    lines = [columns, ["---"] * len(columns), *(row for row in rows if any(row[1:]))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain(value: Any) -> Any:
    """Return the value as in JSON: dataclasses and structs as objects, six significant digits
    (numpy's too), NaN as null."""
    return _rounded(msgspec.to_builtins(value, str_keys=True, enc_hook=lambda n: n.item()))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.6g}")
    return value
