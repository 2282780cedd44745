"""Figures of a trace. Terms, exact:

shared (cross-session)  share of block occurrences whose block is used by more than one session,
                        the first occurrence and repetitions within a session included
repeated                share of block occurrences whose block occurs more than once at all
hit                     share of input tokens in blocks that an earlier request had, which is what
                        one prefix cache without limits would hit; within: the session itself had
                        used the block before; across: only other sessions had
within share of hits    the tokens within, of all tokens hit
prefill share           input tokens, of input and output tokens
peak rate               requests a second in the fullest bucket of ``BUCKET_S``, counted from the
                        first request
growth per turn         how much longer a prompt is than that of the turn before, mean
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console

from benchmark.agentic.traces.survey import Columns, Survey
from benchmark.harness import report
from benchmark.harness.report import Spread, spread

BUCKET_S = 10.0


@dataclass(frozen=True)
class Description:
    """Shares are 0 to 1, lengths in tokens, times in seconds; the terms are the module's."""

    requests: int
    sessions: int
    multi_turn_sessions: float
    multi_turn_requests: float
    turns: Spread
    longest_session: int
    growth_per_turn: float
    input_tokens: Spread
    output_tokens: Spread
    prefill_share: float
    span_s: float
    mean_rate: float
    peak_rate: float
    bucket_s: float
    blocks: int
    distinct_blocks: int
    cross_session_share: float
    repeated_share: float
    hit: float
    hit_within: float
    hit_across: float
    within_share_of_hits: float
    inconsistent_blocks: int


def describe(found: Survey) -> Description:
    columns, blocks = found.columns, found.blocks
    several = columns.turns > 1
    tokens_in, tokens_out = int(columns.input_tokens.sum()), int(columns.output_tokens.sum())
    seconds = (columns.time_ms - columns.time_ms[0]) / 1000
    span = float(seconds[-1])
    hit = blocks.within_tokens + blocks.across_tokens
    return Description(
        requests=len(columns.key),
        sessions=len(columns.sessions),
        multi_turn_sessions=float(several.mean()),
        multi_turn_requests=float(columns.turns[several].sum() / len(columns.key)),
        turns=spread(columns.turns),
        longest_session=int(columns.turns.max()),
        growth_per_turn=_growth(columns),
        input_tokens=spread(columns.input_tokens),
        output_tokens=spread(columns.output_tokens),
        prefill_share=tokens_in / (tokens_in + tokens_out),
        span_s=span,
        mean_rate=len(columns.key) / span if span else 0.0,
        peak_rate=peak_rate(seconds, BUCKET_S),
        bucket_s=BUCKET_S,
        blocks=blocks.occurrences,
        distinct_blocks=blocks.distinct,
        cross_session_share=blocks.cross_session / blocks.occurrences,
        repeated_share=blocks.repeated / blocks.occurrences,
        hit=hit / tokens_in,
        hit_within=blocks.within_tokens / tokens_in,
        hit_across=blocks.across_tokens / tokens_in,
        within_share_of_hits=blocks.within_tokens / hit if hit else 0.0,
        inconsistent_blocks=blocks.inconsistent,
    )


def peak_rate(seconds: npt.NDArray[np.float64], bucket_s: float) -> float:
    """Requests/s in the fullest bucket; ``seconds`` since the first request."""
    _, counts = np.unique((seconds // bucket_s).astype(np.int64), return_counts=True)
    return float(counts.max() / bucket_s)


def _growth(columns: Columns) -> float:
    order = np.argsort(columns.session, kind="stable")  # a session's requests stay in order
    same = np.diff(columns.session[order]) == 0
    return float(np.diff(columns.input_tokens[order])[same].mean()) if same.any() else 0.0


def _lengths(of: str, mean: str = ",.0f") -> str:
    tail = " / ".join(f"{{0.{of}.{p}:,.0f}}" for p in ("p50", "p90", "p99"))
    return f"{{0.{of}.mean:{mean}}} / {tail}"


ROWS = {
    "requests": "{0.requests:,}",
    "sessions": "{0.sessions:,}",
    "of several turns, sessions": "{0.multi_turn_sessions:.1%}",
    "of several turns, requests": "{0.multi_turn_requests:.1%}",
    "turns (mean / p50 / p90 / p99)": _lengths("turns", ".2f"),
    "turns, most": "{0.longest_session:,}",
    "growth per turn, tokens": "{0.growth_per_turn:,.0f}",
    "input tokens (mean / p50 / p90 / p99)": _lengths("input_tokens"),
    "output tokens (mean / p50 / p90 / p99)": _lengths("output_tokens"),
    "prefill share of tokens": "{0.prefill_share:.1%}",
    "span, s": "{0.span_s:,.0f}",
    "requests/s, mean": "{0.mean_rate:.2f}",
    "requests/s, peak": "{0.peak_rate:.2f} over {0.bucket_s:g} s",
    "block occurrences": "{0.blocks:,}",
    "blocks, distinct": "{0.distinct_blocks:,}",
    "shared by sessions": "{0.cross_session_share:.1%}",
    "repeated at all": "{0.repeated_share:.1%}",
    "hit of an infinite cache, tokens": "{0.hit:.1%}",
    "  within sessions": "{0.hit_within:.1%}",
    "  across sessions": "{0.hit_across:.1%}",
    "  within, of all hits": "{0.within_share_of_hits:.1%}",
}
"""Of a ``Description``."""


def print_table(traces: Mapping[str, Description]) -> None:
    """A column a trace; warns of traces whose ids do not stand for whole prefixes."""
    console = Console(width=None if Console().is_terminal else 120)
    rows = [[name, *map(cells.format, traces.values())] for name, cells in ROWS.items()]
    report.print_table("", ["", *traces], rows, console)
    for name, d in traces.items():
        if d.inconsistent_blocks:
            console.print(
                f"{name}: {d.inconsistent_blocks:,} blocks have more than one predecessor: their "
                "ids do not identify the whole prefix, and the shares above are too high"
            )
