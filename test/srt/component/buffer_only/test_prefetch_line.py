"""Many queued requests: the order of their fetches, the return of staging pages, and requests that
must not block others."""

from __future__ import annotations

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import nodes
from component.buffer_only.scenes import admit_in_line, steps, stored
from component.buffer_only.test_prefetch import pages_fetched
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.stage import Direction

#: More requests in front than a step checks.
SKIPPED = [f"skipped {number}" for number in range(20)]


def in_line(cache: Cache, prompts: list[list[int]]) -> dict[str, list[int]]:
    """Start prefetches of new requests r0, r1 and so on. Return their prompts by id."""
    line = {f"r{number}": tokens for number, tokens in enumerate(prompts)}
    for rid, tokens in line.items():
        cache.want(rid, tokens)
    return line


def states(cache: Cache, rids: object) -> list[str | None]:
    """Return the names of the requests' states."""
    of_requests = [cache.state(rid) for rid in rids]
    return [state and state.name for state in of_requests]


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize("stage", [16, 200])
def test_many_requests_with_long_prefixes_on_the_device(stage: int):
    """Guards against hits that are lost, or wait for locks, on a full device: thirty requests with
    ten pages in the tree and nineteen in the store each, and room for two thirds of them."""
    anchors = [prompt(number, 10) for number in range(30)]
    prompts = [prompt(100 + number, 20, base=anchors[number]) for number in range(30)]
    cache = stored(*prompts, pages=stage, tokens=600 * PAGE)
    for tokens in anchors:
        cache.compute(tokens)
    cache.settle()
    line = in_line(cache, prompts)
    steps(cache, 5)
    assert cache.tree.protected_size() == 0
    assert admit_in_line(cache, line, after=Cache.describe) == 30 * 29 * PAGE
    assert cache.buffer.context.counters["prefetch_timeouts"] == 0


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize("late", [False, True])
def test_first_in_line_is_fetched_first(late: bool):
    """Guards against fetches in the order of arrival instead of the scheduler's. If that order
    comes late, the last queued request gives its pages to the first one, and is fetched again."""
    prompts = [prompt(number, 5) for number in range(4)]
    cache = stored(*prompts)
    line = in_line(cache, prompts)
    order = {rid: line[rid] for rid in ("r3", "r0", "r1", "r2")}
    if late:
        steps(cache, 6)
        assert states(cache, order) == ["FOUND", "STAGED", "STAGED", "STAGED"]
    cache.buffer.prefetches.in_line(order)
    assert not cache.tree.check_prefetch_progress("r3")
    steps(cache, 1, work=not late)
    steps(cache, 0 if late else 5)
    first_state = "FETCHING" if late else "STAGED"
    assert states(cache, order) == [first_state, "STAGED", "STAGED", "FOUND"]
    assert cache.stage.used(Direction.PREFETCH) == 12
    assert admit_in_line(cache, order) == 4 * 4 * PAGE


def test_a_burst_with_one_prefix_reads_it_once():
    """Guards against a prefix that each of sixteen requests reads, through a stage that is too
    small for one."""
    base = prompt(1, 9)
    cache = stored(base, pages=8, tokens=80 * PAGE)
    admit_in_line(cache, in_line(cache, [prompt(50 + n, 1, base=base) for n in range(16)]))
    fetched = pages_fetched(cache)
    assert len(fetched) == len(set(fetched)) == 9


def test_a_burst_whose_first_read_fails():
    """Guards against requests that miss because they waited for another one's failed fetch."""
    base = prompt(1, 9)
    cache = stored(base, tokens=80 * PAGE)
    line = in_line(cache, [prompt(50 + number, 1, base=base) for number in range(3)])
    steps(cache, 2)
    cache.store.fail("batch_get_v1")
    steps(cache, 8)
    assert cache.state("r0") is State.MISSED and cache.tree.check_prefetch_progress("r1")
    assert not cache.tree.check_prefetch_progress("r2"), "r2 waits for the fetch of r1"
    for rid in ("r1", "r2"):
        assert cache.tree.check_prefetch_progress(rid)
        assert cache.compute(line[rid], rid=rid) == 9 * PAGE


def test_a_request_that_waits_for_the_stage_uses_the_tree():
    """Guards against a prefix that is evicted because it looks old: a waiting request is matched
    only when the tree has more of its prompt, not in each step, and that must mark its prefix as
    used."""
    base = prompt(1, 4)
    tokens = prompt(2, 6, base=base)
    cache = stored(tokens, tokens=200 * PAGE)
    cache.compute(base)
    cache.settle()
    cache.hog()
    cache.want("r", tokens)
    steps(cache, 4)
    assert not cache.tree.check_prefetch_progress("r")
    (shared,) = nodes(cache.tree)
    used = shared.last_access_time
    cache.compute(prompt(99, 4))
    assert not cache.tree.check_prefetch_progress("r") and shared.last_access_time > used
    cache.compute(tokens[:-1])  # by another request
    for _ in range(2):  # SGLang may have had no place for the request
        assert cache.tree.check_prefetch_progress("r")
    cache.evict(1000)  # evicts it again, with its ancestors
    assert not cache.tree.check_prefetch_progress("r")
    cache.unhog()
    assert cache.run("r", tokens) == 9 * PAGE


