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
    """WAITING holds nothing, a pin comes with the query, staging pages with the fetch, and they go
    as soon as the copy to the device has ended, admitted or not."""
    cache = filled()
    cache.want("r", PROMPT)
    read = cache.prefetch("r")
    assert read.state is State.WAITING and read.pin is None
    for state, pinned, pages in [
        (State.QUERYING, True, 0),
        (State.FETCHING, True, 6),
        (State.FETCHING, True, 6 + 2),
        (State.DONE, True, 2),
    ]:
        cache.step(work=cache.state("r") is not State.QUERYING or state is not State.QUERYING)
        check(cache)
        assert (read.state, read.pin is not None, cache.stage.used()) == (state, pinned, pages)
    cache.step()
    assert cache.stage.used() == 0 and read.state is State.DONE
    assert cache.tree.check_prefetch_progress("r") and read.pin is None
    assert cache.compute(PROMPT) == 8 * PAGE
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("host-pool-size")
def test_allocated_by_the_hit_and_not_by_the_request():
    """A hundred pages asked for, three there: a stage of any size must not be taken by a miss."""
    cache = filled(3)
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
    assert cache.compute(tokens) == 29 * PAGE and cache.stage.peak <= 4
    assert cache.tree.take_storage_hit("r") == 29 * PAGE
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("prefix-under-prefetch")
@pytest.mark.parametrize("state", list(State)[:6])
@pytest.mark.parametrize("late", [False, True])
def test_abort_in_every_state(state: State, late: bool):
    """Pin and references go at once; staging pages when the store has let go of them; the answer
    of the store, before the abort or after, changes nothing any more."""
    cache = filled()
    cache.want("r", PROMPT)
    reach(cache, state)
    if late:
        cache.work()
    cache.tree.release_aborted_request("r")
    assert cache.prefetch("r") is None and cache.tree.pop_prefetch_loaded_tokens("r") == 0
    assert all(node.host_ref_counter == 0 for node in nodes(cache.tree))
    check(cache)
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("staging-pages")
@pytest.mark.parametrize("state", list(State)[1:6])
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
@pytest.mark.parametrize("state", list(State)[:6])
def test_flush_in_every_state(state: State):
    """A flush ends every read; answers that come after it free their pages and touch no node of
    the new tree."""
    cache = filled()
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
@pytest.mark.parametrize(
    "state", [State.QUERYING, State.FOUND, State.FETCHING, State.STAGED, State.DONE]
)
def test_the_anchor_survives_eviction_and_splits(state: State):
    """Unpinned, it would be evicted, or its half be taken for the whole, while the store works."""
    cache = filled()
    cache.compute(PROMPT[: 4 * PAGE])
    cache.settle()
    cache.want("r", PROMPT)
    reach(cache, state)
    anchor = cache.prefetch("r").pin.node
    assert cache.evict(10_000) == 0
    cache.match(PROMPT[: 2 * PAGE])
    assert anchor.parent.parent is not None, "it was split"
    check(cache)
    cache.settle_until_ready("r")
    assert cache.held_tokens(PROMPT) == 8 * PAGE
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("slots-freed-under-copy")
def test_pages_on_their_way_to_the_device_are_kept():
    """Evicted before the copy has ended, the slots would be another request's when it lands; given
    back, the staging pages would be filled with something else while they are read."""
    cache = filled(pages=32, tokens=80 * PAGE)
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    cache.slow = True
    cache.step()
    (load,) = cache.buffer.prefetches.load_backs.under_way
    cache.tree.release_aborted_request("r")
    assert cache.evict(10_000) == 0 and cache.stage.used(Direction.PREFETCH) == 8
    assert load.staging.live and load.node.lock_ref == 1
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
    """Published as well, its pages would be in the tree twice, or those of the copy be freed under
    it; only what is still missing is published."""
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
    """A fetched hit that the device has no room for is dropped; the request computes when it
    can."""
    cache = filled()
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    taken = cache.allocator.alloc(cache.allocator.available_size())
    cache.step()
    assert cache.tree.check_prefetch_progress("r") and cache.stage.used() == 0
    assert cache.buffer.context.counters["prefetch_unfulfilled_tokens"] == 8 * PAGE
    cache.allocator.free(taken)
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
    assert cache.tree.check_prefetch_progress("r") and cache.stage.used() == 6
    assert cache.buffer.context.counters["prefetch_timeouts"] == 1
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("state", list(State)[:6])
def test_time_runs_out_in_every_state(state: State):
    """The request computes, and nothing of its prefetch is kept but what the store may still use.
    One that is fetched, and that nobody claims, is let go as well."""
    cache = filled()
    cache.want("r", PROMPT)
    reach(cache, state)
    if state is not State.DONE:
        assert not cache.tree.check_prefetch_progress("r")
    cache.slow = True  # a copy that runs keeps its own lock, and no other
    cache.now += 10.1
    cache.step(work=False)
    assert cache.prefetch("r") is None and cache.tree.check_prefetch_progress("r")
    assert all(node.host_ref_counter == 0 for node in nodes(cache.tree))
    assert not any(read.pin for read in cache.buffer.prefetches.running)
    cache.slow = False
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
    cache.settle()
    check_idle(cache)


