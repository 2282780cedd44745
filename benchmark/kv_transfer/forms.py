"""What describing one chunk costs in each form; runs in the prefill process of the bare arm.

The arrays are made by the patch set's own functions (``delta/nixl/descriptors.py``), whose choice
between the forms these numbers are for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.kv_transfer.bare_nixl import memory
from benchmark.kv_transfer.patterns import Pages, runs_for
from benchmark.kv_transfer.pool import Pool
from benchmark.kv_transfer.records import Peer

FORMS = ("ranges", "prepared", "strided")
_PAUSE_S = 20e-6


@dataclass(frozen=True)
class Chunk:
    """A page list: ``pages`` pages in runs of ``run`` in each of ``buffers`` buffers."""

    buffers: int
    pages: int
    run: int
    #: The second half of the heads of each page's token: a descriptor for each, however they lie.
    is_half: bool = False


@dataclass(frozen=True)
class Cost:
    """One transfer of a chunk in one form. Seconds."""

    form: str
    chunk: Chunk
    descriptors: int
    moved_bytes: int
    build_s: float
    post_s: float
    wire_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.build_s + self.post_s + self.wire_s


def measure(
    agent: Any, pool: Pool, peer: Peer, chunks: Sequence[Chunk], repeats: int
) -> tuple[list[Cost], dict[str, float]]:
    """Every chunk in every form, in turn, ``repeats`` times after one that is not counted; and how
    long preparing both lists took, by form, for the largest number of buffers."""
    costs, prepared_s = [], {}
    for buffers, is_half in sorted({(chunk.buffers, chunk.is_half) for chunk in chunks}):
        forms = _Forms(agent, pool, peer, buffers, is_half)
        if not is_half:
            prepared_s = forms.prepared_s
        for chunk in chunks:
            if (chunk.buffers, chunk.is_half) != (buffers, is_half):
                continue
            for number in range(repeats + 1):
                source = runs_for(chunk.pages, chunk.run, 2 * number)
                destination = runs_for(chunk.pages, chunk.run, 2 * number + 1)
                for form in FORMS:
                    cost = forms.move(form, chunk, source, destination)
                    if number:
                        costs.append(cost)
        forms.release()
    return costs, prepared_s


class _Forms:
    """Both sides' pools, cut to some buffers, and their prepared lists."""

    def __init__(self, agent: Any, pool: Pool, peer: Peer, buffers: int, is_half: bool) -> None:
        from sglang.srt.disaggregation.delta.nixl import descriptors

        self._agent, self._peer, self._make = agent, peer, descriptors
        self._memory = memory(pool.device)
        lens, skipped, heads = (pool.item_len,) * buffers, 0, None
        if is_half:
            skipped = pool.item_len // 2
            heads = descriptors.Heads(1, 1, 1, lens)
            lens = (skipped,) * buffers
        self._sides = [
            descriptors.Pool(
                tuple(base + skipped for base in bases[:buffers]), lens, pool.pages, 0, heads
            )
            for bases in (pool.bases, peer.bases)
        ]
        self._lists: dict[str, list[Any]] = {}
        self.prepared_s: dict[str, float] = {}
        for form, make in (
            ("prepared", descriptors.prepared),
            ("strided", descriptors.prepared_strided),
        ):
            began = time.perf_counter()
            self._lists[form] = self._prepare(make)
            self.prepared_s[form] = time.perf_counter() - began

    def _prepare(self, make: Callable[..., Any]) -> list[Any]:
        return [
            self._agent.prep_xfer_dlist(name, make(side), self._memory)
            for name, side in zip(("", self._peer.name), self._sides, strict=True)
        ]

    def release(self) -> None:
        """Give the prepared lists back."""
        for pair in self._lists.values():
            for each in pair:
                self._agent.release_dlist_handle(each)

    def move(self, form: str, chunk: Chunk, source: Pages, destination: Pages) -> Cost:
        """One transfer, and what it cost."""
        began = time.perf_counter()
        if form == "ranges":
            handle, count = self._ranges(source, destination)
        else:
            handle, count = self._selected(form, source, destination)
        built = time.perf_counter()
        state = self._agent.transfer(handle)
        posted = time.perf_counter()
        while state == "PROC":
            time.sleep(_PAUSE_S)
            state = self._agent.check_xfer_state(handle)
        ended = time.perf_counter()
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL ended a transfer of {chunk} by {form} with {state}")
        moved = chunk.pages * sum(self._sides[0].item_lens)
        return Cost(form, chunk, count, moved, built - began, posted - built, ended - posted)

    def _ranges(self, source: Pages, destination: Pages) -> tuple[Any, int]:
        runs = self._make.runs_of(source, destination, self._sides[0].heads)
        local, remote = self._make.ranges(*self._sides, runs)
        handle = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(local, self._memory),
            self._agent.get_xfer_descs(remote, self._memory),
            self._peer.name,
        )
        return handle, len(local)

    def _selected(self, form: str, source: Pages, destination: Pages) -> tuple[Any, int]:
        local = self._make.select(self._sides[0], source)
        remote = self._make.select(self._sides[1], destination)
        lists = self._lists[form]
        handle = self._agent.make_prepped_xfer("WRITE", lists[0], local, lists[1], remote)
        return handle, len(local)
