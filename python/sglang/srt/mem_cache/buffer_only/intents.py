"""Pending writes: nodes for which the stage has no room yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from sglang.srt.mem_cache.buffer_only.marks import path_pieces

#: Why tokens were not written, or not yet: label values of the counter.
FULL, EVICTED, UNCOVERED, FLUSHED = "queue_full", "evicted", "parent_failed", "flushed"
#: The stage is full of what calls of the store that were given up may still use.
STUCK = "store_stuck"


class Intent:
    """One node that is to be written, with all that a split cuts off its front until then."""

    __slots__ = ("node", "serial", "tokens")

    def __init__(self, serial: int, node: Any, tokens: int) -> None:
        self.serial = serial
        #: The last node of the path that is to be written.
        self.node = node
        #: Tokens to write, up to the end of ``node``.
        self.tokens = tokens

    def pieces(self) -> list[Any]:
        """The nodes that the tokens lie in now, in the order of the prompt."""
        return [node for node, _ in path_pieces(self.node, self.tokens)][::-1]


class IntentQueue:
    """First in, first out; at most one intent a node; at most ``max_tokens`` tokens.

    Intents hold no lock: what is evicted while it waits is dropped. All that is dropped is counted
    in ``dropped``, in tokens by reason.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self.dropped: Counter[str] = Counter()
        self._queue: dict[int, Intent] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Intent]:
        return iter(list(self._queue.values()))

    def head(self) -> Intent | None:
        """The oldest intent."""
        return next(iter(self._queue.values()), None)

    def add(self, node: Any) -> bool:
        """Queue ``node``, which has no intent; False where the queue has no room for it."""
        tokens = len(node.key)
        if self.tokens + tokens > self.max_tokens:
            self.dropped[FULL] += tokens
            return False
        self._serial += 1
        node.intent = self._queue[self._serial] = Intent(self._serial, node, tokens)
        self.tokens += tokens
        return True

    def done(self, intent: Intent) -> None:
        """All of ``intent`` was launched."""
        self._remove(intent)

    def drop(self, intent: Intent, reason: str) -> None:
        """``intent`` will not be launched."""
        self.dropped[reason] += sum(map(_unlaunched, intent.pieces()))
        self._remove(intent)

    def deleted(self, node: Any) -> None:
        """``node``, a leaf, has left the tree; what a split made of its front may still be
        there."""
        intent = node.intent
        if intent is None:
            return
        lost = len(node.key)
        if intent.tokens <= lost:
            self.drop(intent, EVICTED)
            return
        node.intent = None
        self.dropped[EVICTED] += _unlaunched(node)
        self.tokens -= lost
        intent.node, intent.tokens = node.parent, intent.tokens - lost

    def clear(self, reason: str) -> None:
        """Drop everything."""
        for intent in self:
            self.drop(intent, reason)

    def _remove(self, intent: Intent) -> None:
        del self._queue[intent.serial]
        self.tokens -= intent.tokens
        for node in intent.pieces():
            node.intent = None


def _unlaunched(node: Any) -> int:
    return int(len(node.key) - node.launched)
