"""Which pages a room moves: neighbours, any order, or runs of a given length. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Page indices into a pool, as SGLang keeps them.
Pages = npt.NDArray[np.int32]

PATTERNS = ("contiguous", "scattered")


@dataclass(frozen=True)
class RoomPlan:
    """One room: which pages go where. Crosses process boundaries."""

    room: int
    #: Index of the decode peer.
    peer: int
    source: Pages
    destination: Pages
    #: Metadata slot, on both sides.
    slot: int
    chunks: int = 1

    def parts(self) -> list[Pages]:
        """The source pages of each chunk."""
        return np.array_split(self.source, self.chunks)


def pages_for(pattern: str, count: int, rooms: int, seed: int) -> list[Pages]:
    """``count`` pages for each of ``rooms`` rooms, no page twice, never page 0 (SGLang's pools keep
    it for padding). The pool has ``rooms * count + 1`` pages.

    Raises:
        ValueError: ``pattern`` is none of ``PATTERNS``.
    """
    every = np.arange(1, rooms * count + 1, dtype=np.int32)
    if pattern == "scattered":
        every = np.random.default_rng(seed).permutation(every)
    elif pattern != "contiguous":
        raise ValueError(f"--pattern {pattern}: choose from {', '.join(PATTERNS)}")
    return list(every.reshape(rooms, count))


def runs_for(count: int, run: int, seed: int) -> Pages:
    """``count`` pages in shuffled runs of ``run`` neighbours, from page 1 on. Two runs may come to
    lie side by side by chance."""
    if count % run:
        raise ValueError(f"{count} pages are not a multiple of runs of {run}")
    blocks = np.arange(1, count + 1, dtype=np.int32).reshape(-1, run)
    return np.random.default_rng(seed).permutation(blocks, axis=0).reshape(-1)


def merged(source: Pages, destination: Pages) -> tuple[Pages, Pages, Pages]:
    """Runs that are neighbours on both sides: first source and destination pages, and lengths."""
    breaks = (np.diff(source) != 1) | (np.diff(destination) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(starts, append=len(source)).astype(np.int32)
    return source[starts], destination[starts], lengths


def by_peer(plans: Sequence[RoomPlan], peers: int) -> list[list[RoomPlan]]:
    """The rooms of each peer."""
    return [[plan for plan in plans if plan.peer == peer] for peer in range(peers)]
