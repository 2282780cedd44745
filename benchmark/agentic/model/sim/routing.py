"""Which worker of a role a request goes to, by the router's own policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmark.agentic.model.sim.jobs import Job
from benchmark.agentic.router.policies import SCORES, Knobs, View, Work

#: The router's but for ``random``; sessions are not pinned.
POLICIES = ("round_robin", *SCORES)


class Routing:
    """What is known of the workers of a role; an array's entry is a worker's.

    The router's scores are arithmetic on a worker's numbers, so they score all workers at once
    where these are arrays.
    """

    def __init__(
        self, policy: str, workers: int, pool: int, block_tokens: int, cache: bool
    ) -> None:
        self.policy, self._pool, self._block_tokens, self._cache = policy, pool, block_tokens, cache
        #: Block -> workers that hold it, as bits; their pools keep it.
        self.index: dict[int, int] = {}
        self.requests, self.pending, self.ongoing, self.added = (
            np.zeros(workers) for _ in range(4)
        )
        self._numbers = np.arange(workers)
        self._turn = 0

    def take(self, job: Job, reserve: int) -> tuple[int, int]:
        """A worker for the request, and how many of the prompt's tokens it is said to hold."""
        held: Any = np.zeros(len(self._numbers))
        if self._cache:
            held = hits(self.index, job.blocks, len(self._numbers)) * self._block_tokens
        worker = self._choose(held, Work(job.prompt, reserve))
        self._turn += 1
        found = int(held[worker])
        self.requests[worker] += 1
        self.pending[worker] += job.prompt - found
        self.ongoing[worker] += job.prompt + reserve
        self.added[worker] += job.prompt - found + reserve
        return worker, found

    def computed(self, worker: int, tokens: int) -> None:
        """So many of what was pending are there."""
        self.pending[worker] -= tokens

    def leave(self, worker: int, job: Job, found: int, reserve: int) -> None:
        """The request does not need the worker any more."""
        self.requests[worker] -= 1
        self.ongoing[worker] -= job.prompt + reserve
        self.added[worker] -= job.prompt - found + reserve

    def _choose(self, held: NDArray[Any], work: Work) -> int:
        """Lowest score; of equal ones the fewest requests; of those each in turn."""
        turns = (self._numbers - self._turn) % len(self._numbers)
        if self.policy == "round_robin":
            return int(turns.argmin())
        columns: Any = (self.requests, self.pending, self.ongoing, self.added, self._pool, held)
        mean = float(self.requests.mean())
        score = SCORES[self.policy](View("", *columns), work, mean, Knobs()).score
        return int(np.lexsort((turns, self.requests, score))[0])


def hits(index: Mapping[int, int], blocks: Sequence[int], workers: int) -> NDArray[np.int64]:
    """Leading blocks that each worker holds."""
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


def _members(mask: int, workers: int) -> NDArray[np.bool_]:
    octets = np.frombuffer(mask.to_bytes((workers + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(octets, count=workers, bitorder="little").astype(bool)
