"""Traces side by side, for people (a table) and for programs (JSON)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmark.agentic.sample.describe import Description, Lengths


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _lengths(value: Lengths) -> str:
    return " / ".join(f"{v:,.0f}" for v in (value.mean, value.p50, value.p90, value.p99))


ROWS: tuple[tuple[str, Callable[[Description], str]], ...] = (
    ("requests", lambda d: _whole(d.requests)),
    ("sessions", lambda d: _whole(d.sessions)),
    ("of several turns, sessions", lambda d: _share(d.multi_turn_sessions)),
    ("of several turns, requests", lambda d: _share(d.multi_turn_requests)),
    ("turns (mean / p50 / p90 / p99)", lambda d: f"{d.turns.mean:.2f} / " + _tail(d.turns)),
    ("turns, most", lambda d: _whole(d.longest_session)),
    ("growth per turn, tokens", lambda d: _whole(d.growth_per_turn)),
    ("input tokens (mean / p50 / p90 / p99)", lambda d: _lengths(d.input_tokens)),
    ("output tokens (mean / p50 / p90 / p99)", lambda d: _lengths(d.output_tokens)),
    ("prefill share of tokens", lambda d: _share(d.prefill_share)),
    ("span, s", lambda d: _whole(d.span_s)),
    ("requests/s, mean", lambda d: f"{d.mean_rate:.2f}"),
    ("requests/s, peak", lambda d: f"{d.peak_rate:.2f} over {d.bucket_s:g} s"),
    ("block occurrences", lambda d: _whole(d.blocks)),
    ("blocks, distinct", lambda d: _whole(d.distinct_blocks)),
    ("shared by sessions", lambda d: _share(d.cross_session_share)),
    ("repeated at all", lambda d: _share(d.repeated_share)),
    ("hit of an infinite cache, tokens", lambda d: _share(d.hit)),
    ("  within sessions", lambda d: _share(d.hit_within)),
    ("  across sessions", lambda d: _share(d.hit_across)),
    ("  within, of all hits", lambda d: _share(d.within_share_of_hits)),
)


def _tail(value: Lengths) -> str:
    return " / ".join(f"{v:,.0f}" for v in (value.p50, value.p90, value.p99))


def print_table(traces: Mapping[str, Description], console: Console | None = None) -> None:
    """A column a trace; warns of traces whose ids do not stand for whole prefixes."""
    console = console or Console(width=None if Console().is_terminal else 120)
    table = Table("", *traces)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cell in ROWS:
        table.add_row(name, *(cell(d) for d in traces.values()))
    console.print(table)
    for name, d in traces.items():
        if d.inconsistent_blocks:
            console.print(
                f"{name}: {d.inconsistent_blocks:,} blocks follow other blocks than before; their "
                "ids do not stand for the whole prefix, and the shares above are too high"
            )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
