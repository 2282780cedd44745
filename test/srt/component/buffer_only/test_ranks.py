"""What only one rank can know: all do the same, whatever their stores and clocks say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from component.buffer_only.cache import PAGE, prompt
from component.buffer_only.checks import check_idle, nodes
from component.buffer_only.ranks import Ranks
from sglang.srt.disaggregation.delta.rank_agreement import RanksDiverged

PROMPT = prompt(1, 5)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Two ranks with empty trees, whose stores have ``PROMPT``."""
    found = Ranks(2)
    found.each(lambda cache: cache.compute(PROMPT))
    found.live(6)
    found.each(lambda cache: cache.flush())
    yield found
    found.close()


def idle(ranks: Ranks) -> None:
    """Nothing is left on any rank."""
    ranks.live(6)
    for cache in ranks.caches:
        check_idle(cache)


@pytest.mark.hazard("partial-write-counts")
@pytest.mark.parametrize("good", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_page_that_only_one_rank_could_write(ranks: Ranks, rank: int, good: int):
    """It is out of reach for a request, which needs the KV of all ranks; taken for stored on the
    other rank, one would evict what the other keeps."""
    ranks.caches[rank].store.answer("batch_set_v1", lambda r: [at != good for at in range(len(r))])
    ranks.each(lambda cache: cache.compute(prompt(2, 3)))
    ranks.live(5)
    assert ranks.each(lambda cache: nodes(cache.tree)[0].stored) == good * PAGE
    for cache in ranks.caches:
        cache.now += 2.0  # a store that took nothing is not tried again at once
    ranks.each(lambda cache: cache.compute(prompt(2, 3)))
    idle(ranks)
    assert ranks.each(lambda cache: nodes(cache.tree)[0].storage_backed)


@pytest.mark.hazard("partial-write-counts")
@pytest.mark.parametrize("good", [0, 1, 3])
def test_of_a_latent_model_only_the_writer_knows(ranks: Ranks, good: int):
    """The ranks that write nothing would call everything stored."""
    first, second = ranks.caches
    second.buffer.context.skip_backup = True
    second.store.calls.clear()
    first.store.answer("batch_set_v1", lambda r: [at < good for at in range(len(r))])
    ranks.each(lambda cache: cache.compute(prompt(2, 3)))
    ranks.live(5)
    assert ranks.each(lambda cache: nodes(cache.tree)[0].stored) == good * PAGE
    assert second.store_calls("batch_set_v1") == 0
    idle(ranks)


def lose(cache: Any, page: int) -> None:
    """The store has lost a page of ``PROMPT``."""
    cache.store.drop(list(cache.store.content)[page])


@pytest.mark.hazard("holes-in-answers")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("pages", [(2, 4), (4, 0), (1, 3)])
def test_pages_that_only_one_rank_has(ranks: Ranks, pages: tuple[int, int], when: str):
    """Lost before the query or between query and fetch: all ranks take as many as the one that has
    least, and give back the staging pages of the rest in the same step."""
    for cache, page in zip(ranks.caches, pages, strict=True):
        if when == "before":
            lose(cache, page)
    ranks.each(lambda cache: cache.want("r", PROMPT))
    ranks.live(2)
    for cache, page in zip(ranks.caches, pages, strict=True):
        if when == "after":
            lose(cache, page)
    ranks.live(6)
    assert ranks.each(lambda cache: cache.tree.check_prefetch_progress("r"))
    assert ranks.each(lambda cache: len(cache.admit("r", PROMPT)[0])) == min(4, *pages) * PAGE
    idle(ranks)


@pytest.mark.hazard("ranks-part-in-collective")
def test_a_clock_that_runs_ahead(ranks: Ranks):
    """The slowest clock counts: one rank that gives a request up by itself would compute what the
    other one waits for."""
    ranks.each(lambda cache: cache.want("r", PROMPT))
    ranks.step()
    assert not ranks.each(lambda cache: cache.tree.check_prefetch_progress("r"))
    for cache, ready in zip(ranks.caches, (False, True), strict=True):
        cache.now += 11
        ranks.step()
        ranks.check()
        assert ranks.each(lambda cache: cache.tree.check_prefetch_progress("r")) is ready
    assert ranks.each(lambda cache: len(cache.admit("r", PROMPT)[0])) == 0
    idle(ranks)


@pytest.mark.hazard("ranks-part-in-collective", "launch-per-node")
def test_one_collective_a_step(ranks: Ranks):
    """Whatever the queues hold, also when there is nothing to do; or a rank waits for ever."""
    before = len(ranks.group.log)
    for step in range(12):
        if step == 4:
            ranks.each(lambda cache: cache.want("r", PROMPT))
            ranks.each(lambda cache: cache.compute(prompt(2, 20)))
        ranks.live()
    assert len(ranks.group.log) - before == 12 and len(set.union(*ranks.group.log)) == 1
    assert ranks.each(lambda cache: cache.tree.check_prefetch_progress("r"))
    assert ranks.each(lambda cache: len(cache.admit("r", PROMPT)[0])) == 4 * PAGE
    idle(ranks)


@pytest.mark.hazard("ranks-part-in-collective")
def test_a_store_that_is_slow_on_one_rank(ranks: Ranks):
    """The slowest rank's speeds count: one that chose by its own would fetch what the other one
    computes."""
    for cache, seconds in zip(ranks.caches, (5.0, 1e-6), strict=True):
        cache.buffer.ran(1.0, 1000)
        cache.buffer.prefetches.fetches.call_seconds.add(seconds)
        cache.buffer.prefetches.fetches.call_bytes.add(1e6)
    ranks.each(lambda cache: cache.want("r", PROMPT))
    ranks.live(4)
    assert ranks.each(lambda cache: cache.tree.check_prefetch_progress("r"))
    assert ranks.each(lambda cache: len(cache.admit("r", PROMPT)[0])) == 0
    idle(ranks)


def test_ranks_that_do_different_things_end(ranks: Ranks):
    """They would go on with different pages under the same keys."""
    ranks.caches[1].compute(prompt(3, 2))
    ranks.step()
    with pytest.raises(RanksDiverged):
        ranks.step()
