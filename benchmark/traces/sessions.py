"""Sessions of a trace that does not name them, from its hash ids alone.

A prompt that continues a session begins with the whole earlier prompt, so that the earlier
prompt's full blocks lead it. (The last block of the earlier prompt may be partial; with the answer
behind it, it is another block and has another id.) An id stands for its block and all before it, so
that one id, that of the earlier prompt's last full block, says whether they do.

Two sessions that begin with the same instruction share ids too and are still two. Hence the
rule: **a request continues the session whose latest prompt ended, in full blocks, in a block
of the request's own prompt, if no other session has used that block, and if the request's
prompt is no shorter than the one it continues.** A block that two sessions use never tells who
goes on. At most one session fits a prompt, since whoever uses a block uses those before it.

What follows from the rule, and cannot be told from ids alone:

- A session is not recognized while its full blocks are all shared, as that of a short question
  behind a common instruction: each such request is a session of its own.
- Until a second session has shown that an instruction is shared, a prompt that ends within it
  looks like the first turn of the next one.
- A session that forks goes on with the first branch; the other ones are new sessions.
- A prompt that is sent again, word for word, is the next turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from benchmark.traces.record import BLOCK_TOKENS, Record

REMEMBERED = 1_000_000
"""Blocks and conversations that ``annotate`` remembers, each: some hundred MB at most."""

_SHARED = -1

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """A dictionary of at most ``entries`` keys, those that were used last."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self._entries = max(1, entries)

    def use(self, key: K) -> V | None:
        """Its value, where it is known."""
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def note(self, key: K, value: V) -> None:
        """Its value from now on."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._entries:
            self.popitem(last=False)


class _Conversation:
    """Its number, its next turn, and how far its latest prompt went."""

    __slots__ = ("number", "turn", "tokens", "end")

    def __init__(self, number: int) -> None:
        self.number = number
        self.turn = 0
        self.tokens = 0
        self.end: int | None = None


def annotate(
    records: Iterable[Record],
    block_tokens: int = BLOCK_TOKENS,
    prefix: str = "derived-",
    remember: int = REMEMBERED,
) -> Iterator[Record]:
    """Every record with ``session_id`` and ``turn``, in the same order.

    A record that names its session keeps it; without a turn it gets the next one of its session.
    The others get ``prefix`` and a number, by the rule above. Streaming, and the same input gives
    the same output.

    ``block_tokens``: tokens of a block in these records. ``remember``: how many blocks, and how
    many sessions, may be remembered; what was unused for longest is forgotten first, and then
    a session that goes on is a new one. This bounds the memory whatever the trace's length.
    """
    blocks = _Blocks(block_tokens, remember)
    turns: Recent[str, int] = Recent(remember)
    for record in records:
        if record.session_id is not None:
            turn = record.turn if record.turn is not None else turns.use(record.session_id) or 0
            turns.note(record.session_id, turn + 1)
            yield record if turn == record.turn else msgspec.structs.replace(record, turn=turn)
        else:
            conversation = blocks.conversation(record)
            yield msgspec.structs.replace(
                record, session_id=f"{prefix}{conversation.number}", turn=conversation.turn
            )
            conversation.turn += 1


class _Blocks:
    """Who uses which block, and which session's latest prompt ended where."""

    def __init__(self, block_tokens: int, remember: int) -> None:
        self._block_tokens = block_tokens
        self._user: Recent[int, int] = Recent(remember)  # session's number, or _SHARED
        self._ended: Recent[int, _Conversation] = Recent(remember)  # by last full block, unshared
        self._begun = 0

    def conversation(self, record: Record) -> _Conversation:
        full = record.hash_ids[: record.input_length // self._block_tokens]
        found, depth = self._continued(full, record.input_length)
        if found is None:
            found = _Conversation(self._begun)
            self._begun += 1
        self._use(full[depth:], found.number)
        if found.end is not None:
            self._ended.pop(found.end, None)
        found.tokens = record.input_length
        found.end = full[-1] if full and self._user.use(full[-1]) == found.number else None
        if found.end is not None:
            self._ended.note(found.end, found)
        return found

    def _continued(self, full: tuple[int, ...], tokens: int) -> tuple[_Conversation | None, int]:
        """The session that goes on, and how many blocks it is known to use."""
        for depth in range(len(full), 0, -1):
            found = self._ended.use(full[depth - 1])
            if found is not None:
                return (found, depth) if tokens >= found.tokens else (None, 0)
        return None, 0

    def _use(self, ids: tuple[int, ...], number: int) -> None:
        for block in ids:
            user = self._user.use(block)
            if user is None:
                self._user.note(block, number)
            elif user not in (number, _SHARED):
                self._user.note(block, _SHARED)
                ended = self._ended.use(block)
                if ended is not None:  # it no longer tells who goes on
                    ended.end = None
                    self._ended.pop(block, None)
