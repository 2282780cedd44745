"""Events of one rank's store or clock: all ranks must decide the same."""

from __future__ import annotations

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import nodes
from component.buffer_only.ranks import Ranks
from sglang.srt.disaggregation.delta.rank_agreement import RanksDiverged

PROMPT = prompt(1, 5)
OTHER = prompt(2, 3)


@pytest.fixture
def ranks() -> Ranks:
    """Two ranks with empty trees, and with ``PROMPT`` in their stores."""
    ranks = Ranks(2)
    ranks.store(PROMPT)
    return ranks


def hits(ranks: Ranks, pages: int) -> bool:
    """Return True if the request is ready on all ranks and hits ``pages`` pages."""
    ready = ranks.on_all(lambda cache: cache.tree.check_prefetch_progress("r"))
    return ready and ranks.on_all(lambda cache: len(cache.admit("r", PROMPT)[0])) == pages * PAGE


@pytest.mark.hazard("partial-write-counts")
@pytest.mark.parametrize("good", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("latent", [False, True])
def test_a_page_that_only_one_rank_could_write(ranks: Ranks, rank: int, good: int, latent: bool):
    """Guards against ranks that disagree about stored pages: a request needs the KV of all ranks,
    and one rank would evict a page that the other keeps. With a latent model only one rank writes;
    the others must not count everything as stored."""
    writer, other = ranks.caches[rank], ranks.caches[1 - rank]
    other.buffer.context.skip_backup = latent
    other.store.content = writer.store.content if latent else other.store.content
    other.store.calls.clear()
    writer.store.answer("batch_set_v1", lambda r: [index != good for index in range(len(r))])
    ranks.on_all(lambda cache: cache.compute(OTHER))
    ranks.live(5)
    assert ranks.on_all(lambda cache: nodes(cache.tree)[0].stored) == good * PAGE
    assert bool(other.store.asked("batch_set_v1")) is not latent
    for cache in ranks.caches:
        cache.now += 2.0  # because a store that refused a page is not retried at once
    ranks.on_all(lambda cache: cache.compute(OTHER))
    ranks.live(6)
    assert ranks.on_all(lambda cache: nodes(cache.tree)[0].storage_backed)


@pytest.mark.hazard("holes-in-answers")
@pytest.mark.parametrize("when", ["before the query", "before the fetch"])
@pytest.mark.parametrize("pages", [(2, 4), (4, 0), (1, 3)])
def test_pages_that_only_one_rank_has(ranks: Ranks, pages: tuple[int, int], when: str):
    """Guards against ranks with different hits: all use the lowest number of pages, and free the
    staging pages of the rest in the same step."""
    if when == "before the fetch":
        ranks.on_all(lambda cache: cache.want("r", PROMPT))
        ranks.live(2)
    for cache, page in zip(ranks.caches, pages, strict=True):
        cache.store.drop(list(cache.store.content)[page])
    if when == "before the query":
        ranks.on_all(lambda cache: cache.want("r", PROMPT))
    ranks.live(8)
    assert hits(ranks, min(4, *pages))


@pytest.mark.hazard("ranks-part-in-collective")
def test_a_clock_that_runs_ahead(ranks: Ranks):
    """Guards against a rank that gives a request up by its own clock and computes while the other
    one waits: the slowest clock counts."""
    ranks.on_all(lambda cache: cache.want("r", PROMPT))
    ranks.step()
    for cache, ready in [(None, False), (ranks.caches[0], False), (ranks.caches[1], True)]:
        if cache is not None:
            cache.now += 11
            ranks.step()
        assert ranks.on_all(lambda cache: cache.tree.check_prefetch_progress("r")) is ready
    assert hits(ranks, 0)


@pytest.mark.hazard("ranks-part-in-collective", "launch-per-node")
def test_one_collective_a_step(ranks: Ranks):
    """Guards against a number of collectives that depends on the queues: a rank would hang."""
    before = len(ranks.group.log)
    for step in range(12):
        if step == 4:
            ranks.on_all(lambda cache: cache.want("r", PROMPT))
            ranks.on_all(lambda cache: cache.compute(prompt(2, 20)))
        ranks.live()
    assert len(ranks.group.log) - before == 12
    assert hits(ranks, 4)


def test_ranks_that_do_different_things_end(ranks: Ranks):
    """Guards against diverged ranks that continue with different pages under the same keys."""
    ranks.caches[1].compute(prompt(3, 2))
    ranks.step()
    with pytest.raises(RanksDiverged):
        ranks.step()
    Cache.instances.remove(ranks)
