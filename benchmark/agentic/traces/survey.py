"""One pass over a trace: its requests as arrays, and which blocks are shared by whom, exactly.

A block's id must stand for all blocks before it as well (see ``Record``). Then a cache of prefixes
without limits hits exactly the blocks that were seen before. Ids that are reached by different
prefixes are counted (``inconsistent``), as such a trace's figures would be too good.

Memory: 8 bytes an occurrence of a block and 36 a request. Every figure is a sum over blocks, so
they are sorted and counted in ``PARTITION``s of their ids, one after the other.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from benchmark.traces.record import BLOCK_TOKENS, Record

#: Occurrences of blocks that are sorted at once, about.
PARTITION = 1 << 22
#: Sessions that make a block a family's; a block of more sessions is popular.
FEW = 32

U64 = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Columns:
    """A trace without its blocks; every array has one entry a request, in the trace's order."""

    key: U64
    """``session_key`` of its session."""
    time_ms: npt.NDArray[np.float64]
    input_tokens: Ints
    output_tokens: Ints

    @cached_property
    def _unique(self) -> tuple[U64, Places, Places, Places]:
        return np.unique(self.key, return_index=True, return_inverse=True, return_counts=True)

    @property
    def sessions(self) -> U64:
        """Keys of all sessions, ascending."""
        return self._unique[0]

    @property
    def first(self) -> Places:
        """For each of ``sessions`` its first request."""
        return self._unique[1]

    @property
    def session(self) -> Places:
        """For each request the place of its session in ``sessions``."""
        return self._unique[2]

    @property
    def turns(self) -> Places:
        """For each of ``sessions`` its number of requests."""
        return self._unique[3]


@dataclass
class BlockFigures:
    """Sums over blocks. An occurrence is a block of a prompt; the last one may be partial."""

    occurrences: int = 0
    distinct: int = 0
    repeated: int = 0
    """Occurrences of blocks that occur more than once, in whatever sessions."""
    cross_session: int = 0
    """Occurrences of blocks that more than one session uses, the first occurrence and those within
    one session included."""
    within_tokens: int = 0
    """Tokens of blocks that their own session had used before."""
    across_tokens: int = 0
    """Tokens of blocks that only other sessions had used before."""
    inconsistent: int = 0
    """Occurrences behind another block than the same id's first one."""


@dataclass(frozen=True)
class Survey:
    columns: Columns
    blocks: BlockFigures
    families: U64
    """For each of ``columns.sessions`` a key. Sessions with the same one are a family: their first
    prompts have the same deepest block among those that 2 to ``FEW`` sessions use. A session whose
    first prompt has no such block is alone."""


def session_key(record: Record) -> int:
    """64 bits for a session's name, the same in every process.

    Two sessions of a trace of a million share a key with a chance of one in 37 million.

    Raises:
        ValueError: the record names no session.
    """
    if record.session_id is None:
        raise ValueError("a request without session_id: annotate the trace first")
    return int.from_bytes(blake2b(record.session_id.encode(), digest_size=8).digest(), "little")


