"""Prompts of random tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence


def text(length: int, seed: int = 1, prefix: Sequence[int] = ()) -> list[int]:
    """Return ``prefix`` and ``length`` random tokens of this seed."""
    rng = random.Random(seed)
    return [*prefix, *(rng.randrange(300) for _ in range(length))]
