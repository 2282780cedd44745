"""One request's prefix on its way from the store: how much is queried, interruptions in each state,
and the time that the request waits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, nodes
from component.buffer_only.scenes import reach, steps, stored
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.prefetch_line import MOST_ANEW
from sglang.srt.mem_cache.buffer_only.stage import Direction

PROMPT = prompt(1, 9)
STATES = list(State)[:5]
#: Number of staging pages in each state.
HELD = dict(zip(STATES, (0, 0, 0, 8, 8), strict=True))


def pages_fetched(cache: Cache) -> list[str]:
    return [key for keys in cache.store.asked("batch_get_v1") for key in keys]


# ---- how much is queried ----


@pytest.mark.hazard("host-pool-size", "worthless-prefetch")
@pytest.mark.parametrize(
    ("in_store", "in_tree", "tokens", "threshold", "queried", "hit"),
    [
        (9, 0, PROMPT[: 8 * PAGE], 1, [1, 6], 7),  # at least one token is computed
        (9, 0, PROMPT[: 8 * PAGE + 1], 1, [1, 7], 8),
        (9, 0, PROMPT[: 9 * PAGE - 1], 1, [1, 7], 8),
        (9, 0, PROMPT, 1, [1, 7], 8),
        (3, 0, [*PROMPT[: 3 * PAGE], *prompt(7, 100)], 1, [1, 101], 3),  # pages only for the hit
        (9, 0, prompt(7, 9), 3, [3], 0),  # for a miss, only the smallest hit is hashed
        (9, 0, PROMPT, 3, [3, 5], 8),
        (3, 0, PROMPT[: 3 * PAGE], 4, [], 0),  # a prompt, a hit and a rest below the threshold
        (3, 0, PROMPT, 4, [4], 0),
        (9, 6, PROMPT, 4, [], 6),
        (9, 4, PROMPT, 1, [1, 3], 8),
    ],
)
def test_how_much_is_queried(
    in_store: int, in_tree: int, tokens: list[int], threshold: int, queried: list[int], hit: int
):
    """Guards against staging pages for a miss, and against queries for pages without use."""
    settings = {"prefetch_threshold": threshold * PAGE}
    cache = stored(PROMPT[: in_store * PAGE], tokens=120 * PAGE, settings=settings)
    cache.compute(PROMPT[: in_tree * PAGE])
    cache.want("r", tokens)
    if len(queried) == 2:
        reach(cache, State.FETCHING)
        assert cache.stage.used(Direction.PREFETCH) == hit - in_tree
    assert cache.run("r", tokens) == hit * PAGE
    assert list(map(len, cache.store.asked("batch_exists"))) == queried
    assert len(pages_fetched(cache)) == hit - in_tree


def test_a_hit_larger_than_the_stage_comes_in_rounds():
    """Guards against a small stage that cuts every long prefix."""
    tokens = prompt(3, 30)
    cache = stored(tokens, pages=4, tokens=80 * PAGE)
    assert cache.serve("r", tokens) == 29 * PAGE and cache.stage.peak <= 4
    assert cache.tree.take_storage_hit("r") == 29 * PAGE


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize("step", range(2, 10))
def test_a_round_that_is_evicted_is_fetched_again(step: int):
    """Guards against a staging buffer full of pages whose prefix was evicted: nothing could be
    fetched, and all requests would wait until the time limit."""
    tokens = prompt(3, 30)
    cache = stored(tokens, pages=8, tokens=80 * PAGE)
    cache.want("r", tokens)
    for _ in range(step):
        cache.step()
        assert not cache.tree.check_prefetch_progress("r")
    cache.evict(1000)
    assert cache.run("r", tokens) == 29 * PAGE


@pytest.mark.hazard("back-pressure-deadlock")
def test_a_round_that_is_evicted_while_the_device_has_no_room():
    """Guards against a request without room whose evicted round lets others pass: requests behind
    it would take every freed page until the time limit. It blocks the queue, and its round is
    fetched again when there is room, even without another event."""
    tokens = prompt(3, 30)
    cache = stored(tokens, pages=8, tokens=80 * PAGE)
    cache.want("r", tokens)
    while not cache.held_tokens(tokens):
        assert not cache.tree.check_prefetch_progress("r")
        cache.step()
    others_slots = cache.allocator.alloc(cache.allocator.available_size() - 4 * PAGE)
    for _ in range(8):
        assert cache.tree.check_prefetch_progress("r")
        cache.step()
    assert cache.evict(1000) and cache.compute(prompt(4, 4)) == 0
    cache.allocator.free(others_slots)
    assert cache.run("r", tokens) == 29 * PAGE


# ---- interruptions in each state ----


def interrupt(cache: Cache, event: str) -> None:
    """Interrupt the prefetch of ``r``, of eight pages."""
    match event:
        case "the client leaves":
            cache.tree.release_aborted_request("r")
        case "flush":
            cache.flush()
        case "the store is cleared":
            assert cache.tree.clear_storage_backend() and not cache.store.content
        case "the request is sent again":
            cache.want("r", PROMPT)
        case "its time is over":
            cache.tree.check_prefetch_progress("r")
            cache.now += 10.1
            cache.step(work=False)
            assert cache.tree.check_prefetch_progress("r")
        case "another computes half of it":
            cache.compute(PROMPT[: 4 * PAGE])
        case "nothing":
            pass


@pytest.mark.hazard(
    "prefix-under-prefetch", "staging-pages", "flush-or-detach-under-way", "stale-beliefs"
)
@pytest.mark.parametrize("answered", [False, True], ids=["before the answer", "after the answer"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("event", "hit"),
    [
        ("nothing", 8),
        ("the client leaves", None),
        ("flush", None),
        ("the store is cleared", None),
        ("the request is sent again", 8),
        ("its time is over", 0),
        ("another computes half of it", 8),
    ],
)
def test_interruptions_in_each_state(state: State, event: str, hit: int | None, answered: bool):
    """Guards against staging pages reused while a store call may access them, device pages that
    stay locked, late answers that change something, and KV of the old tree in a new one."""
    cache = stored(PROMPT, tokens=80 * PAGE)
    cache.want("r", PROMPT)
    cache.want("other", prompt(8, 4))
    reach(cache, state)
    assert cache.stage.used() == HELD[state] and cache.tree.protected_size() == 0
    if answered:
        cache.work()
    interrupt(cache, event)
    check(cache)
    if hit is None:
        assert cache.prefetch("r") is None and nodes(cache.tree) == []
        cache.compute(PROMPT)
        cache.buffer.prefetches.in_line([])
        cache.settle()
        assert len(cache.store.content) == 9 and all(n.storage_backed for n in nodes(cache.tree))
        return
    late = event == "its time is over" and (state is State.STAGED or answered)
    assert late or cache.run("r", PROMPT) == hit * PAGE


@pytest.mark.hazard("prefix-under-prefetch")
@pytest.mark.parametrize("state", STATES[1:])
@pytest.mark.parametrize(("how", "evicted"), [("split", 0), ("half evicted", 2), ("evicted", 4)])
def test_the_prefix_in_the_tree_may_be_evicted_or_split(state: State, how: str, evicted: int):
    """Guards against a waiting request that locks its prefix in the tree, in the way of running
    ones. An evicted prefix is fetched like the rest, and staged pages are not fetched again."""
    cache = stored(PROMPT)
    cache.compute(PROMPT[: 2 * PAGE])
    cache.compute(PROMPT[: 4 * PAGE])
    cache.settle()
    cache.want("r", PROMPT)
    reach(cache, state)
    for _ in range(evicted // 2):
        assert cache.evict(1) == 2 * PAGE
    if how == "split":
        cache.match(PROMPT[:PAGE])
    check(cache)
    assert cache.run("r", PROMPT) == 8 * PAGE
    fetched = pages_fetched(cache)
    assert len(fetched) == len(set(fetched)) == 4 + evicted
    assert cache.buffer.context.counters["prefetch_hit_tokens"] == (4 + evicted) * PAGE


@pytest.mark.hazard("prefix-under-prefetch")
@pytest.mark.parametrize("in_tree", [4, 9])
@pytest.mark.parametrize("left", [0, 2])
def test_an_evicted_prefix_is_fetched_if_the_store_added_nothing(in_tree: int, left: int):
    """Guards against a prefix that is computed although the store has it: requests wait (on a
    prefill server for their decode server) while other requests evict their hit."""
    cache = stored(PROMPT[: in_tree * PAGE])
    cache.compute(PROMPT[: 2 * PAGE])
    cache.compute(PROMPT[: in_tree * PAGE])
    cache.settle()
    cache.want("r", PROMPT)
    steps(cache, 6)
    while cache.held_tokens(PROMPT) > left * PAGE:
        cache.evict(1)
    assert cache.run("r", PROMPT) == min(in_tree, 8) * PAGE


def test_a_prefix_that_is_evicted_again_and_again():
    """Guards against a request that waits for ever because other requests evict its prefix each
    time that it was computed: after a few new queries it computes."""
    cache = stored(PROMPT)
    ready = []
    while True not in ready and len(ready) < 20:
        cache.compute(PROMPT[: 4 * PAGE])
        if not ready:
            cache.want("r", PROMPT)
        steps(cache, 6)
        assert cache.state("r") is State.STAGED
        assert cache.evict(1000) == 4 * PAGE
        ready.append(cache.tree.check_prefetch_progress("r"))
    assert ready == [False] * MOST_ANEW + [True]
    assert cache.compute(PROMPT, rid="r") == 0


@pytest.mark.hazard("slots-freed-under-copy")
@pytest.mark.parametrize("pages", [1, 4, 6, 9])
def test_another_request_computes_the_prefix_first(pages: int):
    """Guards against pages that are in the tree twice, and against a copy's pages that are freed
    under it: only the missing pages are loaded."""
    cache = stored(PROMPT, pages=32, tokens=80 * PAGE)
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    cache.work()
    cache.compute(PROMPT[: pages * PAGE])
    assert cache.run("r", PROMPT) == 8 * PAGE
    assert cache.tree.take_storage_hit("r") == max(0, 8 - pages) * PAGE


@pytest.mark.hazard("slots-freed-under-copy")
def test_pages_on_their_way_to_the_device_are_kept():
    """Guards against slots evicted before their copy has ended, which would overwrite another
    request's KV, and against staging pages that are reused while they are read."""
    cache = stored(PROMPT, pages=32, tokens=80 * PAGE)
    cache.want("r", PROMPT)
    reach(cache, State.STAGED)
    cache.slow = True
    _, node = cache.buffer.prefetches.load("r", 0, 8 * PAGE)
    cache.buffer.prefetches.load_backs.launch()
    cache.tree.release_aborted_request("r")
    for _ in range(3):
        assert cache.evict(10_000) == 0 and cache.stage.used(Direction.PREFETCH) == 8
        assert node.lock_ref == 1
        steps(cache, 1)
    cache.slow = False
    cache.step()
    assert cache.stage.used() == 0 and node.lock_ref == 0


