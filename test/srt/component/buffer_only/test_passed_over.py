"""Requests that the scheduler passes over, as SGLang does where a LoRA adapter has no slot: nobody
behind them waits for the pages that they have in the stage."""

from __future__ import annotations

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, check_idle
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.stage import Direction

#: More in front than are looked at in a step.
SKIPPED = [f"skipped {number}" for number in range(20)]


@pytest.fixture(params=[False, True], ids=["a rank of several", "the only rank"])
def cache(request: pytest.FixtureRequest) -> Cache:
    """``SKIPPED`` are in line, each with a hit of ten pages; the first has filled the stage."""
    found = Cache(alone=request.param, pages=16, tokens=400 * PAGE)
    for number in range(len(SKIPPED) + 2):
        found.compute(prompt(number, 12))
        found.settle()
    found.flush()
    for number, rid in enumerate(SKIPPED):
        found.want(rid, [*prompt(number, 12), 0])
    for _ in range(8):
        found.buffer.prefetches.in_line(SKIPPED)
        found.step()
    assert found.state(SKIPPED[0]) is State.STAGED
    assert found.stage.capacity(Direction.PREFETCH) == 0
    return found


def loop(cache: Cache, line: list[str], skipped: list[str], steps: int) -> str | None:
    """Steps of SGLang's scheduler, which asks for no prefetch of a request that it passes over; the
    first request that it could run."""
    for _ in range(steps):
        cache.buffer.prefetches.in_line(line)
        cache.step()
        check(cache, content=False)
        for rid in line:
            if rid not in skipped and cache.tree.check_prefetch_progress(rid):
                return rid
    return None


@pytest.mark.hazard("back-pressure-deadlock")
def test_who_is_passed_over_keeps_nobody_waiting(cache: Cache):
    """Each of those behind would wait for as long as it may, and then compute."""
    line = list(SKIPPED)
    for number in (20, 21):
        rid = f"r{number}"
        cache.want(rid, [*prompt(number, 12), 0])
        assert loop(cache, [*line, rid], SKIPPED, 10) == rid
        assert cache.buffer.prefetches.loadable(rid, 0, 12 * PAGE) == 12 * PAGE
        assert cache.compute([*prompt(number, 12), 0], rid=rid) == 11 * PAGE
    assert cache.now == 0 and not cache.buffer.context.counters["prefetch_timeouts"]
    # When it can run, its pages come anew.
    assert loop(cache, line, SKIPPED[1:], 10) == SKIPPED[0]
    assert cache.compute([*prompt(0, 12), 0], rid=SKIPPED[0]) == 11 * PAGE
    cache.buffer.prefetches.in_line([])
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize("alone", [False, True])
def test_who_is_passed_over_with_a_hit_larger_than_the_stage(alone: bool):
    """It was asked for once, when its adapter had a slot: those behind it would wait until its time
    is over, since only one such hit goes into the tree at a time."""
    cache = Cache(alone=alone, pages=16, tokens=400 * PAGE)
    prompts = [[*prompt(number, 20), 0] for number in range(3)]
    for tokens in prompts:
        cache.compute(tokens)
        cache.settle()
    cache.flush()
    line = ["skipped", "r1", "r2"]
    cache.want("skipped", prompts[0])
    cache.step(work=False)
    assert not cache.tree.check_prefetch_progress("skipped")
    for rid, tokens in zip(line[1:], prompts[1:], strict=True):
        cache.want(rid, tokens)
    for rid, tokens in zip(line[1:], prompts[1:], strict=True):
        assert loop(cache, line, ["skipped"], 20) == rid
        assert cache.compute(tokens, rid=rid) == 19 * PAGE
        line.remove(rid)
    assert loop(cache, line, [], 20) == "skipped"
    assert cache.compute(prompts[0], rid="skipped") == 19 * PAGE
    assert not cache.buffer.context.counters["prefetch_timeouts"]
    cache.buffer.prefetches.in_line([])
    cache.settle()
    check_idle(cache)


def test_only_those_with_pages_are_asked_for_them(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    """Of ten thousand in line few have any, and the stage is asked for its room once for each: in
    each step that would take longer than the step."""
    rooms, capacity = [], cache.stage.capacity
    monkeypatch.setattr(cache.stage, "capacity", lambda way: rooms.append(way) or capacity(way))
    prefetches = cache.buffer.prefetches
    prefetches._take_from_the_last(prefetches.line.get(SKIPPED[1]), 12)
    assert len(rooms) == 1 and cache.state(SKIPPED[0]) is State.STAGED


def test_who_is_asked_for_keeps_what_it_has():
    """One in front, half of whose hit is in the stage while the rest is on its way: those behind it
    are asked for too, and would have its pages fetched twice."""
    cache = Cache(pages=16, tokens=100 * PAGE)
    line = {f"r{number}": [*prompt(number, 12), 0] for number in range(2)}
    for tokens in line.values():
        cache.compute(tokens)
        cache.settle()
    cache.flush()
    for rid, tokens in line.items():
        cache.want(rid, tokens)
    cache.step()
    cache.step()
    cache.threads["fetch"].run(1)
    for _ in range(4):
        cache.buffer.prefetches.in_line(line)
        cache.step(work=False)
        assert not any(cache.tree.check_prefetch_progress(rid) for rid in line)
        assert cache.prefetch("r0").staged_from(0) == 6
    assert loop(cache, list(line), [], 4) == "r0"
    cache.buffer.prefetches.in_line([])
    cache.settle()
    check_idle(cache)