def test_the_policy_best_effort_never_waits():
    """It takes what has arrived by the time of admission."""
    cache = filled(settings={"policy": "best_effort"})
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    assert cache.tree.check_prefetch_progress("r")
    cache.settle()
    cache.want("s", PROMPT)
    cache.settle_until_done("s")
    assert cache.tree.check_prefetch_progress("s") and cache.held_tokens(PROMPT) == 8 * PAGE
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
    hog.release()
    cache.hogs.clear()
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("prefix-under-prefetch")
def test_pins_are_capped_and_go_after_a_while():
    """Prefetched prefixes of requests that are not admitted must leave the device to those that
    are: half of it, and not for ever."""
    cache = Cache(pages=64, tokens=40 * PAGE, settings={"hold_ms": 1000})
    prompts = [prompt(number, 9) for number in range(6)]
    for tokens in prompts:
        cache.compute(tokens)
        cache.settle()
    cache.flush()
    for number, tokens in enumerate(prompts):
        cache.want(f"r{number}", tokens)
    for _ in range(30):
        cache.step()
        check(cache)  # asserts the cap
    states = [cache.state(f"r{number}") for number in range(6)]
    assert states == [State.DONE] * 2 + [State.FOUND] * 4
    assert cache.tree.protected_size() == 2 * 8 * PAGE
    cache.now += 1.1
    for _ in range(30):
        cache.step()
        check(cache)
    assert [cache.state(f"r{number}") for number in range(4)] == [None, None, *[State.DONE] * 2]
    for number in range(6):
        cache.tree.release_aborted_request(f"r{number}")
    cache.settle()
    check_idle(cache)


def test_a_prefix_that_alone_would_pin_too_much():
    """It is fetched as far as the cap goes, rather than waiting for room that never comes."""
    cache = Cache(pages=64, tokens=40 * PAGE)
    tokens = prompt(1, 30)
    cache.compute(tokens)
    cache.settle()
    cache.flush()
    assert cache.serve("r", tokens) == 20 * PAGE
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
    cache.threads["query"].run(), cache.threads["fetch"].run()
    for _ in range(20):
        cache.step(work=False)
        cache.threads["fetch"].run()
    assert cache.held_tokens(PROMPT) == 8 * PAGE, "reads went on while no write ended"
    cache.tree.release_aborted_request("r")
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("copy-not-ordered")
def test_a_batch_waits_for_the_copy():
    """The batch that is formed in the step of the publication, or in any later one before the copy
    has ended, gets the layer counter to wait for."""
    cache = filled()
    cache.want("r", PROMPT)
    assert cache.tree.ready_to_load_host_cache() == -1
    reach(cache, State.FETCHING)
    cache.step()
    index = cache.tree.ready_to_load_host_cache()
    counter = cache.tree.cache_controller.layer_done_counter
    assert index == counter.producer_index >= 0
    cache.settle_until_done("r")
    cache.tree.release_aborted_request("r")
    cache.settle()
    assert cache.tree.ready_to_load_host_cache() == -1


def test_a_burst_with_one_prefix_reads_it_once():
    """Each on its own, sixteen requests would read the prefix sixteen times, through a stage that
    is too small for one."""
    cache = filled(pages=8, tokens=80 * PAGE)
    rids = [f"r{number}" for number in range(16)]
    for number, rid in enumerate(rids):
        cache.want(rid, prompt(50 + number, 1, base=PROMPT))
    for _ in range(60):
        cache.step()
        check(cache)
    assert [cache.state(rid) for rid in rids] == [State.DONE] * 16
    fetched = [key for method, keys in cache.store.calls for key in keys if "get" in method]
    assert len(fetched) == len(set(fetched)) == 9
    for rid in rids:
        assert cache.tree.check_prefetch_progress(rid)
    assert cache.held_tokens(PROMPT) == 9 * PAGE
    cache.settle()
    check_idle(cache)


def test_a_burst_whose_first_read_fails():
    """Those who waited for it fetch for themselves."""
    cache = filled(tokens=80 * PAGE)
    for number in range(3):
        cache.want(f"r{number}", prompt(50 + number, 1, base=PROMPT))
    for _ in range(2):
        cache.step()
    cache.store.fail("batch_get_v1")
    for number in range(3):
        cache.settle_until_done(f"r{number}")
    assert cache.held_tokens(PROMPT) == 9 * PAGE
    for number in range(3):
        cache.tree.check_prefetch_progress(f"r{number}")
    cache.settle()
    check_idle(cache)
