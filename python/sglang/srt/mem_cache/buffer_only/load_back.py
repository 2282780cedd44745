"""Fetched pages become part of the device tree, and are copied there from the stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.buffer_only.copies import LOADS, Copies, slots_of
from sglang.srt.mem_cache.buffer_only.parts import Parts
from sglang.srt.mem_cache.buffer_only.publish import Published, publish
from sglang.srt.mem_cache.buffer_only.read_state import Read
from sglang.srt.mem_cache.buffer_only.stage import Lease


@dataclass(eq=False)
class Load:
    """Staged pages on their way to the device. Until they are there, ``node`` is locked."""

    node: Any
    lease: Lease


class Loads:
    """All copies to the device of one rank, in order."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._copies = Copies()
        self._consumer_index = -1

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def under_way(self) -> list[Load]:
        """Those that have not been seen to end."""
        return self._copies.owners

    @property
    def consumer_index(self) -> int:
        """The last copy to the device that a batch may have to wait for; -1 if all have ended."""
        return self._consumer_index if len(self._copies) else -1

    def ended(self) -> int:
        """Launches that have ended on this rank."""
        return self._copies.ended()

    def finish(self, launches: int) -> None:
        """The first ``launches`` launches have ended, on all ranks or because they are waited for
        now."""
        for load in self._copies.pop(launches):
            self._parts.tree.dec_lock_ref(load.node)
            load.lease.release()

    def publish(self, reads: Sequence[Read]) -> list[tuple[Read, Published | None]]:
        """Publish what is staged, with one copy for all of it; nothing while too many run.

        A read's lease goes to its copy, and its pin to what was published. With None where the
        device has no room, and then the read is as it was.
        """
        if len(self._copies) >= LOADS:
            return []
        results, pairs, loads = [], [], []
        for read in reads:
            published = self._publish(read)
            results.append((read, published))
            if published is None:
                continue
            assert read.lease is not None and read.pin is not None
            lease, read.lease = read.lease, None
            read.pin.move(published.node)
            if published.slots is None:
                lease.release()
                continue
            page = self._parts.page_size
            host = slots_of(lease.pages[published.covered // page : read.staged], page)
            pairs.append((host, published.slots))
            self._parts.tree.inc_lock_ref(published.node)
            loads.append(Load(published.node, lease))
        if pairs:
            finished, self._consumer_index = self._parts.copier.to_device(pairs)
            self._copies.add(finished, loads)
        return results

    def _publish(self, read: Read) -> Published | None:
        end = read.begin + read.staged * self._parts.page_size
        hashes = read.hashes[: read.staged]
        return publish(self._parts.tree, read.key[:end], read.begin, hashes)
