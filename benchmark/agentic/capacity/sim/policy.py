"""Which worker a request goes to. Pure functions of loads and hits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PREFILL = ("round_robin", "least_tokens", "cache_aware")
DECODE = ("round_robin", "least_tokens", "delta_kv")


def hits(index: Mapping[int, int], blocks: Sequence[int], workers: int) -> NDArray[np.int64]:
    """Leading blocks that each worker holds.

    ``index``: block -> workers that hold it, as bits.
    """
    found = np.zeros(workers, dtype=np.int64)
    holders = (1 << workers) - 1
    for depth, block in enumerate(blocks):
        still = holders & index.get(block, 0)
        if depth and still != holders:
            found[_members(holders & ~still, workers)] = depth
        holders = still
        if not holders:
            return found
    found[_members(holders, workers)] = len(blocks)
    return found


def choose(name: str, turn: int, loads: NDArray[np.float64], held: NDArray[Any] | int) -> int:
    """The worker of a policy; of equals the first.

    ``loads``: tokens that each worker still has to compute, or to hold. ``held``: tokens of this
    request that each already has; ``cache_aware`` and ``delta_kv`` weigh what would be left.
    """
    if name == "round_robin":
        return turn % len(loads)
    return int(np.argmin(loads if name == "least_tokens" else loads - held))


def _members(mask: int, workers: int) -> NDArray[np.bool_]:
    octets = np.frombuffer(mask.to_bytes((workers + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(octets, count=workers, bitorder="little").astype(bool)
