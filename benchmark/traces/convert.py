"""A trace from the requests of a log: lengths and shared blocks, and none of the text."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.traces.logs import Call, Message
from benchmark.traces.record import BLOCK_TOKENS, Record

TOKEN_BYTES = 4
"""Bytes of UTF-8 that count as a token without a tokenizer."""
Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Pace:
    """Times for a log without any."""

    sessions_per_s: float = 1.0
    """Rate at which sessions begin, at random times (Poisson)."""
    turn_s: float = 10.0
    """Time from one request of a session to the next."""


def by_bytes(text: str) -> Sequence[int]:
    """Return one number for every ``TOKEN_BYTES`` bytes, an approximation of tokens."""
    data = text.encode()
    return [
        int.from_bytes(data[i : i + TOKEN_BYTES], "big") for i in range(0, len(data), TOKEN_BYTES)
    ]


def tokenizer(path: Path) -> Tokenize:
    """Return a model's tokenizer, from ``tokenizer.json`` or its folder.

    Raises:
        ValueError: there is no such file, or it is no tokenizer.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--tokenizer: there is no {file}")
    loaded = Tokenizer.from_file(str(file))
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


class Blocks:
    """Numbers of blocks: equal for equal tokens behind equal tokens."""

    def __init__(self, tokenize: Tokenize) -> None:
        self._tokenize = tokenize
        self._ids: dict[bytes, int] = {}

    def of(self, messages: Sequence[Message]) -> tuple[int, tuple[int, ...]]:
        """Return the tokens of a prompt, and the number of each block."""
        tokens = array("Q")
        for message in messages:
            # Tokens of a message must not depend on the next one, as with a chat template.
            tokens.extend(self._tokenize(f"<|{message.role}|>\n{message.text}\n"))
        ids, digest = [], b""
        for begin in range(0, len(tokens), BLOCK_TOKENS):
            block = tokens[begin : begin + BLOCK_TOKENS].tobytes()
            digest = hashlib.blake2b(digest + block, digest_size=16).digest()
            ids.append(self._ids.setdefault(digest, len(self._ids)))
        return len(tokens), tuple(ids)

    def tokens(self, text: str) -> int:
        return max(1, len(self._tokenize(text)))


def records(
    calls: Sequence[Call],
    tokenize: Tokenize = by_bytes,
    pace: Pace = Pace(),  # noqa: B008
    answer_tokens: int | None = None,
) -> list[Record]:
    """Return the record of each call, with times from 0.

    ``answer_tokens``: length of answers that the log does not have.

    Raises:
        ValueError: such an answer, without ``answer_tokens``; or some calls have a time and some
            have none.
    """
    blocks, times = Blocks(tokenize), list(_times(calls, pace))
    began = min(times)
    made = []
    for call, time_s in zip(calls, times, strict=True):
        wanted = call.answer_tokens or answer_tokens
        if call.answer is not None and not call.answer_tokens:
            wanted = blocks.tokens(call.answer)
        if not wanted:
            raise ValueError("a request has no answer: give --answers, or --answer-tokens")
        tokens, ids = blocks.of(call.messages)
        at_ms = round((time_s - began) * 1000, 3)
        made.append(Record(at_ms, tokens, wanted, ids, call.session, call.turn))
    return made


def invented(
    calls: Sequence[Call], pace: Pace, answer_tokens: int | None, *, counted: bool
) -> list[str]:
    """Return a line for each field of the trace that the log does not have, with the number of
    requests and the option that sets it. ``counted``: a tokenizer has counted the tokens."""
    begun = sum(call.time_s is None and not call.turn for call in calls)
    later = sum(call.time_s is None and bool(call.turn) for call in calls)
    unlogged = [call for call in calls if not call.answer_tokens]
    unknown = sum(call.answer is None for call in unlogged)
    by_field = [
        (begun, f"timestamp, sessions begin at random: --sessions-per-s {pace.sessions_per_s:g}"),
        (later, f"timestamp, after the turn before: --turn-s {pace.turn_s:g}"),
        (unknown, f"output_length: --answer-tokens {answer_tokens}"),
    ]
    if not counted:
        estimated = f"{TOKEN_BYTES} bytes are a token; --tokenizer counts"
        by_field += [
            (len(calls), f"input_length, {estimated}"),
            (len(unlogged) - unknown, f"output_length, {estimated}"),
        ]
    return [
        f"invented for {count:,} of {len(calls):,} requests: {text}"
        for count, text in by_field
        if count
    ]


def _times(calls: Sequence[Call], pace: Pace) -> Iterator[float]:
    """Yield a time for each call: its own; that of its session's earlier turn and ``turn_s``; or,
    if no session has a time, a random one."""
    firsts = [call for call in calls if not call.turn]
    timed = sum(call.time_s is not None for call in firsts)
    if timed not in (0, len(firsts)):
        raise ValueError(f"{timed} of {len(firsts)} requests or conversations have a time")
    rng, now, due = random.Random(0), 0.0, 0.0
    for call in calls:
        if call.time_s is not None:
            due = call.time_s
        elif call.turn:
            due += pace.turn_s
        else:
            now += rng.expovariate(pace.sessions_per_s)
            due = now
        yield due
