"""A trace made smaller: fewer tokens a block, less time between requests, the same sharing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmark.traces.record import BLOCK_TOKENS, Record


@dataclass(frozen=True)
class Scale:
    """Blocks keep their ids, so that who shares what with whom does not change."""

    block_tokens: int = BLOCK_TOKENS
    """Tokens of a block afterwards."""
    speed: float = 1.0
    """Seconds of the trace that pass in a second."""
    from_tokens: int = BLOCK_TOKENS
    """Tokens of a block before."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.from_tokens < 1 or not self.speed > 0:
            raise ValueError(f"blocks must have tokens, and the speed be positive: {self}")

    def apply(self, record: Record) -> Record:
        """The record with prompt and answer scaled alike; each keeps at least one token."""
        full = len(record.hash_ids) - 1
        rest = record.input_length - full * self.from_tokens
        return Record(
            timestamp=record.timestamp / self.speed,
            # Rounded up and at most a block: the number of blocks stays what it is.
            input_length=full * self.block_tokens
            + -(-rest * self.block_tokens // self.from_tokens),
            output_length=max(
                1, round(record.output_length * self.block_tokens / self.from_tokens)
            ),
            hash_ids=record.hash_ids,
            session_id=record.session_id,
            turn=record.turn,
        )


@dataclass
class Fitting:
    """The records that a server can take; counts those that it cannot."""

    max_tokens: int
    """Prompt and answer together, at most."""
    left_out: int = 0

    def __call__(self, records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            if record.input_length + record.output_length <= self.max_tokens:
                yield record
            else:
                self.left_out += 1
