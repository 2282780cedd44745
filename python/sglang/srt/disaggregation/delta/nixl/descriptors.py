"""What is moved: a chunk of a room, and its memory as arrays.

A chunk says which pages go where: the same pages in every buffer of a rank, to the peer's pages.
NIXL is told of it in merged ranges of memory, or in indices into lists that were prepared. Ranges
are built for each chunk, one for each run of pages that are neighbours on both sides. Prepared
lists describe a whole pool once, one slot (page) of one buffer an entry, and a chunk only selects;
nothing is merged, so that a chunk of neighbouring pages costs more than it has to.

Between ranks of different tensor parallel sizes a slot is a part of a token: some of its heads.
Such slots are never neighbours, so there is a range for each of them.

Nothing here knows NIXL, but the arrays are what it takes: rows of (address, length, device) in
uint64, and selectors in int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from sglang.srt.disaggregation.delta.pages import Pages

#: Rows of numbers, unsigned since an address may be 2**63 or more.
Rows = npt.NDArray[np.uint64]
#: Indices into a prepared list, 1-D.
Selectors = npt.NDArray[np.int32]

_MAX_SELECTORS = 2**31
_ADDRESSES = 2**64


# ---- what of a room is one chunk ----


class Destination(msgspec.Struct, frozen=True, eq=False):
    """Where a chunk goes at one decode rank."""

    pages: Pages
    #: With the last chunk, where this rank has state.
    state_pages: Pages
    metadata_slot: int
    #: Pages of its pool and slots of its metadata; None where it did not say (a stock peer).
    pool_pages: int | None
    metadata_slots: int | None
    #: It takes the metadata in the note that completes the room, and its slot is not written to.
    takes_metadata: bool = False


class ChunkPayload(msgspec.Struct, frozen=True, eq=False):
    """The payload of a ``transfer_backend.Chunk``: what goes from where to where, nothing live."""

    chunk_id: int
    pages: Pages
    #: With the last chunk only.
    metadata_slot: int | None
    state_pages: Pages
    #: By the name of the peer.
    destinations: dict[str, Destination]


# ---- the memory of both sides ----


class SelectorOverflow(ValueError):
    """A pool has more entries than a selector can name: send ranges instead."""


@dataclass(frozen=True)
class Heads:
    """Which heads of every token are the slots of a pool, where they are not whole pages."""

    #: Counted from the first that the rank holds.
    first: int
    count: int
    #: Tokens of a page.
    page: int
    #: Bytes from a token to the next, by buffer.
    token_lens: tuple[int, ...]


@dataclass(frozen=True)
class Pool:
    """The memory of one side: ``slots`` pages in each of some buffers (K and V of every layer), or
    some heads of ``slots`` tokens.

    The destination's numbers come from what the peer registered and announced, never from ours: it
    may have another number of slots. Its buffers are listed in the order of ours.
    """

    #: Address of slot 0, by buffer.
    bases: tuple[int, ...]
    #: Bytes of a slot, by buffer.
    item_lens: tuple[int, ...]
    slots: int
    #: The GPU, as its side numbers them; 0 for host memory.
    device: int
    #: None: slots are whole pages.
    heads: Heads | None = None

    def __post_init__(self) -> None:
        if not len(self.bases) == len(self.item_lens) == len(self.strides):
            raise ValueError(f"{len(self.bases)} buffers with {len(self.item_lens)} lengths")
        if self.slots < 1 or self.device < 0 or self.slots % self.slots_a_page:
            raise ValueError(f"{self.slots} slots on device {self.device} cannot be")
        for base, item_len, stride in zip(self.bases, self.item_lens, self.strides, strict=True):
            end = base + (self.slots - 1) * stride + item_len
            if base < 0 or not 1 <= item_len <= stride or end > _ADDRESSES:
                raise ValueError(
                    f"a buffer of {self.slots} slots of {item_len} bytes at {base:#x} does not fit "
                    f"into 64 bits"
                )

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from a slot to the next, by buffer."""
        return self.heads.token_lens if self.heads else self.item_lens

    @property
    def slots_a_page(self) -> int:
        """1, or the tokens of a page."""
        return self.heads.page if self.heads else 1

    @property
    def entries(self) -> int:
        """Entries of its prepared list."""
        return len(self.bases) * self.slots

    def check(self, pages: Pages) -> None:
        """Whether the pool has all these pages.

        Raises:
            ValueError: it has not; the text has the page.
        """
        count = self.slots // self.slots_a_page
        if pages.size and not 0 <= int(pages.min()) <= int(pages.max()) < count:
            wrong = int(pages.min()) if int(pages.min()) < 0 else int(pages.max())
            raise ValueError(f"page {wrong} of a pool of {count}")