@pytest.mark.hazard("copy-not-ordered")
@pytest.mark.parametrize("with_batch", [True, False])
def test_batches_wait_for_the_copy(with_batch: bool):
    """Guards against a batch that does not wait for a running copy: the request's own batch waits,
    and so do later ones, even if the request found no place in a batch; none waits after the copy.
    The first batch's wait alone is not enough, because FlashInfer reads nothing for a batch without
    a prefix."""
    cache = stored(PROMPT)
    cache.want("r", PROMPT)
    assert cache.tree.ready_to_load_host_cache() == -1
    reach(cache, State.STAGED)
    assert cache.tree.ready_to_load_host_cache() == -1
    cache.slow = True
    cache.buffer.prefetches.load("r", 0, 8 * PAGE)
    if not with_batch:
        cache.step()
    counter = cache.tree.cache_controller.layer_done_counter
    waits = [cache.tree.ready_to_load_host_cache() for _ in range(2)]
    assert waits == [max(0, counter.producer_index)] * 2
    cache.slow = False
    cache.settle()
    assert cache.tree.ready_to_load_host_cache() == -1 and cache.held_tokens(PROMPT) == 8 * PAGE


# ---- answers of the store ----


@pytest.mark.hazard("store-exception")
@pytest.mark.parametrize("method", ["batch_exists", "batch_get_v1", "nonsense", "internal error"])
def test_a_store_that_fails_costs_a_hit(method: str):
    """Guards against an exception, of the store or internal, that costs more than a hit."""
    cache = stored(PROMPT)
    if method == "nonsense":
        cache.store.answer("batch_get_v1", lambda _: method)
    elif method == "internal error":
        cache.client.read = mock.Mock(side_effect=KeyError(method))
    else:
        cache.store.fail(method)
    assert cache.serve("r", PROMPT) == 0
    vars(cache.client).pop("read", None)
    cache.settle()
    cache.flush()
    assert cache.serve("again", PROMPT) == 8 * PAGE


