"""Token ids for a trace's hash ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from benchmark.traces.record import Record, check

_CACHED_BLOCKS = 65536


class Prompts:
    """Makes prompts. Equal hash ids give equal tokens, in every run with the same seed; different
    ids give different tokens.

    ``vocabulary``: the token ids to draw from. ``block_tokens``: tokens of a block, as in the
    records.
    """

    def __init__(self, vocabulary: Sequence[int], block_tokens: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._block_tokens = block_tokens
        self._seed = seed
        self._block = lru_cache(_CACHED_BLOCKS)(self._draw)

    def prompt(self, record: Record) -> list[int]:
        """Return ``record.input_length`` token ids.

        Raises:
            ValueError: the record's ids do not cover its prompt in blocks of this size.
        """
        check(record, self._block_tokens)
        ids = [token for block in record.hash_ids for token in self._block(block)]
        return ids[: record.input_length]

    def _draw(self, block: int) -> tuple[int, ...]:
        # Seed with text, because Python's own hashes differ between processes.
        rng = random.Random(f"{self._seed}:{block}")
        return tuple(rng.choices(self._vocabulary, k=self._block_tokens))
