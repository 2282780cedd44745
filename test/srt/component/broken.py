"""Corrupted messages."""

from __future__ import annotations

import random


def broken(rng: random.Random, message: list[bytes]) -> list[bytes]:
    """Return ``message`` with one to three frames replaced, cut, dropped or inserted."""
    frames = list(message)
    for _ in range(rng.randint(1, 3)):
        index = rng.randrange(len(frames)) if frames else 0
        how = rng.randrange(5)
        if how == 0 and frames:
            frames[index] = rng.randbytes(rng.choice((0, 1, 3, 8, 40)))
        elif how == 1 and frames:
            frames[index] = frames[index][: rng.randrange(len(frames[index]) + 1)]
        elif how == 2 and frames:
            del frames[index]
        elif how == 3 and frames:
            frames[index] = str(rng.choice((-1, 0, 1, 2, 7, 2**31, 2**63, 2**70))).encode()
        else:
            frames.insert(index, rng.randbytes(rng.randrange(12)))
    return frames
