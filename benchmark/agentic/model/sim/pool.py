"""The KV of one worker: tokens that belong to a request, and blocks that requests share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Pool:
    """Blocks are known by ids that stand for all tokens up to their end, so a set of ids is a tree.

    Whoever locks a block locks all before it, and unlocks them from the end, so that the oldest
    idle block never has another one behind it: eviction by age never cuts a chain.

    ``index``: for all pools of a role, which of them hold a block, as bits; ``bit`` is ours.
    """

    def __init__(
        self, capacity: int, block_tokens: int, index: dict[int, int] | None = None, bit: int = 0
    ) -> None:
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.private = 0
        self._locked: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._index = {} if index is None else index
        self._bit = 1 << bit

    @property
    def available(self) -> int:
        """Tokens that are free or can be evicted."""
        return self.capacity - self.in_use

    @property
    def in_use(self) -> int:
        """Tokens of requests: their own, and blocks that they hold."""
        return self.private + len(self._locked) * self.block_tokens

    @property
    def free(self) -> int:
        """Tokens that nothing is in."""
        return self.available - len(self._idle) * self.block_tokens

    def match(self, blocks: Sequence[int]) -> int:
        """Leading blocks that are here."""
        locked, idle = self._locked, self._idle
        for i, block in enumerate(blocks):
            if block not in locked and block not in idle:
                return i
        return len(blocks)

    def lock(self, blocks: Sequence[int]) -> None:
        """Blocks that are here, from the prompt's start; they stay until unlocked."""
        locked, idle = self._locked, self._idle
        for block in blocks:
            if block in locked:
                locked[block] += 1
            else:
                del idle[block]
                locked[block] = 1

    def unlock(self, blocks: Sequence[int]) -> None:
        """Undo one ``lock`` or ``commit`` of the same blocks."""
        locked = self._locked
        for block in reversed(blocks):
            if locked[block] > 1:
                locked[block] -= 1
            else:
                del locked[block]
                self._idle[block] = None

    def allocate(self, tokens: int) -> bool:
        """Private tokens, evicting what is missing; False, and nothing changed, if too many."""
        if tokens > self.available:
            return False
        missing = tokens - self.free
        while missing > 0:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            missing -= self.block_tokens
        self.private += tokens
        return True

    def release(self, tokens: int) -> None:
        """Give private tokens back."""
        if tokens > self.private:
            raise RuntimeError(f"{tokens} tokens given back, {self.private} are held")
        self.private -= tokens

    def commit(self, blocks: Sequence[int]) -> None:
        """Private tokens become these blocks, locked; those that are here already are dropped."""
        locked, idle = self._locked, self._idle
        self.release(len(blocks) * self.block_tokens)
        for block in blocks:
            if block in locked:
                locked[block] += 1
                continue
            if block in idle:
                del idle[block]
            else:
                self._index[block] = self._index.get(block, 0) | self._bit
            locked[block] = 1

    def _forget(self, block: int) -> None:
        holders = self._index[block] & ~self._bit
        if holders:
            self._index[block] = holders
        else:
            del self._index[block]

    def check(self) -> None:
        """Raise ``AssertionError`` where the pool contradicts itself."""
        assert self.private >= 0 and self.free >= 0, (self.private, self.free, self.capacity)
        assert all(count > 0 for count in self._locked.values())
        assert not self._locked.keys() & self._idle.keys()
        for block in (*self._locked, *self._idle):
            assert self._index[block] & self._bit, f"block {block} is not in the index"

    @property
    def locks(self) -> int:
        """Holds on blocks, over all requests."""
        return sum(self._locked.values())
