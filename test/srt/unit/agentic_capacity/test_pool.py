"""A worker's pool: blocks shared by requests, and which of them go first."""

from __future__ import annotations

import numpy as np
import pytest

from benchmark.agentic.capacity.sim import policy
from benchmark.agentic.capacity.sim.pool import Pool


def filled(pool: Pool, *chains: tuple[int, ...]) -> Pool:
    """Each chain was a prompt that came and went."""
    for chain in chains:
        assert pool.allocate(len(chain) * pool.block_tokens)
        pool.commit(chain)
        pool.unlock(chain)
    return pool


def test_blocks_of_another_request_are_held_once() -> None:
    """Both had private copies; the second one's are dropped when it commits."""
    pool = Pool(100, 10)
    assert pool.allocate(20) and pool.allocate(20)
    pool.commit((1, 2))
    pool.commit((1, 2))
    assert (pool.private, pool.in_use, pool.locks) == (0, 20, 4)
    pool.unlock((1, 2))
    assert pool.in_use == 20
    pool.unlock((1, 2))
    assert (pool.in_use, pool.free) == (0, 80)
    pool.check()


def test_a_commit_takes_up_blocks_that_lie_idle() -> None:
    """They came and went after the match; left idle too, they would be evicted under a request."""
    pool = filled(Pool(100, 10), (1, 2))
    assert pool.allocate(30)
    pool.commit((1, 2, 3))
    pool.check()
    assert pool.in_use == 30 and not pool.allocate(71)


def test_eviction_begins_with_the_oldest_ends() -> None:
    """A chain loses its end first, or what is left could not be matched."""
    pool = filled(Pool(60, 10), (1, 2, 3), (1, 4, 5))
    assert pool.match((1, 2, 3)) == 3
    assert pool.allocate(20)
    assert pool.match((1, 2, 3)) == 2
    assert pool.match((1, 4, 5)) == 3
    assert pool.allocate(20)
    assert (pool.match((1, 2)), pool.match((1, 4, 5))) == (1, 2)
    pool.check()


def test_what_is_locked_is_never_evicted() -> None:
    pool = filled(Pool(40, 10), (1, 2))
    pool.lock((1, 2))
    assert not pool.allocate(30), "only 20 are free"
    assert pool.private == 0 and pool.match((1, 2)) == 2
    with pytest.raises(RuntimeError, match="given back"):
        pool.release(1)


def test_hits_of_all_workers_from_one_index() -> None:
    """The index must follow commits and evictions of every pool."""
    index: dict[int, int] = {}
    pools = [Pool(30, 10, index, bit) for bit in range(3)]
    filled(pools[0], (1, 2, 3))
    filled(pools[2], (1, 4))
    assert policy.hits(index, (1, 2, 9), 3).tolist() == [2, 0, 1]
    assert policy.hits(index, (9,), 3).tolist() == policy.hits(index, (), 3).tolist() == [0, 0, 0]
    assert pools[0].allocate(30)
    assert policy.hits(index, (1, 2), 3).tolist() == [0, 0, 1]
    assert index == {1: 4, 4: 4}


def test_policies_weigh_what_is_left() -> None:
    loads, held = np.array([50.0, 40.0, 45.0]), np.array([0, 0, 30])
    assert [policy.choose("round_robin", turn, loads, held) for turn in (0, 4)] == [0, 1]
    assert policy.choose("least_tokens", 0, loads, held) == 1
    assert policy.choose("delta_kv", 0, loads, held) == 2
    assert policy.choose("cache_aware", 0, loads, np.array([10, 0, 0])) == 0, "of equals the first"
