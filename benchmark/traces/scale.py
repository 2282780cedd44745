"""A trace made smaller: fewer tokens a block, less time between requests, the same sharing."""

from __future__ import annotations

import msgspec

from benchmark.traces.record import BLOCK_TOKENS, Record


def scaled(record: Record, block_tokens: int, speed: float = 1.0) -> Record:
    """The record with ``block_tokens`` tokens a block, prompt and answer scaled alike, each with
    one token at least; ``speed``: seconds of the trace in a second. Blocks keep their ids, so
    that who shares what with whom does not change.

    Raises:
        ValueError: blocks without tokens, or a speed of 0 or less.
    """
    if block_tokens < 1 or not speed > 0:
        raise ValueError(f"blocks must have tokens, and the speed be positive: {speed:g}")
    full = len(record.hash_ids) - 1
    rest = record.input_length - full * BLOCK_TOKENS
    return msgspec.structs.replace(
        record,
        timestamp=record.timestamp / speed,
        # Rounded up and at most a block: the number of blocks stays what it is.
        input_length=full * block_tokens + -(-rest * block_tokens // BLOCK_TOKENS),
        output_length=max(1, round(record.output_length * block_tokens / BLOCK_TOKENS)),
    )


def fits(record: Record, tokens: int) -> bool:
    """Whether prompt and answer together have at most ``tokens``."""
    return record.input_length + record.output_length <= tokens
