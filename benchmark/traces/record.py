"""A trace in the format of Mooncake's authors (FAST 25): one JSON line a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

BLOCK_TOKENS = 512
"""Tokens of a block in the published traces."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request. A block's id stands for its tokens and all earlier ones, so that two prompts share
    exactly the leading blocks with equal ids."""

    timestamp: float
    """Arrival, ms from the start of the trace."""
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens of the answer."""
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    """One id a block; the last block may be partial."""
    session_id: str | None = None
    """Session of the request, if the trace names it."""
    turn: int | None = None
    """Position in the session, from 0."""


def blocks(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Return the number of blocks of a prompt, including a partial last one."""
    return -(-tokens // block_tokens)


def check(record: Record, block_tokens: int = BLOCK_TOKENS) -> None:
    """Raise ``ValueError`` if a record's ids do not cover its prompt, or it has no tokens."""
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
    """Yield the records of a file, in its order. Unknown fields are ignored.

    ``skipped``: receives an error text for each invalid line, which is then skipped. None: an
    invalid line is an error.

    Raises:
        ValueError: a line is not a record, its ids do not cover its prompt, or it arrives before
            the previous one; or the file has no record. The message names file and line.
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
    """Return one line if ``read`` has skipped lines, else none."""
    count, lines = len(skipped), "line was" if len(skipped) == 1 else "lines were"
    return [f"{count:,} invalid {lines} left out; the first: {skipped[0]}"] if skipped else []


def write(path: Path | str, records: Iterable[Record]) -> int:
    """Write a file that ``read`` reads. Return the number of records."""
    count = 0
    encoder = msgspec.json.Encoder()
    with open(path, "wb") as out:
        for record in records:
            out.write(encoder.encode(record) + b"\n")
            count += 1
    return count


def scaled(record: Record, block_tokens: int) -> Record:
    """Return the record with ``block_tokens`` tokens a block. Prompt and answer are scaled alike,
    to at least one token each. Blocks keep their ids, so that the sharing does not change."""
    full = len(record.hash_ids) - 1
    rest = record.input_length - full * BLOCK_TOKENS
    return msgspec.structs.replace(
        record,
        # Rounded up to at most one block, so that the number of blocks does not change.
        input_length=full * block_tokens + -(-rest * block_tokens // BLOCK_TOKENS),
        output_length=max(1, round(record.output_length * block_tokens / BLOCK_TOKENS)),
    )