# ---- metrics ----


def test_times_of_the_states():
    """Guards against histograms that attribute a request's time to the wrong state."""
    tokens = prompt(1, 5)
    cache = stored(tokens)
    spent: dict[str, float] = {}
    cache.buffer.context.observe = spent.__setitem__
    cache.want("r", tokens)
    for seconds in (1.0, 2.0, 4.0, 8.0, 16.0):
        cache.now += seconds
        cache.step()
    assert cache.compute(tokens, rid="r") == 4 * PAGE
    cache.now += 32.0
    cache.settle()
    assert spent == {
        "prefetch_query_seconds": 3.0,
        "prefetch_wait_seconds": 0.0,
        "prefetch_fetch_seconds": 4.0,
        "prefetch_staged_seconds": 24.0,
        "load_back_seconds": 32.0,
    }


# ---- requests that SGLang skips, for example without a slot for their LoRA adapter ----


def loop(cache: Cache, line: dict[str, list[int]], skipped: list[str]) -> str | None:
    """Run steps of SGLang's scheduler, which does not poll the prefetches of skipped requests.
    Return the first request that it could run, which must hit all its pages but the last."""
    for _ in range(20):
        cache.buffer.prefetches.in_line(line)
        steps(cache, 1)
        for rid in line:
            if rid not in skipped and cache.tree.check_prefetch_progress(rid):
                tokens = line.pop(rid)
                assert cache.compute(tokens, rid=rid) == len(tokens) // PAGE * PAGE - PAGE
                return rid
    return None


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize(("skipped", "pages"), [(SKIPPED, 12), (SKIPPED[:1], 20)])
def test_skipped_requests_delay_no_other(skipped: list[str], pages: int):
    """Guards against requests that wait until their time limit, and then compute, behind skipped
    ones: twenty whose pages fill the stage, or one with a hit larger than the stage, polled
    once."""
    rids = [*skipped, "r1", "r2"]
    prompts = {rid: prompt(number, pages) for number, rid in enumerate(rids)}
    cache = stored(*prompts.values(), tokens=400 * PAGE)
    line = {rid: prompts[rid] for rid in skipped}
    for rid, tokens in line.items():
        cache.want(rid, tokens)
    if len(skipped) == 1:
        cache.step(work=False)
        assert not cache.tree.check_prefetch_progress(*skipped)
    else:
        for _ in range(8):
            cache.buffer.prefetches.in_line(line)
            steps(cache, 1)
        assert cache.stage.capacity(Direction.PREFETCH) == 0
    for rid in ("r1", "r2"):
        line[rid] = prompts[rid]
        cache.want(rid, line[rid])
        assert loop(cache, line, skipped) == rid
    assert loop(cache, line, skipped[1:]) == skipped[0], (
        "when it can run, its pages are fetched again"
    )
    assert cache.now == 0 and not cache.buffer.context.counters["prefetch_timeouts"]


def test_a_polled_request_keeps_its_staged_pages():
    """Guards against pages that are fetched twice: the first request has half of its hit in the
    stage, the rest is being fetched, and requests behind it are polled too."""
    prompts = [prompt(number, 13) for number in range(2)]
    cache = stored(*prompts, tokens=100 * PAGE)
    line = in_line(cache, prompts)
    steps(cache, 2)
    cache.threads["fetch"].run(1)
    for _ in range(4):
        cache.buffer.prefetches.in_line(line)
        steps(cache, 1, work=False)
        assert not any(cache.tree.check_prefetch_progress(rid) for rid in line)
        assert cache.buffer.prefetches.loadable("r0", 0, 1000) == 6 * PAGE
    assert loop(cache, line, []) == "r0"


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize("how", ["aborted", "gone", "out of time"])
def test_the_next_request_follows_one_that_leaves_the_queue(how: str):
    """Guards against requests that are not checked because the one before them waited and left."""
    prompts = [prompt(3, 9), prompt(1, 9)]
    cache = stored(*prompts)
    cache.hog()
    line = in_line(cache, prompts)
    steps(cache, 4)
    assert states(cache, line) == ["FOUND", "FOUND"]
    assert cache.buffer.context.counters["prefetch_deferred_tokens"] == 8 * PAGE
    if how == "aborted":
        cache.tree.release_aborted_request("r0")
    elif how == "gone":
        cache.buffer.prefetches.in_line(["r1"])
    else:
        assert not cache.tree.check_prefetch_progress("r0")
        steps(cache, 1)
        cache.now += 10.1
        steps(cache, 1)
        assert cache.tree.check_prefetch_progress("r0")
    steps(cache, 1)
    assert cache.buffer.context.counters["prefetch_deferred_tokens"] == 16 * PAGE
    assert cache.tree.check_prefetch_progress("r0")
    cache.unhog()
    assert cache.run("r1", line["r1"]) == 8 * PAGE
