"""Figures of a trace.

    python -m benchmark.agentic describe FILE [--json OUT] [--bucket-seconds N] [--block-tokens N]

Terms, exact:

shared (cross-session)  share of block occurrences whose block is used by more than one session,
                        the first occurrence and repetitions within a session included
repeated                share of block occurrences whose block occurs more than once at all
hit                     share of input tokens in blocks that an earlier request had, which is what
                        one prefix cache without limits would hit; within: the session itself had
                        used the block before; across: only other sessions had
within share of hits    the tokens within, of all tokens hit
prefill share           input tokens, of input and output tokens
peak rate               requests in the fullest bucket of ``--bucket-seconds``, counted from the
                        first request, by the bucket's length
growth per turn         how much longer a prompt is than that of the turn before, mean
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmark.agentic.sample.blocks import BlockFigures
from benchmark.agentic.sample.columns import Columns
from benchmark.agentic.sample.command import Source, positive, reporting, whole
from benchmark.agentic.sample.survey import Survey
from benchmark.traces.record import BLOCK_TOKENS

BUCKET_S = 10.0


@dataclass(frozen=True)
class Lengths:
    """Of a quantity, interpolated percentiles."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Description:
    """Shares are 0 to 1, lengths in tokens, times in seconds; the terms are the module's."""

    requests: int
    sessions: int
    multi_turn_sessions: float
    multi_turn_requests: float
    turns: Lengths
    longest_session: int
    growth_per_turn: float
    input_tokens: Lengths
    output_tokens: Lengths
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


def describe(found: Survey, bucket_s: float = BUCKET_S) -> Description:
    columns, blocks = found.columns, found.blocks
    several = columns.turns > 1
    tokens_in = int(columns.input_tokens.sum(dtype=np.int64))
    tokens_out = int(columns.output_tokens.sum(dtype=np.int64))
    seconds = (columns.time_ms - columns.time_ms[0]) / 1000
    span = float(seconds[-1])
    hit = blocks.within_tokens + blocks.across_tokens
    return Description(
        requests=len(columns.key),
        sessions=len(columns.sessions),
        multi_turn_sessions=float(several.mean()),
        multi_turn_requests=float(columns.turns[several].sum() / len(columns.key)),
        turns=_lengths(columns.turns),
        longest_session=int(columns.turns.max()),
        growth_per_turn=_growth(columns),
        input_tokens=_lengths(columns.input_tokens),
        output_tokens=_lengths(columns.output_tokens),
        prefill_share=tokens_in / (tokens_in + tokens_out),
        span_s=span,
        mean_rate=len(columns.key) / span if span else 0.0,
        peak_rate=peak_rate(seconds, bucket_s),
        bucket_s=bucket_s,
        blocks=blocks.occurrences,
        distinct_blocks=blocks.distinct,
        hit=hit / tokens_in,
        hit_within=blocks.within_tokens / tokens_in,
        hit_across=blocks.across_tokens / tokens_in,
        within_share_of_hits=blocks.within_tokens / hit if hit else 0.0,
        inconsistent_blocks=blocks.inconsistent,
        **_shares(blocks),
    )


def peak_rate(seconds: npt.NDArray[np.float64], bucket_s: float) -> float:
    """Requests/s in the fullest bucket; ``seconds`` since the first request."""
    _, counts = np.unique((seconds // bucket_s).astype(np.int64), return_counts=True)
    return float(counts.max() / bucket_s)


def _shares(blocks: BlockFigures) -> dict[str, float]:
    return {
        "cross_session_share": blocks.cross_session / blocks.occurrences,
        "repeated_share": blocks.repeated / blocks.occurrences,
    }


def _lengths(values: npt.NDArray[np.integer[Any]]) -> Lengths:
    return Lengths(float(values.mean()), *(float(p) for p in np.percentile(values, (50, 90, 99))))


def _growth(columns: Columns) -> float:
    order = np.argsort(columns.session, kind="stable")  # a session's requests stay in order
    tokens = columns.input_tokens[order].astype(np.int64)
    same = np.diff(columns.session[order]) == 0
    return float(np.diff(tokens)[same].mean()) if same.any() else 0.0


def main(argv: list[str]) -> int:
    from benchmark.agentic.sample.table import print_table, write_json  # it shows descriptions

    parser = argparse.ArgumentParser(
        prog="python -m benchmark.agentic describe", description="What a trace holds."
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument(
        "--bucket-seconds", type=positive, default=BUCKET_S, help="of the peak rate"
    )
    parser.add_argument("--block-tokens", type=whole, default=BLOCK_TOKENS, help="of the trace")
    args = parser.parse_args(argv)
    with reporting():
        source = Source(args.file, args.block_tokens)
        description = describe(source.survey(), args.bucket_seconds)
        print_table({args.file.name: description})
        if args.json:
            write_json(args.json, {"trace": asdict(description)})
    return 0
