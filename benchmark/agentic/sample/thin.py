"""Fewer sessions, each of them whole. Pure functions of keys, seeded.

A key is kept or dropped by its hash alone, so that a smaller ratio keeps a subset of what a larger
one keeps, and any order of the trace gives the same.

Thinning session by session separates those that share a prefix: of a family of two, at a ratio of
0.25, three of four kept sessions are left alone. Thinning family by family (see
``blocks.families``) keeps each session with the same probability, and families stay together. It
draws fewer lots, so that a sample's size varies more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmark.agentic.sample.survey import U64, Places, mixed

Bools = npt.NDArray[np.bool_]


def draws(keys: U64, seed: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each key; equal keys have equal ones."""
    return (mixed(mixed(keys), seed=seed + 16) >> np.uint64(11)).astype(np.float64) / 2.0**53


def kept(keys: U64, ratio: float, seed: int) -> Bools:
    """Which keys a thinning to ``ratio`` (0 to 1) keeps."""
    return draws(keys, seed) < ratio


def cap_single_turns(turns: Places, order: npt.NDArray[np.float64], cap: float) -> Bools:
    """Which sessions to keep so that at most ``cap`` of them (0 to 1) have a single turn.

    All sessions of several turns stay, and of the others those that come first in ``order``
    (``draws`` of the keys that were thinned by).
    """
    single: Bools = turns == 1
    if cap >= 1:
        return np.ones(len(turns), np.bool_)
    # The small addition keeps a quotient that should be whole from being rounded down.
    room = int((~single).sum() * cap / (1 - cap) + 1e-9)
    keep = ~single
    candidates = np.flatnonzero(single)
    keep[candidates[np.argsort(order[candidates], kind="stable")[:room]]] = True
    return keep
