"""Messages with something wrong in them."""

from __future__ import annotations

import random


def broken(rng: random.Random, message: list[bytes]) -> list[bytes]:
    """``message`` with one to three of its frames replaced, cut, dropped or joined by another."""
    frames = list(message)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(frames)) if frames else 0
        how = rng.randrange(5)
        if how == 0 and frames:
            frames[at] = rng.randbytes(rng.choice((0, 1, 3, 8, 40)))
        elif how == 1 and frames:
            frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]
        elif how == 2 and frames:
            del frames[at]
        elif how == 3 and frames:
            frames[at] = str(rng.choice((-1, 0, 1, 2, 7, 2**31, 2**63, 2**70))).encode()
        else:
            frames.insert(at, rng.randbytes(rng.randrange(12)))
    return frames
