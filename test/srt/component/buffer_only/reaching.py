"""Brings a prefetch into a state, and no further."""

from __future__ import annotations

from component.buffer_only.cache import Cache
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.stage import Direction


def reach(cache: Cache, state: State, rid: str = "r") -> None:
    """Steps, with as little work as it takes, until the prefetch is in ``state``.

    What holds it in a state that is usually over in a step goes when it is there.
    """
    if state is State.FOUND:
        cache.hogs.append(
            cache.stage.allocate(Direction.PREFETCH, cache.stage.capacity(Direction.PREFETCH))
        )
    for _ in range(20):
        if cache.state(rid) is state:
            for hog in cache.hogs:
                hog.release()
            cache.hogs.clear()
            return
        if cache.state(rid) is State.QUERYING:
            cache.threads["query"].run()  # what follows a query at once has not come yet
            cache.calm()
        cache.step(work=cache.state(rid) is State.FETCHING)
    raise AssertionError(f"{state} is never reached: {cache.describe()}")
