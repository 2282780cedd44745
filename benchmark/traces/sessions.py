"""Relations between requests: sessions derived from hash ids, if a trace names none, and the hits
of a cache without limits.

A prompt that continues a session begins with the whole earlier prompt, so the earlier prompt's full
blocks are its first blocks. (The last block of the earlier prompt may be partial; with the answer
behind it, it is another block with another id.) An id identifies its block and all blocks before
it, so it is enough to compare one id: that of the earlier prompt's last full block.

Two sessions that begin with the same instruction also share ids, but are two sessions. Hence the
rule: **a request continues the session whose latest prompt ended, in full blocks, in a block
of the request's own prompt, if no other session has used that block, and if the request's
prompt is no shorter than the one it continues.** A block that two sessions use never identifies a
session. At most one session fits a prompt, since a session that uses a block uses all earlier ones.

Consequences of the rule, where ids alone are ambiguous:

- A session is not recognized while all its full blocks are shared, for example a short question
  behind a common instruction: each such request is a session.
- Until a second session shares an instruction, a prompt that ends within it looks like the first
  turn of the next one.
- A session that forks continues with the first branch; the other branches are new sessions.
- A prompt that is sent again unchanged is the next turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import count
from typing import TypeVar

import msgspec

from benchmark.traces.record import BLOCK_TOKENS, Record

MAX_REMEMBERED = 1_000_000
"""Maximum number of blocks, and of sessions, that ``annotate`` remembers: some hundred MB."""

_SHARED = -1

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """A dictionary of at most ``entries`` keys; the least recently used ones are removed."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.entries = max(1, entries)

    def use(self, key: K) -> V | None:
        """Return the key's value, or None, and count it as used."""
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def note(self, key: K, value: V) -> None:
        """Set the key's value, as the most recently used one."""
        self[key] = value
        self.move_to_end(key)
        while len(self) > self.entries:
            self.popitem(last=False)


def annotate(records: Iterable[Record], block_tokens: int = BLOCK_TOKENS) -> Iterator[Record]:
    """Yield every record with ``session_id`` and ``turn``, in the same order.

    A record that names its session keeps it; if it has no turn, it gets the next one of its
    session. Other records get ``derived-`` and a number, by the rule above. The function streams,
    and the same input gives the same output. It remembers ``MAX_REMEMBERED`` blocks and sessions,
    the last used; a session that continues after it was forgotten is a new one.

    ``block_tokens``: tokens of a block in these records.
    """
    turns: Recent[str, int] = Recent(MAX_REMEMBERED)
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
    """The session of each block, and the block in which each session's latest prompt ended."""

    def __init__(self) -> None:
        #: Block -> number of its session, or _SHARED.
        self._user: Recent[int, int] = Recent(MAX_REMEMBERED)
        #: Last full block of a session's latest prompt, unless shared -> session's number, tokens.
        self._ended: Recent[int, tuple[int, int]] = Recent(MAX_REMEMBERED)
        self._numbers = count()

    def session(self, full: tuple[int, ...], tokens: int) -> int:
        """Return the session's number, from 0, of a prompt with these full blocks."""
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
                self._ended.pop(block, None)  # a shared block no longer identifies a session
        if full and self._user.get(full[-1]) == number:
            self._ended.note(full[-1], (number, tokens))
        return number


class EndlessCache:
    """A cache that keeps every block of the records that it was queried for."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def hits(self, record: Record) -> int:
        """Return the number of leading blocks that earlier records had, up to the first miss."""
        ids = record.hash_ids
        hits = next((i for i, block in enumerate(ids) if block not in self._seen), len(ids))
        self._seen.update(ids[hits:])
        return hits
