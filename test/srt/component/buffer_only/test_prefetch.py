"""The read pipeline: states, ways out, and a request that is never blocked for good."""

from __future__ import annotations

from typing import Any

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, check_idle, nodes
from component.buffer_only.reaching import reach
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.stage import Direction

PROMPT = prompt(1, 9)


def filled(stored: int = 9, **changes: Any) -> Cache:
    """A cache with an empty tree, and a store that has the first ``stored`` pages of ``PROMPT``."""
    cache = Cache(**changes)
    cache.compute(PROMPT[: stored * PAGE])
    cache.settle()
    cache.flush()
    cache.store.calls.clear()
    cache.buffer.context.counters.clear()
    return cache


def test_states_and_what_they_hold():
    """Nothing of the device in any state; staging pages from the fetch on, and until the copy to
    the device has ended, which the admission starts."""
    cache = filled()
    cache.want("r", PROMPT)
    read = cache.prefetch("r")
    free = cache.allocator.available_size()
    assert read.state is State.WAITING
    for state, pages in [
        (State.QUERYING, 0),
        (State.FETCHING, 6 + 2),
        (State.STAGED, 6 + 2),
        (State.STAGED, 6 + 2),
    ]:
        cache.step()
        check(cache)
        assert (read.state, cache.stage.used()) == (state, pages)
        assert cache.allocator.available_size() == free and cache.tree.protected_size() == 0
    assert cache.tree.check_prefetch_progress("r") and cache.state("r") is State.STAGED
    cache.slow = True
    slots, node = cache.buffer.prefetches.load("r", 0, 8 * PAGE)
    assert cache.prefetch("r") is None
    for _ in range(2):
        cache.step()
        assert cache.stage.used() == 6 + 2 and node.lock_ref == 1
    cache.slow = False
    cache.step()
    assert cache.stage.used() == 0 and node.lock_ref == 0
    assert cache.compute(PROMPT) == 8 * PAGE
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("host-pool-size")
def test_allocated_by_the_hit_and_not_by_the_request():
    """A hundred pages asked for, three there: a stage of any size must not be taken by a miss."""
    cache = filled(3, tokens=120 * PAGE)
    long = [*PROMPT[: 3 * PAGE], *prompt(7, 100)]
    cache.want("r", long)
    reach(cache, State.FETCHING)
    assert cache.stage.used(Direction.PREFETCH) == 3
    cache.settle_until_ready("r")
    assert cache.held_tokens(long) == 3 * PAGE
    check(cache)


@pytest.mark.hazard("worthless-prefetch")
@pytest.mark.parametrize("tokens", [8 * PAGE, 8 * PAGE + 1, 9 * PAGE - 1, 9 * PAGE])
def test_at_least_one_token_is_computed(tokens: int):
    """The next token comes from a forward pass of at least one; a fetched last page would go to
    waste."""
    cache = filled()
    cache.want("r", PROMPT[:tokens])
    cache.settle_until_ready("r")
    assert cache.held_tokens(PROMPT) == (tokens - 1) // PAGE * PAGE