def mixed(values: U64, seed: int = 0) -> U64:
    """Values spread evenly over 64 bits (splitmix64); other seeds, other values."""
    x = values + np.uint64((0x9E3779B97F4A7C15 * (2 * seed + 1)) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def survey(records: Iterable[Record], block_tokens: int = BLOCK_TOKENS) -> Survey:
    """Of records in order of time that all name their session.

    Raises:
        ValueError: no records, or one without session or with ids that are no unsigned 64 bits.
    """
    key, time, tokens_in, tokens_out = array("Q"), array("d"), array("q"), array("q")
    ids = array("Q")
    for record in records:
        key.append(session_key(record))
        time.append(record.timestamp)
        tokens_in.append(record.input_length)
        tokens_out.append(record.output_length)
        try:
            ids.extend(record.hash_ids)
        except (OverflowError, TypeError) as error:
            text = f"hash_ids must be whole numbers from 0 to 2^64 - 1: {error}"
            raise ValueError(text) from None
    if not key:
        raise ValueError("the trace has no requests")
    columns = Columns(
        np.array(key, np.uint64),
        np.array(time, np.float64),
        np.array(tokens_in, np.int64),
        np.array(tokens_out, np.int64),
    )
    figures = BlockFigures()
    # For each request the deepest block of few sessions: one more than its place, and its id.
    depth, anchor = np.zeros(len(key), np.int64), np.zeros(len(key), np.uint64)
    for rows in _partitions(np.array(ids, np.uint64), columns, block_tokens):
        _count(rows, columns.session, figures, depth, anchor)
    shared = depth[columns.first] > 0
    # Other bits than those of a session's key, even where ids are small numbers.
    families = np.where(shared, mixed(anchor[columns.first], seed=2), columns.sessions)
    return Survey(columns, figures, families)


@dataclass(frozen=True)
class _Rows:
    """Occurrences of blocks, in the trace's order."""

    block: U64
    request: Places
    place: Ints
    """In the prompt, from 0."""
    tokens: Ints
    before: U64
    """The id of the block before; another number for the first one of a prompt."""

    def __getitem__(self, order: Places) -> _Rows:
        return _Rows(*(getattr(self, name)[order] for name in self.__dataclass_fields__))


def _partitions(ids: U64, columns: Columns, block_tokens: int) -> Iterator[_Rows]:
    lengths = -(-columns.input_tokens // block_tokens)
    ends = np.cumsum(lengths)
    if ends[-1] != len(ids):
        raise ValueError(f"{len(ids)} hash_ids do not cover prompts in blocks of {block_tokens}")
    count = 1 + len(ids) // PARTITION
    partition = mixed(ids) % np.uint64(count)
    for number in range(count):
        where = np.flatnonzero(partition == number)
        request = np.searchsorted(ends, where, side="right")
        place = where - (ends - lengths)[request]
        last = place == lengths[request] - 1
        full = place * block_tokens
        tokens = np.where(last, columns.input_tokens[request] - full, block_tokens)
        before = np.where(place > 0, ids[where - 1], mixed(np.zeros(1, np.uint64), seed=1))
        yield _Rows(ids[where], request, place, tokens, before)


def _changes(*columns: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Where sorted rows differ from the row above; the first one does."""
    changed = np.ones(len(columns[0]), np.bool_)
    changed[1:] = np.logical_or.reduce([c[1:] != c[:-1] for c in columns])
    return changed


def _count(
    rows: _Rows, session_of: Places, figures: BlockFigures, depth: Ints, anchor: U64
) -> None:
    """Adds one partition's rows."""
    if not len(rows.block):
        return
    order = np.lexsort((session_of[rows.request], rows.block))  # stable: in a session, by time
    unsorted, rows = rows, rows[order]
    session = session_of[rows.request]
    new_pair = _changes(rows.block, session)  # first time in its session
    starts = np.flatnonzero(_changes(rows.block))
    counts: Ints = np.diff(np.append(starts, len(order)))
    sessions = np.add.reduceat(new_pair.astype(np.int64), starts)  # of each block
    first = unsorted[np.minimum.reduceat(order, starts)]  # of each block, in time

    figures.occurrences += len(order)
    figures.distinct += len(starts)
    figures.repeated += int(counts[counts > 1].sum())
    figures.cross_session += int(counts[sessions > 1].sum())
    figures.within_tokens += int(rows.tokens[~new_pair].sum())
    figures.across_tokens += int(rows.tokens[new_pair].sum() - first.tokens.sum())
    figures.inconsistent += int((rows.before != np.repeat(first.before, counts)).sum())

    few = np.repeat((sessions > 1) & (sessions <= FEW), counts)
    request, place = rows.request[few], rows.place[few] + 1
    np.maximum.at(depth, request, place)
    deepest = depth[request] == place
    anchor[request[deepest]] = rows.block[few][deepest]
