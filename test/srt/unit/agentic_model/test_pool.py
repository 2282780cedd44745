"""A worker's pool: blocks shared by requests, and which of them go first."""

from __future__ import annotations

import numpy as np
import pytest

from benchmark.agentic.model.sim.jobs import Job
from benchmark.agentic.model.sim.pool import Pool
from benchmark.agentic.model.sim.routing import Routing, hits
from benchmark.agentic.router.policies import SCORES, Knobs, View, Work, choose


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
    assert hits(index, (1, 2, 9), 3).tolist() == [2, 0, 1]
    assert hits(index, (9,), 3).tolist() == hits(index, (), 3).tolist() == [0, 0, 0]
    assert pools[0].allocate(30)
    assert hits(index, (1, 2), 3).tolist() == [0, 0, 1]
    assert index == {1: 4, 4: 4}


def job(number: int, blocks: tuple[int, ...] = ()) -> Job:
    return Job(number, 0.0, 100, 10, blocks)


def test_requests_go_where_the_routers_policies_say() -> None:
    """Loads that are not taken off, or a policy that looks at another role's cache."""
    least = Routing("least_tokens", 3, 1000, 10, cache=True)
    taken = [least.take(job(i), 50)[0] for i in range(3)]
    assert sorted(taken) == [0, 1, 2], "ties in turn"
    least.leave(taken[1], job(1), 0, 50)
    least.computed(taken[1], 100)
    assert least.take(job(3), 50)[0] == taken[1]
    assert [Routing("round_robin", 2, 1, 1, False).take(job(i), 0)[0] for i in range(1)] == [0]
    delta = Routing("delta_kv", 3, 1000, 10, cache=True)
    filled(Pool(100, 10, delta.index, 2), (1, 2, 3))
    assert delta.take(job(0, (1, 2, 9)), 50) == (2, 20)
    blind = Routing("delta_kv", 3, 1000, 10, cache=False)
    filled(Pool(100, 10, blind.index, 2), (1, 2, 3))
    assert blind.take(job(0, (1, 2, 9)), 50) == (0, 0)


@pytest.mark.parametrize("name", sorted(SCORES))
def test_all_workers_are_scored_at_once_as_one_by_one(name: str) -> None:
    """The router's scores over arrays are its scores of each worker: also where they tie."""
    rng = np.random.default_rng(3)
    for turn in range(20):
        routing = Routing(name, 5, 1000, 10, cache=False)
        routing._turn = turn
        for of in (routing.requests, routing.pending, routing.ongoing, routing.added):
            of[:] = rng.integers(0, 3, 5) * 100
        columns = (routing.requests, routing.pending, routing.ongoing, routing.added)
        views = [View(str(i), *(int(of[i]) for of in columns), 1000, 0) for i in range(5)]
        wanted = choose(name, views, Work(100, 50), Knobs(), turn, None)
        assert routing.take(job(0), 50)[0] == wanted.index
