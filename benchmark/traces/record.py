"""One request of a trace in the format that Mooncake's authors published (FAST 25)."""

from __future__ import annotations

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
    hash_ids: tuple[int, ...]
    """A block each; the last one may hold fewer tokens than a block has."""
    session_id: str | None = None
    """Conversation that the request belongs to, where the trace says so."""
    turn: int | None = None
    """Its place in the conversation, from 0."""


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
