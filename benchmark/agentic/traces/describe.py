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

from collections.abc import Callable, Mapping
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


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _lengths(value: Spread, mean: str = ",.0f") -> str:
    tail = " / ".join(_whole(each) for each in (value.p50, value.p90, value.p99))
    return f"{value.mean:{mean}} / {tail}"


ROWS: dict[str, Callable[[Description], str]] = {
    "requests": lambda d: _whole(d.requests),
    "sessions": lambda d: _whole(d.sessions),
    "of several turns, sessions": lambda d: _share(d.multi_turn_sessions),
    "of several turns, requests": lambda d: _share(d.multi_turn_requests),
    "turns (mean / p50 / p90 / p99)": lambda d: _lengths(d.turns, ".2f"),
    "turns, most": lambda d: _whole(d.longest_session),
    "growth per turn, tokens": lambda d: _whole(d.growth_per_turn),
    "input tokens (mean / p50 / p90 / p99)": lambda d: _lengths(d.input_tokens),
    "output tokens (mean / p50 / p90 / p99)": lambda d: _lengths(d.output_tokens),
    "prefill share of tokens": lambda d: _share(d.prefill_share),
    "span, s": lambda d: _whole(d.span_s),
    "requests/s, mean": lambda d: f"{d.mean_rate:.2f}",
    "requests/s, peak": lambda d: f"{d.peak_rate:.2f} over {d.bucket_s:g} s",
    "block occurrences": lambda d: _whole(d.blocks),
    "blocks, distinct": lambda d: _whole(d.distinct_blocks),
    "shared by sessions": lambda d: _share(d.cross_session_share),
    "repeated at all": lambda d: _share(d.repeated_share),
    "hit of an infinite cache, tokens": lambda d: _share(d.hit),
    "  within sessions": lambda d: _share(d.hit_within),
    "  across sessions": lambda d: _share(d.hit_across),
    "  within, of all hits": lambda d: _share(d.within_share_of_hits),
}


def print_table(traces: Mapping[str, Description]) -> None:
    """A column a trace; warns of traces whose ids do not stand for whole prefixes."""
    console = Console(width=None if Console().is_terminal else 120)
    rows = [[name, *map(cell, traces.values())] for name, cell in ROWS.items()]
    report.print_table("", ["", *traces], rows, console)
    for name, d in traces.items():
        if d.inconsistent_blocks:
            console.print(
                f"{name}: {d.inconsistent_blocks:,} blocks follow other blocks than before; their "
                "ids do not stand for the whole prefix, and the shares above are too high"
            )
