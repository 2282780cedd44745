"""A trace in the format that Mooncake's authors published (FAST 25): a JSON line a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

BLOCK_TOKENS = 512
"""Tokens of a block in the published traces."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request. A block's id stands for its tokens and for all those before it, so that two
    prompts share exactly the leading blocks whose ids are equal."""

    timestamp: float
    """Arrival, ms from the start of the trace."""
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens that were generated."""
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    """A block each; the last one may hold fewer tokens than a block has."""
    session_id: str | None = None
    """Session that the request belongs to, where the trace says so."""
    turn: int | None = None
    """Its place in the session, from 0."""


def blocks(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks of a prompt, the last one perhaps not full."""
    return -(-tokens // block_tokens)


def check(record: Record, block_tokens: int = BLOCK_TOKENS) -> None:
    """Raise ``ValueError`` for a record whose ids do not cover its prompt, or without tokens."""
    if record.input_length < 1 or record.output_length < 1:
        raise ValueError(
            f"input_length {record.input_length} and output_length {record.output_length} must "
            "be 1 or more"
        )
    expected = blocks(record.input_length, block_tokens)
    if len(record.hash_ids) != expected:
        raise ValueError(
            f"{record.input_length} tokens are {expected} blocks of {block_tokens}, but there "
            f"are {len(record.hash_ids)} hash_ids"
        )


def read(path: Path | str, skipped: list[str] | None = None) -> Iterator[Record]:
    """The records of a file, in its order, one at a time. Unknown fields are ignored.

    ``skipped``: gets what is wrong with each line that is left out. Without it such a line is an
    error.

    Raises:
        ValueError: a line is no record, its ids do not cover its prompt, or it arrives before the
            line above it; or the file has no record. The message names file and line.
    """
    decoder = msgspec.json.Decoder(Record)
    previous = float("-inf")
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = decoder.decode(line)
                check(record)
                if record.timestamp < previous:
                    raise ValueError(
                        f"timestamp {record.timestamp:g} is before that of the line above, "
                        f"{previous:g}"
                    )
            except ValueError as error:  # msgspec's errors are ValueErrors too
                text = f"{path}, line {number}: {error}"
                if skipped is None:
                    raise ValueError(text) from error
                skipped.append(text)
                continue
            previous = record.timestamp
            yield record
    if previous == float("-inf"):
        raise ValueError("; ".join([f"{path} has no requests", *(skipped or ())[:1]]))


def left_out(skipped: list[str]) -> list[str]:
    """One line where ``read`` has skipped any."""
    count, lines = len(skipped), "line was" if len(skipped) == 1 else "lines were"
    return [f"{count:,} invalid {lines} left out; the first: {skipped[0]}"] if skipped else []


def write(path: Path | str, records: Iterable[Record]) -> int:
    """Write a file that ``read`` reads; returns the number of records."""
    count = 0
    encoder = msgspec.json.Encoder()
    with open(path, "wb") as out:
        for record in records:
            out.write(encoder.encode(record) + b"\n")
            count += 1
    return count


def scaled(record: Record, block_tokens: int) -> Record:
    """The record with ``block_tokens`` tokens a block, prompt and answer scaled alike, each with
    one token at least. Blocks keep their ids, so that who shares what with whom does not change.
    """
    full = len(record.hash_ids) - 1
    rest = record.input_length - full * BLOCK_TOKENS
    return msgspec.structs.replace(
        record,
        # Rounded up and at most a block: the number of blocks stays what it is.
        input_length=full * block_tokens + -(-rest * block_tokens // BLOCK_TOKENS),
        output_length=max(1, round(record.output_length * block_tokens / BLOCK_TOKENS)),
    )
