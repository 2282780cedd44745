"""Descriptors of a chunk of a room: its pages, and their memory as arrays.

A chunk maps pages of this rank to pages of the peer, in every buffer. NIXL gets it as merged ranges
of memory, or as indices into prepared lists. Ranges are built per chunk, one for each run of pages
that are consecutive on both sides. Prepared lists describe a whole pool once, with an entry per
slot (page) of each buffer, and a chunk only selects entries; nothing is merged, so that a chunk of
consecutive pages costs more than necessary.

Between ranks of different tensor parallel sizes a slot is some heads of one token. Such slots are
never consecutive, so that each has its own range.

No NIXL here, but its formats: rows of (address, length, device) in uint64, selectors in int32.
Contract: pure functions and immutable data, for any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from sglang.srt.disaggregation.delta.pages import Pages

#: Rows of numbers, unsigned because an address may be 2**63 or more.
Rows = npt.NDArray[np.uint64]
#: Indices into a prepared list, 1-D.
Selectors = npt.NDArray[np.int32]

#: Maximum entries of a prepared list, because selectors are int32.
_MAX_SELECTORS = 2**31
_ADDRESSES = 2**64


# ---- a chunk of a room ----


class Destination(msgspec.Struct, frozen=True, eq=False):
    """Destination of a chunk on one decode rank."""

    pages: Pages
    #: Empty except with the last chunk of a model with state.
    state_pages: Pages
    metadata_slot: int
    #: Pages of its pool and slots of its metadata; None if not announced (a stock peer).
    pool_pages: int | None
    metadata_slots: int | None
    #: True if it takes the metadata in the completing notification, so that its slot is not
    #: written.
    takes_metadata: bool = False


class ChunkPayload(msgspec.Struct, frozen=True, eq=False):
    """The payload of a ``transfer_backend.Chunk``: source and destinations, as plain data."""

    chunk_id: int
    pages: Pages
    #: With the last chunk only.
    metadata_slot: int | None
    state_pages: Pages
    #: Name of the peer -> destination.
    destinations: dict[str, Destination]


# ---- the memory of both sides ----


class SelectorOverflow(ValueError):
    """Raised if a pool has more entries than selectors can index: send ranges instead."""


@dataclass(frozen=True)
class Heads:
    """Heads of every token that are the slots of a pool, if slots are not whole pages."""

    #: Relative to the rank's first head.
    first: int
    count: int
    #: Tokens per page.
    page: int
    #: Bytes from one token to the next, by buffer.
    token_lens: tuple[int, ...]


@dataclass(frozen=True)
class Pool:
    """The memory of one side: ``slots`` pages, or some heads of ``slots`` tokens, in each buffer (K
    and V of every layer).

    The destination's numbers come from the peer's registration and announcement, never from ours,
    because the peer may have another number of slots. Buffers have the same order on both sides.
    """

    #: Address of slot 0, by buffer.
    bases: tuple[int, ...]
    #: Bytes of a slot, by buffer.
    item_lens: tuple[int, ...]
    slots: int
    #: GPU number on its side; 0 for host memory.
    device: int
    #: None: slots are whole pages.
    heads: Heads | None = None

    def __post_init__(self) -> None:
        if not len(self.bases) == len(self.item_lens) == len(self.strides):
            raise ValueError(f"{len(self.bases)} buffers with {len(self.item_lens)} lengths")
        if self.slots < 1 or self.device < 0 or self.slots % self.slots_a_page:
            raise ValueError(f"{self.slots} slots on device {self.device} are invalid")
        for base, item_len, stride in zip(self.bases, self.item_lens, self.strides, strict=True):
            end = base + (self.slots - 1) * stride + item_len
            if base < 0 or not 1 <= item_len <= stride or end > _ADDRESSES:
                raise ValueError(
                    f"a buffer of {self.slots} slots of {item_len} bytes at {base:#x} does not fit "
                    f"into 64 bits"
                )

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one slot to the next, by buffer."""
        return self.heads.token_lens if self.heads else self.item_lens

    @property
    def slots_a_page(self) -> int:
        """Slots per page: 1, or the tokens of a page."""
        return self.heads.page if self.heads else 1

    @property
    def entries(self) -> int:
        """Number of entries of its prepared list."""
        return len(self.bases) * self.slots

    def check(self, pages: Pages) -> None:
        """Check that the pool has all ``pages``.

        Raises:
            ValueError: a page is not in the pool; the text names it.
        """
        count = self.slots // self.slots_a_page
        if pages.size and not 0 <= int(pages.min()) <= int(pages.max()) < count:
            wrong = int(pages.min()) if int(pages.min()) < 0 else int(pages.max())
            raise ValueError(f"page {wrong} of a pool of {count}")


def check_pair(source: Pool, destination: Pool) -> None:
    """Check that ``source`` can be written to ``destination``, slot for slot.

    Raises:
        ValueError: the pools differ in the number of buffers, bytes of a slot, or slots per page.
            (Their numbers of slots may differ.)
    """
    if source.slots_a_page != destination.slots_a_page:
        raise ValueError(
            f"pages of {source.slots_a_page} slots cannot be written to pages of "
            f"{destination.slots_a_page}"
        )
    if source.item_lens != destination.item_lens:
        raise ValueError(
            f"{len(source.item_lens)} buffers with slots of {_lengths(source)} bytes cannot be "
            f"written to {len(destination.item_lens)} with slots of {_lengths(destination)}"
        )


