"""What requests have in common: sessions of a trace that does not name them, from its hash ids
alone, and what a cache without limits would hit.

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
from itertools import count
from typing import TypeVar

import msgspec

from benchmark.traces.record import BLOCK_TOKENS, Record

REMEMBERED = 1_000_000
"""Blocks and sessions that ``annotate`` remembers, each: some hundred MB at most."""

_SHARED = -1

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """A dictionary of at most ``entries`` keys, those that were used last."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.entries = max(1, entries)

    def use(self, key: K) -> V | None:
        """Its value, where it is known."""
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def note(self, key: K, value: V) -> None:
        """Its value from now on."""
        self[key] = value
        self.move_to_end(key)
        while len(self) > self.entries:
            self.popitem(last=False)


def annotate(records: Iterable[Record], block_tokens: int = BLOCK_TOKENS) -> Iterator[Record]:
    """Every record with ``session_id`` and ``turn``, in the same order.

    A record that names its session keeps it; without a turn it gets the next one of its session.
    The others get ``derived-`` and a number, by the rule above. Streaming, and the same input gives
    the same output. What was unused for longest is forgotten beyond ``REMEMBERED``; a session that
    goes on after that is a new one.

    ``block_tokens``: tokens of a block in these records.
    """
    turns: Recent[str, int] = Recent(REMEMBERED)
    derived = _Derived()
    for record in records:
        name, turn = record.session_id, record.turn
        if name is None:
            full = record.hash_ids[: record.input_length // block_tokens]
            name, turn = f"derived-{derived.session(full, record.input_length)}", None
        if turn is None:
            turn = turns.use(name) or 0
        turns.note(name, turn + 1)
        yield msgspec.structs.replace(record, session_id=name, turn=turn)


class _Derived:
    """Who uses which block, and which session's latest prompt ended where."""

    def __init__(self) -> None:
        self._user: Recent[int, int] = Recent(REMEMBERED)  # session's number, or _SHARED
        # By the last full block of a session's latest prompt, unless shared: number and tokens.
        self._ended: Recent[int, tuple[int, int]] = Recent(REMEMBERED)
        self._numbers = count()

    def session(self, full: tuple[int, ...], tokens: int) -> int:
        """The number of the session of a prompt with these full blocks, from 0."""
        depth = next((n for n in range(len(full), 0, -1) if full[n - 1] in self._ended), 0)
        number, before = self._ended[full[depth - 1]] if depth else (_SHARED, tokens + 1)
        if tokens >= before:
            del self._ended[full[depth - 1]]
        else:
            number, depth = next(self._numbers), 0
        for block in full[depth:]:
            user = self._user.use(block)
            if user is None:
                self._user.note(block, number)
            elif user != number:
                self._user.note(block, _SHARED)
                self._ended.pop(block, None)  # it no longer tells who goes on
        if full and self._user.get(full[-1]) == number:
            self._ended.note(full[-1], (number, tokens))
        return number


class EndlessCache:
    """Has seen every block of the records that it was asked about so far."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def hits(self, record: Record) -> int:
        """Leading blocks that earlier records had: behind a miss, a cache of prefixes has none."""
        ids = record.hash_ids
        found = next((i for i, block in enumerate(ids) if block not in self._seen), len(ids))
        self._seen.update(ids[found:])
        return found
