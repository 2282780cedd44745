"""A trace file, one record at a time: a long trace need not fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from benchmark.traces.record import BLOCK_TOKENS, Record, check


def read(path: Path | str, block_tokens: int = BLOCK_TOKENS) -> Iterator[Record]:
    """The records of a file of JSON lines, in its order. Unknown fields are ignored.

    Raises:
        ValueError: a line is no record, its ids do not cover its prompt, or it arrives before the
            line above it. The message names file and line.
    """
    decoder = msgspec.json.Decoder(Record)
    previous = float("-inf")
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = decoder.decode(line)
                check(record, block_tokens)
                if record.timestamp < previous:
                    raise ValueError(
                        f"timestamp {record.timestamp:g} is before that of the line above, "
                        f"{previous:g}"
                    )
            except ValueError as error:  # msgspec's errors are ValueErrors too
                raise ValueError(f"{path}, line {number}: {error}") from error
            previous = record.timestamp
            yield record


def write(path: Path | str, records: Iterable[Record]) -> int:
    """Write a file that ``read`` reads; returns the number of records."""
    count = 0
    encoder = msgspec.json.Encoder()
    with open(path, "wb") as out:
        for record in records:
            out.write(encoder.encode(record) + b"\n")
            count += 1
    return count
