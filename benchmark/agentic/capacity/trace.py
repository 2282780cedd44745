"""What the closed forms ask of a trace: means, and what requests that run together share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmark.traces.record import BLOCK_TOKENS, Record
from benchmark.traces.sharing import endless_hit_rate


@dataclass(frozen=True)
class Facts:
    """A trace in a few numbers. Tokens."""

    requests: int
    requests_per_s: float
    prompt: float
    output: float
    longest: int
    """Prompt and answer."""
    endless_hit: float
    """Share of blocks that a cache without limits has seen before."""


def facts(records: Sequence[Record]) -> Facts:
    """Means over a trace.

    Raises:
        ValueError: no records.
    """
    if not records:
        raise ValueError("the trace has no records")
    count = len(records)
    seconds = (records[-1].timestamp - records[0].timestamp) / 1000
    return Facts(
        count,
        count / seconds if seconds else float("inf"),
        sum(r.input_length for r in records) / count,
        sum(r.output_length for r in records) / count,
        max(r.input_length + r.output_length for r in records),
        endless_hit_rate(records),
    )


def distinct_tokens(
    records: Sequence[Record], together: int, block_tokens: int = BLOCK_TOKENS
) -> float:
    """Tokens that ``together`` consecutive prompts take on average if each block is held once.

    Consecutive arrivals stand for the requests that run together on one decode worker.
    """
    if not 1 <= together <= len(records):
        raise ValueError(f"{together} requests together, of a trace of {len(records)}")
    windows, total = 0, 0.0
    for start in range(0, len(records) - together + 1, together):
        window = records[start : start + together]
        tails = sum(r.input_length % block_tokens for r in window)
        blocks = {b for r in window for b in r.hash_ids[: r.input_length // block_tokens]}
        total += tails + len(blocks) * block_tokens
        windows += 1
    return total / windows


def holds(
    records: Sequence[Record],
    pool: float,
    *,
    shared: bool,
    reserved: float = 0.0,
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """Requests of the trace that one decode pool holds on average, by bisection."""

    def taken(together: int) -> float:
        if not shared:
            return together * (sum(r.input_length for r in records) / len(records) + reserved)
        return distinct_tokens(records, together, block_tokens) + together * reserved

    low, high = 0, len(records)
    while low < high:
        middle = (low + high + 1) // 2
        if taken(middle) <= pool:
            low = middle
        else:
            high = middle - 1
    return low
