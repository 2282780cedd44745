"""Common starts and ends of tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from component.buffer_only.cache import Cache
from component.buffer_only.checks import check
from sglang.srt.mem_cache.buffer_only.prefetch import State


def stored(*prompts: Sequence[int], **changes: Any) -> Cache:
    """Return a cache with an empty tree, and a store with all of ``prompts``."""
    cache = Cache(**changes)
    for tokens in prompts:
        cache.compute(tokens)
        cache.settle()
    cache.flush()
    cache.store.calls.clear()
    cache.buffer.context.counters.clear()
    return cache


def measured(cache: Cache, call_seconds: float) -> None:
    """Set the measured speeds: ``call_seconds`` a store call, 1,000 computed tokens a second."""
    cache.buffer.ran(1.0, 1000)
    cache.buffer.prefetches.calls.call_seconds.add(call_seconds)
    cache.buffer.prefetches.calls.call_bytes.add(1e6)


def reach(cache: Cache, state: State, rid: str = "r") -> None:
    """Step, with as little work as possible, until the prefetch is in ``state``.

    A state that usually ends within a step is held by a full stage, which is freed on return.
    """
    if state is State.FOUND:
        cache.hog()
    for _ in range(20):
        if cache.state(rid) is state:
            cache.unhog()
            return
        cache.step(work=cache.state(rid) in (State.QUERYING, State.FETCHING))
    raise AssertionError(f"{state} is never reached: {cache.describe()}")


def steps(cache: Cache, count: int, work: bool = True) -> None:
    """Run ``count`` scheduler steps, with a check after each."""
    for _ in range(count):
        cache.step(work)
        check(cache, content=False)


def admit_in_line(
    cache: Cache, line: dict[str, list[int]], after: Callable[[Cache], Any] = check
) -> int:
    """Step and admit all ready requests in the order of ``line``. Return their hit tokens."""
    hits, line = 0, dict(line)
    for _ in range(200):
        if not line:
            return hits
        cache.buffer.prefetches.in_line(line)
        cache.step()
        for rid in list(line):
            if cache.tree.check_prefetch_progress(rid):
                hits += cache.compute(line.pop(rid), rid=rid)
        after(cache)
    raise AssertionError(f"never admitted: {list(line)}: {cache.describe()}")