def test_a_miss_asks_for_no_more_than_the_smallest_hit():
    """Guards against hashing thousands of tokens, beside the scheduler and before it can admit the
    request, to learn that the store has not even the first ones."""
    cache = filled(9, settings={"prefetch_threshold": 3 * PAGE})
    cache.want("miss", prompt(7, 9))
    cache.settle_until_ready("miss")
    assert [len(keys) for _, keys in cache.store.calls] == [3]
    cache.store.calls.clear()
    cache.want("hit", PROMPT)
    cache.settle_until_ready("hit")
    asked = [keys for method, keys in cache.store.calls if method == "batch_exists"]
    assert [len(keys) for keys in asked] == [3, len(PROMPT) // PAGE - 4], "the rest at once"
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("worthless-prefetch")
def test_less_than_the_threshold_is_not_worth_it():
    """Neither a short prompt, nor a short hit, nor a short rest behind what the tree has."""
    cache = filled(3, settings={"prefetch_threshold": 4 * PAGE})
    cache.want("short", PROMPT[: 3 * PAGE])
    assert cache.state("short") is None
    cache.want("hit", PROMPT)
    cache.settle_until_ready("hit")
    assert cache.store_calls("batch_get_v1") == 0 and cache.store_calls("batch_exists") == 1
    cache.compute(PROMPT[: 6 * PAGE])
    cache.want("rest", PROMPT)
    cache.settle_until_ready("rest")
    assert cache.store_calls("batch_exists") == 1
    cache.settle()
    check_idle(cache)


def test_a_hit_larger_than_the_stage_comes_in_rounds():
    """Or a small stage would cut every long prefix."""
    cache = Cache(pages=4, tokens=80 * PAGE)
    tokens = prompt(3, 30)
    cache.compute(tokens)
    cache.settle()
    cache.flush()
    cache.want("r", tokens)
    for _ in range(100):
        cache.step()
        check(cache)
        if cache.tree.check_prefetch_progress("r"):
            break
    assert cache.compute(tokens, rid="r") == 29 * PAGE and cache.stage.peak <= 4
    assert cache.tree.take_storage_hit("r") == 29 * PAGE
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("prefix-under-prefetch")
@pytest.mark.parametrize("state", list(State)[:5])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_abort_in_every_state(state: State, late: bool, alone: bool):
    """Staging pages go when the store has let go of them; its answer, before the abort or after,
    changes nothing any more."""
    cache = filled(alone=alone)
    cache.want("r", PROMPT)
    reach(cache, state)
    if late:
        cache.work()
    cache.tree.release_aborted_request("r")
    assert cache.prefetch("r") is None and cache.tree.pop_prefetch_loaded_tokens("r") == 0
    check(cache)
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("staging-pages")
@pytest.mark.parametrize("state", list(State)[1:5])
def test_same_request_id_again(state: State):
    """A retracted request asks again under its id; the first attempt's pages and answers are not
    the second one's."""
    cache = filled()
    cache.want("r", PROMPT)
    reach(cache, state)
    cache.want("r", PROMPT[: 5 * PAGE])
    check(cache)
    cache.settle_until_ready("r")
    assert cache.held_tokens(PROMPT) >= 4 * PAGE
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("flush-or-detach-under-way")
@pytest.mark.parametrize("state", list(State)[:5])
@pytest.mark.parametrize("alone", [False, True])
def test_flush_in_every_state(state: State, alone: bool):
    """A flush ends every read; answers that come after it free their pages and touch no node of
    the new tree."""
    cache = filled(alone=alone)
    cache.want("r", PROMPT)
    cache.want("other", prompt(8, 4))
    reach(cache, state)
    cache.compute(prompt(9, 3))  # and a write, in its own state
    cache.step(work=False)
    cache.flush()
    check(cache)
    assert nodes(cache.tree) == [] and cache.prefetch("r") is None
    cache.compute(prompt(9, 3))
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("store-exception")
@pytest.mark.parametrize("method", ["batch_exists", "batch_get_v1"])
def test_a_store_that_raises_costs_a_hit(method: str):
    """And neither a thread nor a request."""
    cache = filled()
    cache.store.fail(method)
    assert cache.serve("r", PROMPT) == 0
    cache.settle()
    check_idle(cache)
    cache.flush()
    assert cache.serve("again", PROMPT) == 8 * PAGE


@pytest.mark.parametrize("results", [[], None, [True], "nonsense"])
def test_a_store_that_answers_nonsense(results: Any):
    """Fewer results than pages must not be taken for pages."""
    cache = filled()
    cache.store.answer("batch_get_v1", lambda _: results)
    hit = cache.serve("r", PROMPT)
    assert hit == 0
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("stale-beliefs", "holes-in-answers")
@pytest.mark.parametrize("lost", range(8))
@pytest.mark.parametrize("how", ["drop", "shorten", "hole"])
def test_only_leading_pages_count(lost: int, how: str):
    """Page number ``lost`` is gone, or short, or reported missing with others behind it."""
    cache = filled(pages=32, tokens=80 * PAGE)
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    key = cache.prefetch("r").keys[lost]
    if how == "drop":
        cache.store.drop(key)
    elif how == "shorten":
        cache.store.shorten(key)
    else:
        cache.store.answer("batch_get_v1", lambda r: [at != lost for at in range(len(r))])
    cache.settle_until_ready("r")
    assert cache.held_tokens(PROMPT) == lost * PAGE
    assert cache.buffer.context.counters["prefetch_unfulfilled_tokens"] == (8 - lost) * PAGE
    check(cache)
    cache.compute(PROMPT)
    cache.settle()
    assert key in cache.store.content, "what was lost is written again"
    check_idle(cache)


@pytest.mark.hazard("prefix-under-prefetch")
@pytest.mark.parametrize("state", list(State)[1:5])
@pytest.mark.parametrize("how", ["evicted", "split", "half evicted"])
@pytest.mark.parametrize("alone", [False, True])
def test_what_the_tree_held_may_go_or_be_split(state: State, how: str, alone: bool):
    """Nothing keeps it, so that nobody's hit is in the way of those who run. It comes from the
    store then, like the rest, and what is in the stage already is not fetched again."""
    cache = filled(alone=alone)
    cache.compute(PROMPT[: 2 * PAGE])
    cache.compute(PROMPT[: 4 * PAGE])
    cache.settle()
    cache.store.calls.clear()
    cache.want("r", PROMPT)
    reach(cache, state)
    if how == "split":
        cache.match(PROMPT[:PAGE])
    else:
        assert cache.evict(1) == 2 * PAGE
        assert how == "half evicted" or cache.evict(1) == 2 * PAGE
    check(cache)
    for _ in range(10):
        cache.step()
        if cache.tree.check_prefetch_progress("r"):
            break
    assert cache.compute(PROMPT, rid="r") == 8 * PAGE
    fetched = [key for method, keys in cache.store.calls for key in keys if "get" in method]
    expected = {"split": 4, "half evicted": 6, "evicted": 8}[how]
    assert len(fetched) == len(set(fetched)) == expected
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("slots-freed-under-copy")
def test_pages_on_their_way_to_the_device_are_kept():
    """Evicted before the copy has ended, the slots would be another request's when it lands; given
    back, the staging pages would be filled with something else while they are read."""
    cache = filled(pages=32, tokens=80 * PAGE)
    cache.want("r", PROMPT)
    reach(cache, State.STAGED)
    cache.slow = True
    _, node = cache.buffer.prefetches.load("r", 0, 8 * PAGE)
    cache.buffer.prefetches.load_backs.launch()
    (load,) = cache.buffer.prefetches.load_backs.under_way
    cache.tree.release_aborted_request("r")
    assert cache.evict(10_000) == 0 and cache.stage.used(Direction.PREFETCH) == 8
    assert load.node is node and node.lock_ref == 1
    for _ in range(3):
        cache.step()
    check(cache)
    cache.slow = False
    cache.step()
    assert cache.stage.used() == 0 and load.node.lock_ref == 0
    check_idle(cache)


@pytest.mark.hazard("slots-freed-under-copy")
@pytest.mark.parametrize("pages", [1, 4, 6, 9])
def test_another_request_computes_it_meanwhile(pages: int):
    """Its pages would be in the tree twice, or those of the copy be freed under it; only what is
    still missing is loaded."""
    cache = filled(pages=32, tokens=80 * PAGE)
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    cache.work()
    cache.compute(PROMPT[: pages * PAGE])
    cache.settle_until_ready("r")
    assert cache.held_tokens(PROMPT) == max(8, pages) * PAGE
    assert cache.tree.take_storage_hit("r") == max(0, 8 - pages) * PAGE
    check(cache)
    cache.settle()
    check_idle(cache)


def test_no_device_memory():
    """A hit waits in the stage until the device has room for its request; it takes nothing from
    those who run, and is there when they have ended."""
    cache = filled()
    cache.want("r", PROMPT)
    reach(cache, State.STAGED)
    taken = cache.allocator.alloc(cache.allocator.available_size())
    for _ in range(3):
        cache.step()
        cache.now += 20.0
        assert cache.tree.check_prefetch_progress("r")
        with pytest.raises(MemoryError):
            cache.admit("r", PROMPT)
        assert cache.stage.used() == 8 and cache.tree.protected_size() == 0
    cache.allocator.free(taken)
    assert cache.compute(PROMPT, rid="r") == 8 * PAGE
    cache.settle()
    check_idle(cache)


def test_a_request_waits_for_a_silent_store_only_so_long():
    """And the staging pages stay with the store until it answers."""
    cache = filled(settings={"prefetch_timeout_ms": 1000})
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    assert not cache.tree.check_prefetch_progress("r")
    cache.now += 0.9
    cache.step(work=False)
    assert not cache.tree.check_prefetch_progress("r")
    cache.now += 0.2
    cache.step(work=False)
    assert cache.tree.check_prefetch_progress("r") and cache.stage.used() == 8
    assert cache.buffer.context.counters["prefetch_timeouts"] == 1
    assert cache.compute(PROMPT, rid="r") == 0
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("state", list(State)[:4])
def test_time_runs_out_in_every_state(state: State):
    """The request computes, and nothing of its prefetch is kept but what the store may still
    use."""
    cache = filled()
    cache.want("r", PROMPT)
    reach(cache, state)
    assert not cache.tree.check_prefetch_progress("r")
    cache.now += 10.1
    cache.step(work=False)
    assert cache.state("r") is State.MISSED and cache.tree.check_prefetch_progress("r")
    assert not cache.prefetch("r").pieces
    assert cache.compute(PROMPT, rid="r") == 0
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("policy", ["wait_complete", "timeout", "best_effort"])
@pytest.mark.parametrize("first", [True, False])
def test_what_had_arrived_is_used(policy: str, first: bool):
    """When the time is over, or the request does not wait at all. Pages behind a gap are of no
    use."""
    changes = {"policy": policy, "timeout_base_ms": 100, "timeout_page_ms": 1}
    cache = filled(settings=changes)
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    assert cache.tree.check_prefetch_progress("r") is (policy == "best_effort")
    if not first:
        cache.threads["fetch"].jobs.rotate(-1)
    cache.threads["fetch"].run(1)
    cache.step(work=False)
    if policy != "best_effort":
        cache.now += 10.1
        cache.step(work=False)
    assert cache.tree.check_prefetch_progress("r")
    assert cache.compute(PROMPT, rid="r") == (6 * PAGE if first else 0)
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("asked", [False, True])
def test_a_parked_prefix_does_not_expire(asked: bool):
    """A request may wait for minutes; what was fetched for it is still there then, also where the
    scheduler has waited for it before it was there."""
    cache = filled()
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    assert not (asked and cache.tree.check_prefetch_progress("r"))
    reach(cache, State.STAGED)
    for _ in range(5):
        cache.now += 60.0
        cache.step()
    assert cache.tree.check_prefetch_progress("r")
    assert cache.buffer.context.counters["prefetch_timeouts"] == 0
    assert cache.compute(PROMPT, rid="r") == 8 * PAGE
    cache.settle()
    check_idle(cache)


def test_the_policy_timeout_waits_by_length():
    """As SGLang's: a base and so much for each page."""
    changes = {"policy": "timeout", "timeout_base_ms": 100, "timeout_page_ms": 10}
    cache = filled(settings=changes)
    cache.want("r", PROMPT)  # 8 pages
    cache.step(work=False)
    assert not cache.tree.check_prefetch_progress("r")
    for seconds, ready in [(0.175, False), (0.01, True)]:
        cache.now += seconds
        cache.step(work=False)
        assert cache.tree.check_prefetch_progress("r") is ready
    cache.tree.release_aborted_request("r")
    cache.settle()
    check_idle(cache)


def test_the_policy_best_effort_never_waits():
    """It takes what has arrived by the time of admission."""
    cache = filled(settings={"policy": "best_effort"})
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    assert cache.tree.check_prefetch_progress("r")
    cache.tree.release_aborted_request("r")
    cache.settle()
    cache.want("s", PROMPT)
    cache.settle_until_ready("s")
    assert cache.held_tokens(PROMPT) == 8 * PAGE
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("back-pressure-deadlock")
def test_nobody_waits_for_ever_for_the_stage():
    """A stage that somebody else keeps full: a request waits its time and then computes."""
    cache = filled(settings={"prefetch_timeout_ms": 1000})
    hog = cache.stage.allocate(Direction.PREFETCH, cache.stage.capacity(Direction.PREFETCH))
    cache.hogs.append(hog)
    cache.want("r", PROMPT)
    for _ in range(3):
        cache.step()
    assert cache.state("r") is State.FOUND
    cache.tree.check_prefetch_progress("r")
    assert cache.buffer.context.counters["prefetch_deferred_tokens"] == 8 * PAGE
    cache.now += 1.1
    cache.step()
    assert cache.tree.check_prefetch_progress("r")
    assert cache.compute(PROMPT, rid="r") == 0
    hog.release()
    cache.hogs.clear()
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("back-pressure-deadlock")
def test_reads_and_writes_do_not_starve_each_other():
    """A stage full of writes that a slow store keeps must leave room for reads, and the reverse."""
    cache = filled()
    for number in range(20, 26):
        cache.compute(prompt(number, 5))
    cache.step(work=False)
    write, read = (cache.stage.shares[way] for way in Direction)
    assert cache.stage.used(Direction.BACKUP) == write.ceiling
    cache.want("r", PROMPT)
    for _ in range(6):
        cache.threads["query"].run()
        cache.step(work=False)
    assert cache.stage.used(Direction.PREFETCH) >= 1
    for _ in range(20):
        cache.threads["fetch"].run()
        cache.step(work=False)
    assert cache.tree.check_prefetch_progress("r"), "reads went on while no write ended"
    cache.settle_until_ready("r")
    assert cache.held_tokens(PROMPT) == 8 * PAGE
    check_idle(cache)


@pytest.mark.hazard("copy-not-ordered")
def test_a_batch_waits_for_the_copy():
    """The batch that a request is loaded for gets the layer counter of its own copy to wait for;
    so do those after it while the copy runs, and none when it has ended. The first one need not
    have waited: SGLang may have found no place in it for the request, and of a batch without a
    prefix FlashInfer reads nothing."""
    cache = filled()
    cache.want("r", PROMPT)
    assert cache.tree.ready_to_load_host_cache() == -1
    reach(cache, State.STAGED)
    assert cache.tree.ready_to_load_host_cache() == -1
    cache.slow = True
    cache.buffer.prefetches.load("r", 0, 8 * PAGE)
    index = cache.tree.ready_to_load_host_cache()
    counter = cache.tree.cache_controller.layer_done_counter
    assert index == max(0, counter.producer_index)
    assert cache.tree.ready_to_load_host_cache() == index
    cache.slow = False
    cache.settle()
    assert cache.tree.ready_to_load_host_cache() == -1


@pytest.mark.hazard("copy-not-ordered")
def test_a_copy_without_a_batch():
    """A request that was loaded and then found no place in a batch: the copy is made all the same,
    and every batch waits for it while it runs."""
    cache = filled()
    cache.want("r", PROMPT)
    reach(cache, State.STAGED)
    cache.buffer.prefetches.load("r", 0, 8 * PAGE)
    cache.slow = True
    cache.step()
    assert [cache.tree.ready_to_load_host_cache() >= 0 for _ in range(2)] == [True, True]
    cache.slow = False
    cache.settle()
    assert cache.tree.ready_to_load_host_cache() == -1 and cache.held_tokens(PROMPT) == 8 * PAGE
    check_idle(cache)


@pytest.mark.parametrize("alone", [False, True])
def test_a_burst_with_one_prefix_reads_it_once(alone: bool):
    """Each on its own, sixteen requests would read the prefix sixteen times, through a stage that
    is too small for one."""
    cache = filled(pages=8, tokens=80 * PAGE, alone=alone)
    prompts = {f"r{number}": prompt(50 + number, 1, base=PROMPT) for number in range(16)}
    for rid, tokens in prompts.items():
        cache.want(rid, tokens)
    admit_in_line(cache, prompts, lambda: check(cache))
    fetched = [key for method, keys in cache.store.calls for key in keys if "get" in method]
    assert len(fetched) == len(set(fetched)) == 9
    assert cache.held_tokens(PROMPT) == 9 * PAGE
    cache.settle()
    check_idle(cache)


def admit_in_line(cache: Cache, prompts: dict[str, list[int]], after: Any = lambda: None) -> int:
    """Steps of a scheduler that admits all that are ready, first in line first; tokens of hits."""
    hits = 0
    for _ in range(200):
        if not prompts:
            return hits
        cache.buffer.prefetches.in_line(prompts)
        cache.step()
        for rid in list(prompts):
            if cache.tree.check_prefetch_progress(rid):
                hits += cache.compute(prompts.pop(rid), rid=rid)
        after()
    raise AssertionError(f"never admitted: {list(prompts)}: {cache.describe()}")


def test_a_burst_whose_first_read_fails():
    """Those who waited for it fetch for themselves."""
    cache = filled(tokens=80 * PAGE)
    for number in range(3):
        cache.want(f"r{number}", prompt(50 + number, 1, base=PROMPT))
    for _ in range(2):
        cache.step()
    cache.store.fail("batch_get_v1")
    prompts = {f"r{number}": prompt(50 + number, 1, base=PROMPT) for number in range(3)}
    del prompts["r0"]
    for _ in range(4):
        cache.step()
    assert cache.state("r0") is State.MISSED
    for _ in range(4):
        cache.step()
    assert cache.tree.check_prefetch_progress("r1")
    assert not cache.tree.check_prefetch_progress("r2"), "it waits for the one before it"
    assert cache.compute(prompts["r1"], rid="r1") == 9 * PAGE
    assert cache.tree.check_prefetch_progress("r2")
    assert cache.compute(prompts["r2"], rid="r2") == 9 * PAGE
    cache.tree.release_aborted_request("r0")
    cache.settle()
    check_idle(cache)
