"""Which prompts a worker holds: hashes of their leading blocks, the least recently used forgotten.

A block's hash covers all blocks before it, so a prompt's chain of hashes is its path through the
worker's radix tree. The hashes are Python's own, which differ from process to process; they never
leave the router.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

TEXT_TOKEN_BYTES = 4
"""Text counts as one token for so many bytes, which is near what tokenizers make of English; scores
compare workers for one prompt, so the ratio hardly matters."""


def token_blocks(ids: bytes, block_tokens: int) -> tuple[int, list[int]]:
    """How many token ids there are, and where each whole block of them ends.

    ``ids``: decimals with a comma behind each, as they stand in the request. Making integers of
    them takes longer than all the rest of routing.
    """
    ends = np.flatnonzero(np.frombuffer(ids, np.uint8) == ord(",")) + 1
    return len(ends), ends[block_tokens - 1 :: block_tokens].tolist()


def text_blocks(text: bytes, block_tokens: int) -> tuple[int, Sequence[int]]:
    """The same for text, as if its tokens were all of one length."""
    size = block_tokens * TEXT_TOKEN_BYTES
    return -(-len(text) // TEXT_TOKEN_BYTES), range(size, len(text) + 1, size)


def chain(data: bytes, ends: Sequence[int], parent: int) -> tuple[int, ...]:
    """Hashes of the blocks of ``data`` that end there; a last partial block is left out.

    Args:
        parent: stands for what keeps prompts of equal tokens apart (adapter, ``extra_key``).
    """
    hashes = []
    start = 0
    for end in ends:
        parent = hash((parent, data[start:end]))
        hashes.append(parent)
        start = end
    return tuple(hashes)


class PrefixIndex:
    """The blocks that one worker is believed to hold, at most ``capacity_blocks``.

    A block is never older than those behind it, so the end of the least recently used prompt goes
    first, as in a radix tree. Each block has a number and knows its predecessor's: once a block is
    forgotten, those behind it are not matched any more, even when it is learned again.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Sequence[int]) -> int:
        """How many leading blocks are held. Changes nothing: most candidates are not chosen."""
        before = 0
        for count, block in enumerate(hashes):
            entry = self._blocks.get(block)
            if entry is None or entry[1] != before:
                return count
            before = entry[0]
        return len(hashes)

    def learn(self, hashes: Sequence[int]) -> None:
        """The worker holds this prompt now, and used it last."""
        hashes = hashes[: self.capacity_blocks]
        before = 0
        for block in hashes:
            entry = self._blocks.get(block)
            if entry is None or entry[1] != before:
                self._last_number += 1
                entry = self._blocks[block] = (self._last_number, before)
            before = entry[0]
        for block in reversed(hashes):
            self._blocks.move_to_end(block)
        self._shrink()

    def forget(self, hashes: Sequence[int]) -> None:
        """The worker turned out not to hold these, nor then anything behind them."""
        for block in hashes:
            self._blocks.pop(block, None)

    def resize(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._shrink()

    def clear(self) -> None:
        self._blocks.clear()

    def _shrink(self) -> None:
        while len(self._blocks) > self.capacity_blocks:
            self._blocks.popitem(last=False)