def check_pair(source: Pool, destination: Pool) -> None:
    """Whether one can be written to the other, slot for slot.

    Raises:
        ValueError: buffers differ in number, or in the bytes of a slot, or pages in the number of
            slots. (The number of slots of a pool may.)
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
    """The slots of these pages, in their order."""
    slots = pages.astype(np.int64)
    if heads is None:
        return slots
    return (slots[:, None] * heads.page + np.arange(heads.page)).reshape(-1)


# ---- ranges ----


@dataclass(frozen=True)
class Runs:
    """Slots in runs: each of ``counts`` pages from ``sources`` and ``destinations`` on. 1-D."""

    sources: Rows
    destinations: Rows
    counts: Rows

    def __len__(self) -> int:
        return len(self.counts)


def runs_of(source_pages: Pages, destination_pages: Pages, heads: Heads | None = None) -> Runs:
    """The pages in their order, with neighbours merged where they rise by one on *both* sides; or
    their tokens, each a run of its own, where only ``heads`` of them are moved.

    Neither side has to be sorted, and pages may repeat: with a radix tree they do.

    Raises:
        ValueError: the two sides list different numbers of pages.
    """
    if source_pages.shape != destination_pages.shape or source_pages.ndim != 1:
        raise ValueError(f"{source_pages.size} pages cannot be written to {destination_pages.size}")
    size = len(source_pages)
    if not size:
        nothing = np.empty(0, np.uint64)
        return Runs(nothing, nothing, nothing)
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
    """(address, length, device) of every run in every buffer, on either side: two arrays of shape
    (buffers x runs, 3), ordered by buffer, then run. ``source`` and ``destination`` fit
    (``check_pair``), and have the pages (``Pool.check``)."""
    lengths = np.array(source.item_lens, np.uint64)[:, None] * runs.counts
    return (
        _rows(source, runs.sources, lengths),
        _rows(destination, runs.destinations, lengths),
    )


def _rows(pool: Pool, slots: Rows, lengths: Rows) -> Rows:
    """``slots``: the first of each run; ``lengths``: (buffers, runs)."""
    rows = np.empty((*lengths.shape, 3), np.uint64)
    offsets = np.array(pool.strides, np.uint64)[:, None] * slots
    np.add(np.array(pool.bases, np.uint64)[:, None], offsets, out=rows[..., 0])
    rows[..., 1] = lengths
    rows[..., 2] = pool.device
    return rows.reshape(-1, 3)


# ---- prepared lists ----


def prepared_strided(pool: Pool) -> Rows:
    """Every slot of every buffer, ordered by buffer, then slot, for ``select`` to select from: in
    NIXL's strided form, (address, length, device, stride, count), one row a buffer: (buffers, 5).

    Raises:
        SelectorOverflow: it would have more entries than can be selected.
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
    """Which entries of the prepared list of ``pool`` these pages are, over all buffers, ordered by
    buffer, then as ``pages``: 1-D, buffers x slots of the pages.

    Raises:
        ValueError: the pool has not all these pages.
        SelectorOverflow: it has more entries than can be selected.
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


# ---- which of the two ----


#: Microseconds of building and posting a chunk, and what of its wire time depends on the number of
#: its descriptors: a fixed part, and one for each of them. Fitted once, on a 2-core CPU. NIXL
#: merges neighbours of a selection itself, so what is posted is the same in either form; but it
#: looks at every page for that, and ranges only at every run.
RANGES_US, SELECTED_US = (75.0, 0.064), (15.0, 0.0028)


def is_selected_faster(buffers: int, pages: int, runs: int) -> bool:
    """Whether to select a chunk of ``pages`` pages (or heads of as many tokens) in ``runs`` runs,
    in each of ``buffers`` buffers, from prepared lists, and not to build ranges."""
    return SELECTED_US[0] + SELECTED_US[1] * buffers * pages < (
        RANGES_US[0] + RANGES_US[1] * buffers * runs
    )
