"""A trace file, one record at a time: a long trace need not fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from benchmark.traces.invalid import Invalid
from benchmark.traces.record import BLOCK_TOKENS, Record, check


def read(
    path: Path | str, block_tokens: int = BLOCK_TOKENS, invalid: Invalid | None = None
) -> Iterator[Record]:
    """The records of a file of JSON lines, in its order. Unknown fields are ignored.

    ``invalid``: counts the lines that are left out.

    Raises:
        ValueError: a line is no record, its ids do not cover its prompt, or it arrives before the
            line above it, and ``invalid`` does not leave it out. The message names file and line.
    """
    invalid = invalid or Invalid()
    decoder = msgspec.json.Decoder(Record)
    previous = float("-inf")
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            with invalid.at(path, f"line {number}"):
                record = decoder.decode(line)
                check(record, block_tokens)
                if record.timestamp < previous:
                    raise ValueError(
                        f"timestamp {record.timestamp:g} is before that of the line above, "
                        f"{previous:g}"
                    )
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