def _lengths(pool: Pool) -> str:
    return ", ".join(str(length) for length in sorted(set(pool.item_lens))) or "no"


def _slots_of(pages: Pages, heads: Heads | None) -> npt.NDArray[np.int64]:
    """Return the slots of ``pages``, in order."""
    slots = pages.astype(np.int64)
    if heads is None:
        return slots
    return (slots[:, None] * heads.page + np.arange(heads.page)).reshape(-1)


# ---- ranges ----


@dataclass(frozen=True)
class Runs:
    """Runs of consecutive slots: first source, first destination and count of each, 1-D."""

    sources: Rows
    destinations: Rows
    counts: Rows

    def __len__(self) -> int:
        return len(self.counts)


def runs_of(source_pages: Pages, destination_pages: Pages, heads: Heads | None = None) -> Runs:
    """Return the pages as runs, in order: pages that increase by one on *both* sides are merged, or
    with ``heads`` each token is a run.

    Neither side is sorted in general, and pages may repeat, because of the radix tree.

    Raises:
        ValueError: the two sides have different numbers of pages.
    """
    if source_pages.shape != destination_pages.shape or source_pages.ndim != 1:
        raise ValueError(f"{source_pages.size} pages cannot be written to {destination_pages.size}")
    size = len(source_pages)
    if not size:
        empty = np.empty(0, np.uint64)
        return Runs(empty, empty, empty)
    sources, destinations = _slots_of(source_pages, heads), _slots_of(destination_pages, heads)
    if heads is not None:
        ones = np.ones(len(sources), np.uint64)
        return Runs(sources.astype(np.uint64), destinations.astype(np.uint64), ones)
    breaks = (np.diff(sources) != 1) | (np.diff(destinations) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return Runs(
        sources[starts].astype(np.uint64),
        destinations[starts].astype(np.uint64),
        np.diff(starts, append=size).astype(np.uint64),
    )


def ranges(source: Pool, destination: Pool, runs: Runs) -> tuple[Rows, Rows]:
    """Return (address, length, device) of every run in every buffer, for both sides: two arrays of
    shape (buffers x runs, 3), ordered by buffer, then run. The caller has checked the pools
    (``check_pair``) and pages (``Pool.check``)."""
    lengths = np.array(source.item_lens, np.uint64)[:, None] * runs.counts
    return (
        _rows(source, runs.sources, lengths),
        _rows(destination, runs.destinations, lengths),
    )


def _rows(pool: Pool, slots: Rows, lengths: Rows) -> Rows:
    """Return the rows of one side. ``slots``: first slot of each run; ``lengths``: (buffers,
    runs)."""
    rows = np.empty((*lengths.shape, 3), np.uint64)
    offsets = np.array(pool.strides, np.uint64)[:, None] * slots
    np.add(np.array(pool.bases, np.uint64)[:, None], offsets, out=rows[..., 0])
    rows[..., 1] = lengths
    rows[..., 2] = pool.device
    return rows.reshape(-1, 3)


# ---- prepared lists ----


def prepared_strided(pool: Pool) -> Rows:
    """Return the prepared list of every slot of every buffer, ordered by buffer, then slot, in
    NIXL's strided form: (address, length, device, stride, count), one row per buffer: (buffers, 5).

    Raises:
        SelectorOverflow: the list would have more entries than selectors can index.
    """
    _check_selectable(pool)
    rows = np.empty((len(pool.bases), 5), np.uint64)
    rows[:, 0] = np.array(pool.bases, np.uint64)
    rows[:, 1] = np.array(pool.item_lens, np.uint64)
    rows[:, 2] = pool.device
    rows[:, 3] = np.array(pool.strides, np.uint64)
    rows[:, 4] = pool.slots
    return rows


def select(pool: Pool, pages: Pages) -> Selectors:
    """Return the entries of ``pages`` in the prepared list of ``pool``, ordered by buffer, then
    like ``pages``: 1-D, buffers x slots of the pages.

    Raises:
        ValueError: a page is not in the pool.
        SelectorOverflow: the pool has more entries than selectors can index.
    """
    _check_selectable(pool)
    pool.check(pages)
    firsts = np.arange(len(pool.bases), dtype=np.int32) * np.int32(pool.slots)
    slots = _slots_of(pages, pool.heads).astype(np.int32)
    return (firsts[:, None] + slots).reshape(-1)


def _check_selectable(pool: Pool) -> None:
    if pool.entries > _MAX_SELECTORS or pool.slots >= _MAX_SELECTORS:
        raise SelectorOverflow(
            f"{len(pool.bases)} buffers of {pool.slots} slots are {pool.entries} entries, and "
            f"selectors have 32 bits"
        )


# ---- choice of the form ----


# Cost of a chunk in microseconds: (fixed, per descriptor). Covers building, posting and the wire
# time that depends on the number of descriptors. Fitted once, on a 2-core CPU. NIXL merges
# consecutive entries of a selection itself, so that the same is posted in both forms.
#: As ranges, one descriptor per run.
RANGES_US = (75.0, 0.064)
#: As a selection, one descriptor per page.
SELECTED_US = (15.0, 0.0028)


def is_selected_faster(buffers: int, pages: int, runs: int) -> bool:
    """Return True if a selection from prepared lists is faster than ranges, for a chunk of
    ``pages`` slots in ``runs`` runs in each of ``buffers`` buffers."""
    return SELECTED_US[0] + SELECTED_US[1] * buffers * pages < (
        RANGES_US[0] + RANGES_US[1] * buffers * runs
    )
