"""What a prefetch is, and the states that it goes through.

WAITING -> QUERYING -> PARKED -> FETCHING -> STAGED -> DONE, and from STAGED back to PARKED while
there is more to come than fits into the stage at once.

WAITING holds nothing. From QUERYING on, the prefix that the tree holds (the anchor) is pinned, and
each published part moves the pin to its own end. FETCHING and STAGED hold staging pages, for what
the store was found to have and not for what the request asked for. DONE keeps the pin until the
scheduler admits the request, or for a while.

A read that is abandoned while the store works for it is DRAINING: without pin and request, it keeps
its staging pages until the store has answered on all ranks. LINGERING waits for calls of the store
that were given up, which may still write into the pages.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.mem_cache.buffer_only.lanes import Job
from sglang.srt.mem_cache.buffer_only.parts import Pin
from sglang.srt.mem_cache.buffer_only.stage import Lease


class State(enum.Enum):
    """See the module's text."""

    WAITING = enum.auto()
    QUERYING = enum.auto()
    PARKED = enum.auto()
    FETCHING = enum.auto()
    STAGED = enum.auto()
    DONE = enum.auto()
    DRAINING = enum.auto()
    LINGERING = enum.auto()
    ENDED = enum.auto()


@dataclass(eq=False)
class Read:
    """One request's prefetch."""

    rid: str
    #: ``RadixKey`` of the prompt, whole pages, at least one token short of the end.
    key: Any
    state: State = State.WAITING
    pin: Pin | None = None
    #: Tokens of the prompt that the tree holds, up to the pin.
    begin: int = 0
    #: Page hashes and store keys of what is still to be fetched, from ``begin`` on.
    hashes: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    prefix_keys: list[str] | None = None
    job: Job | None = None
    lease: Lease | None = None
    #: Pages that are in the stage (STAGED).
    staged: int = 0
    #: Tokens published so far.
    loaded: int = 0
    #: When the state was entered, and when the scheduler first waited for it; agreed milliseconds.
    since_ms: int = 0
    asked_ms: int | None = None
    #: Whether room for all of ``keys`` was reserved among the pinned tokens.
    admitted: bool = False
    deferred: bool = False
    blocked_at: int = -1


def pinned_tokens(reads: Iterable[Read], node: Any, page_size: int) -> int:
    """Tokens that ``reads`` keep from eviction, or will when all that was let in has come, together
    with those up to ``node``; what several share counts once."""
    pinned = [read for read in reads if read.pin is not None]
    seen: set[Any] = set()
    for last in [*(read.pin.node for read in pinned if read.pin), node]:
        while last is not None and last.parent is not None and last not in seen:
            seen.add(last)
            last = last.parent
    coming = sum(len(read.keys) for read in pinned if read.admitted)
    return sum(len(one.key) for one in seen) + coming * page_size
