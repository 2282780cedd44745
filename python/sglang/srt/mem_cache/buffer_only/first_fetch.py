"""The first fetch of a hit, which follows its query at once where one rank decides.

The ranks of a server agree on what the store has before they fetch it, in a step of the scheduler,
and a step may take as long as a batch. A server of one rank need not wait: the scheduler reserves
staging pages with the query, and what the query finds is fetched into them, without coming back.
What the scheduler makes of it, in its next step, is a piece like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.worth import Choice

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.buffer_only.page_store import IOThreads, Job, PageStore
    from sglang.srt.mem_cache.buffer_only.stage import StagingPages


@dataclass(eq=False)
class FirstFetch:
    """Staging pages reserved for what a query may find. ``keys``, ``job`` and ``choice`` are set on
    the query's thread, and read by the scheduler when the query has ended."""

    #: Page of the prompt from which the store is asked, and its key.
    begin: int
    first_key: str
    staging: StagingPages
    #: Token slots of the staging pages, in order.
    slots: torch.Tensor
    #: Keys of all pages before ``begin``, where the backend wants them.
    prefix_keys: list[str] | None
    store: PageStore
    threads: IOThreads
    #: Pages of the smallest hit that is fetched.
    least: int
    #: Whether a hit of so many pages is fetched, by what is known when the query starts.
    choose: Callable[[int], Choice]
    keys: list[str] = field(default_factory=list)
    job: Job | None = None
    choice: Choice | None = None

    def follow(self, query: Job) -> None:
        """``query`` has found what it has found."""
        found = query.found.keys if query.found is not None else []
        if query.cancelled or len(found) < self.least:
            return
        choice = self.choose(len(found))
        if choice is Choice.SLOWER or choice is Choice.TRIAL:
            return  # the scheduler counts those
        self.choice = choice
        keys = self.keys = found[: len(self.staging.pages)]
        slots = self.slots[: len(self.slots) // len(self.staging.pages) * len(keys)]
        self.job = self.threads.submit(
            lambda job: self.store.read(keys, slots, self.prefix_keys, job)
        )
