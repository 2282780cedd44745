"""Which worker a request goes to. Pure functions of loads and hits; lower scores win."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PREFILL = ("round_robin", "least_tokens", "cache_aware")
DECODE = ("round_robin", "least_tokens", "delta_kv")


def hits(index: Mapping[int, int], blocks: Sequence[int]) -> dict[int, int]:
    """Worker -> leading blocks that it holds, for the workers that hold any.

    ``index``: block -> workers that hold it, as bits.
    """
    found: dict[int, int] = {}
    holders = -1
    for depth, block in enumerate(blocks):
        still = holders & index.get(block, 0)
        if depth and (gone := holders & ~still):
            for worker in _bits(gone):
                found[worker] = depth
        holders = still
        if not holders:
            return found
    for worker in _bits(holders) if blocks else ():
        found[worker] = len(blocks)
    return found


def fewest(loads: Sequence[float], held: Mapping[int, float], best: int) -> int:
    """The worker with the lowest ``load - held``; of equals the first.

    ``best``: the worker with the lowest load, where nothing is held. ``held``: tokens that a
    worker has of this request, for those that have any.
    """
    winner, score = best, loads[best] - held.get(best, 0)
    for worker in sorted(held):
        value = loads[worker] - held[worker]
        if value < score or (value == score and worker < winner):
            winner, score = worker, value
    return winner


def _bits(mask: int) -> list[int]:
    workers = []
    while mask:
        low = mask & -mask
        workers.append(low.bit_length() - 1)
        mask ^= low
    return workers
