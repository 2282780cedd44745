"""Figures of a trace. Exact terms:

shared (cross-session)  share of block occurrences whose block is used by more than one session,
                        the first occurrence and repetitions within a session included
repeated                share of block occurrences whose block occurs more than once in the trace
hit                     share of input tokens in blocks that an earlier request had, which a prefix
                        cache without limits would hit; within: the session itself had used the
                        block before; across: only other sessions had
within share of hits    hits within, over all hits, in tokens
prefill share           input tokens, over input and output tokens
peak rate               requests/s in the fullest bucket of ``BUCKET_S``, counted from the first
                        request
growth per turn         mean increase of the prompt from one turn to the next
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from benchmark.harness import report
from benchmark.harness.report import Spread, spread
from benchmark.traces.sample import Survey

BUCKET_S = 10.0
Description = Mapping[str, int | float | Spread]


def describe(trace_survey: Survey) -> Description:
    """Return the figures: shares from 0 to 1, lengths in tokens, times in seconds."""
    requests, sessions, blocks = trace_survey.requests, trace_survey.sessions, trace_survey.blocks
    turns = sessions["turns"]
    several = turns[turns > 1]
    tokens_in, tokens_out = requests["input_tokens"], requests["output_tokens"]
    total_in, total_out = int(tokens_in.sum()), int(tokens_out.sum())
    hit = blocks["within_tokens"] + blocks["across_tokens"]
    growth = tokens_in.groupby(requests["session"]).diff().mean()
    seconds = (requests["time_ms"] - requests["time_ms"].iloc[0]) / 1000
    span = float(seconds.iloc[-1])
    return {
        "requests": len(requests),
        "sessions": len(sessions),
        "multi_turn_sessions": len(several) / len(sessions),
        "multi_turn_requests": float(several.sum() / len(requests)),
        "turns": spread(turns),
        "longest_session": int(turns.max()),
        "growth_per_turn": 0.0 if several.empty else float(growth),
        "input_tokens": spread(tokens_in),
        "output_tokens": spread(tokens_out),
        "prefill_share": total_in / (total_in + total_out),
        "span_s": span,
        "mean_rate": len(requests) / span if span else 0.0,
        "peak_rate": float((seconds // BUCKET_S).value_counts().max() / BUCKET_S),
        "bucket_s": BUCKET_S,
        "blocks": blocks["occurrences"],
        "distinct_blocks": blocks["distinct"],
        "cross_session_share": blocks["shared"] / blocks["occurrences"],
        "repeated_share": blocks["repeated"] / blocks["occurrences"],
        "hit": hit / total_in,
        "hit_within": blocks["within_tokens"] / total_in,
        "hit_across": blocks["across_tokens"] / total_in,
        "within_share_of_hits": blocks["within_tokens"] / hit if hit else 0.0,
        "inconsistent_blocks": blocks["inconsistent"],
    }


_LENGTHS = "{{0[{0}].mean:{1}}} / {{0[{0}].p50:,.0f}} / {{0[{0}].p90:,.0f}} / {{0[{0}].p99:,.0f}}"
ROWS = {
    "requests": "{0[requests]:,}",
    "sessions": "{0[sessions]:,}",
    "sessions of several turns": "{0[multi_turn_sessions]:.1%}",
    "requests of several-turn sessions": "{0[multi_turn_requests]:.1%}",
    "turns (mean / p50 / p90 / p99)": _LENGTHS.format("turns", ",.2f"),
    "turns, maximum": "{0[longest_session]:,}",
    "growth per turn, tokens": "{0[growth_per_turn]:,.0f}",
    "input tokens (mean / p50 / p90 / p99)": _LENGTHS.format("input_tokens", ",.0f"),
    "output tokens (mean / p50 / p90 / p99)": _LENGTHS.format("output_tokens", ",.0f"),
    "prefill share of tokens": "{0[prefill_share]:.1%}",
    "span, s": "{0[span_s]:,.0f}",
    "requests/s, mean": "{0[mean_rate]:.2f}",
    "requests/s, peak": "{0[peak_rate]:.2f} over {0[bucket_s]:g} s",
    "block occurrences": "{0[blocks]:,}",
    "blocks, distinct": "{0[distinct_blocks]:,}",
    "shared by sessions": "{0[cross_session_share]:.1%}",
    "repeated": "{0[repeated_share]:.1%}",
    "hit of an infinite cache, tokens": "{0[hit]:.1%}",
    "  within sessions": "{0[hit_within]:.1%}",
    "  across sessions": "{0[hit_across]:.1%}",
    "  within, of all hits": "{0[within_share_of_hits]:.1%}",
}
"""Label -> format of a cell, applied to a ``Description``."""


def print_table(traces: Mapping[str, Description]) -> None:
    """Print one column a trace; warn about traces whose ids do not identify whole prefixes."""
    console = Console(width=None if Console().is_terminal else 120)
    rows = [[name, *map(cells.format, traces.values())] for name, cells in ROWS.items()]
    report.print_table("", ["", *traces], rows, console)
    for name, d in traces.items():
        if d["inconsistent_blocks"]:
            console.print(
                f"{name}: {d['inconsistent_blocks']:,} blocks have more than one predecessor: "
                "their ids do not identify the whole prefix, and the shares above are too high"
            )