@pytest.mark.hazard("stale-beliefs", "holes-in-answers")
@pytest.mark.parametrize("lost", range(8))
@pytest.mark.parametrize("how", ["drop", "shorten", "hole"])
def test_only_leading_pages_count(lost: int, how: str):
    """Guards against pages that count behind a missing one: page number ``lost`` is gone since the
    query, or short, or reported missing."""
    cache = stored(PROMPT, pages=32, tokens=80 * PAGE)
    cache.want("r", PROMPT)
    reach(cache, State.QUERYING)
    cache.threads["query"].run()
    key = list(cache.store.content)[lost]
    if how == "drop":
        cache.store.drop(key)
    elif how == "shorten":
        cache.store.shorten(key)
    else:
        cache.store.answer("batch_get_v1", lambda r: [index != lost for index in range(len(r))])
    assert cache.run("r", PROMPT) == lost * PAGE
    assert cache.buffer.context.counters["prefetch_unfulfilled_tokens"] == (8 - lost) * PAGE
    check(cache)
    cache.settle()
    assert key in cache.store.content, "the lost page is written again"


# ---- how long a request waits ----


@pytest.mark.parametrize(
    ("settings", "limit_s"),
    [
        ({}, 10.0),
        ({"prefetch_timeout_ms": 1000}, 1.0),
        # As in SGLang: a base, plus an amount for each of its eight pages.
        ({"policy": "timeout", "timeout_base_ms": 100, "timeout_page_ms": 10}, 0.18),
        ({"policy": "best_effort"}, None),
    ],
    ids=["default", "set", "by length", "no wait"],
)
def test_how_long_a_request_waits_for_a_silent_store(
    settings: dict[str, Any], limit_s: float | None
):
    """Guards against a wrong time limit, and against staging pages freed before the answer."""
    cache = stored(PROMPT, settings=settings)
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    if limit_s is not None:
        assert not cache.tree.check_prefetch_progress("r")
        cache.now += limit_s - 0.005
        cache.step(work=False)
        assert not cache.tree.check_prefetch_progress("r")
        cache.now += 0.01
        cache.step(work=False)
    assert cache.tree.check_prefetch_progress("r") and cache.stage.used() == 8
    assert cache.buffer.context.counters["prefetch_timeouts"] == (limit_s is not None)
    assert cache.compute(PROMPT, rid="r") == 0


def test_the_time_of_a_full_server_does_not_count():
    """Guards against a read timeout that runs while the server is full: all requests behind one
    long prompt lost their hits."""
    cache = stored(PROMPT)
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    for seconds, full in ((6.0, False), (60.0, True), (4.0, False), (0.1, False)):
        cache.buffer.prefetches.in_line(["r"], full)
        cache.step(work=False)
        assert full or not cache.tree.check_prefetch_progress("r")
        cache.now += seconds
    cache.buffer.prefetches.in_line(["r"])
    cache.step(work=False)
    assert cache.tree.check_prefetch_progress("r")
    assert cache.buffer.context.counters["prefetch_timeouts"] == 1


@pytest.mark.parametrize("policy", ["wait_complete", "timeout", "best_effort"])
@pytest.mark.parametrize("first", [True, False])
def test_pages_that_have_arrived_are_used(policy: str, first: bool):
    """Guards against a lost partial hit at the time limit, or for a request that does not wait.
    Pages behind a gap are not usable."""
    cache = stored(PROMPT, settings={"policy": policy})
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


@pytest.mark.parametrize("checked_early", [False, True])
def test_a_parked_prefix_does_not_expire(checked_early: bool):
    """Guards against a staged prefix that expires: a request may wait for minutes, even if the
    scheduler checked it before the prefix arrived."""
    cache = stored(PROMPT)
    cache.want("r", PROMPT)
    reach(cache, State.FETCHING)
    assert not (checked_early and cache.tree.check_prefetch_progress("r"))
    for _ in range(5):
        cache.step()
        cache.now += 60.0
    assert cache.run("r", PROMPT) == 8 * PAGE
    assert cache.buffer.context.counters["prefetch_timeouts"] == 0
