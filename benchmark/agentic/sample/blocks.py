"""Which blocks are shared by whom, exactly, for traces whose blocks do not fit into memory.

Every figure here is a sum over blocks, so that blocks can be looked at in any grouping. One pass
over the trace deals the occurrences of blocks out to ``PARTITIONS`` temporary files by a hash of
the id (as in a hash join); then each file is read, sorted and counted by itself. A file
that stays under ``SPILL_BYTES`` is kept in memory. Memory: one partition, 1/64 of all occurrences
at about 150 bytes each, and 12 bytes a request; disk: 24 bytes an occurrence, in TMPDIR.

A block's id must stand for all blocks before it as well (see ``Record``). Then a cache of prefixes
without limits hits exactly the blocks that were seen before. Ids that are reached by different
prefixes are counted (``inconsistent``), as such a trace's figures would be too good.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

import numpy as np
import numpy.typing as npt

from benchmark.agentic.sample.columns import U64, Columns, mixed
from benchmark.traces.record import BLOCK_TOKENS, Record

PARTITIONS = 64
SPILL_BYTES = 1 << 20
FEW = 32
"""Sessions that make a block a family's; a block of more sessions is popular."""

_CHUNK = 1 << 19  # occurrences that are dealt out at once
_OCCURRENCE = np.dtype(
    [("block", "<u8"), ("request", "<u4"), ("depth", "<u4"), ("tokens", "<u4"), ("before", "<u4")]
)
Rows = npt.NDArray[np.void]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


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


class BlockCounter:
    """Takes records one at a time; ``count`` ends it. A context: its files end with it."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_tokens = block_tokens
        self._ids = array("Q")
        self._blocks = array("I")  # a record's number of blocks
        self._last = array("I")  # tokens of its last block
        self._dealt = 0  # records whose blocks are in the files
        self._stack = ExitStack()
        self._files: list[IO[bytes]] = [
            self._stack.enter_context(tempfile.SpooledTemporaryFile(SPILL_BYTES))  # noqa: SIM115
            for _ in range(PARTITIONS)
        ]

    def __enter__(self) -> BlockCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, record: Record) -> None:
        try:
            self._ids.extend(record.hash_ids)
        except (OverflowError, TypeError) as error:
            raise ValueError(
                f"hash_ids must be whole numbers from 0 to 2^64 - 1: {error}"
            ) from None
        full = len(record.hash_ids) - 1
        self._blocks.append(full + 1)
        self._last.append(record.input_length - full * self._block_tokens)
        if len(self._ids) >= _CHUNK:
            self._deal()

    def count(self, columns: Columns) -> tuple[BlockFigures, U64]:
        """The figures, and for each session its family (see ``families``).

        ``columns``: of the same records, in the same order.
        """
        self._deal()
        figures = BlockFigures()
        depth = np.zeros(len(columns.key), np.uint32)
        anchor = np.zeros(len(columns.key), np.uint64)
        for rows in self._partitions():
            _count(rows, columns.session, figures, depth, anchor)
        return figures, families(columns, depth, anchor)

    def _partitions(self) -> Iterator[Rows]:
        for file in self._files:
            file.seek(0)
            yield np.frombuffer(file.read(), _OCCURRENCE)
            file.close()

    def _deal(self) -> None:
        lengths = np.array(self._blocks, np.int64)
        ids = np.array(self._ids, np.uint64)
        starts = np.cumsum(lengths) - lengths
        rows: Rows = np.empty(len(ids), _OCCURRENCE)
        rows["block"] = ids
        rows["request"] = np.repeat(np.arange(self._dealt, self._dealt + len(lengths)), lengths)
        rows["depth"] = np.arange(len(ids)) - np.repeat(starts, lengths)
        rows["tokens"] = self._block_tokens
        rows["tokens"][starts + lengths - 1] = np.array(self._last, np.uint32)
        before = (mixed(ids, seed=1) >> np.uint64(32)).astype(np.uint32)
        rows["before"][1:] = before[:-1]
        rows["before"][starts] = 0
        partition = (mixed(ids) % np.uint64(PARTITIONS)).astype(np.uint8)
        order = np.argsort(partition, kind="stable")
        ends = np.cumsum(np.bincount(partition, minlength=PARTITIONS))
        rows = rows[order]
        for file, end, begin in zip(self._files, ends, [0, *ends[:-1]], strict=True):
            file.write(rows[begin:end].tobytes())
        self._dealt += len(lengths)
        del self._ids[:], self._blocks[:], self._last[:]


def families(columns: Columns, depth: npt.NDArray[np.uint32], anchor: U64) -> U64:
    """A key for each of ``columns.sessions``; equal keys are one family.

    Sessions are one family if their first prompts have the same deepest block among those that 2 to
    ``FEW`` sessions use; a session whose first prompt has no such block is alone.

    ``depth``, ``anchor``: for each request, one more than the place of that block, and its id; a
    depth of 0 says that there is none.
    """
    shared = depth[columns.first] > 0
    # Other bits than those of a session's key, even where ids are small numbers.
    return np.where(shared, mixed(anchor[columns.first], seed=2), columns.sessions)


def _changes(*columns: npt.NDArray[np.generic]) -> Bools:
    """Where sorted rows differ from the row above; the first one does."""
    changed = np.ones(len(columns[0]), np.bool_)
    changed[1:] = np.logical_or.reduce([c[1:] != c[:-1] for c in columns])
    return changed


def _count(
    rows: Rows,
    session_of: npt.NDArray[np.intp],
    figures: BlockFigures,
    depth: npt.NDArray[np.uint32],
    anchor: U64,
) -> None:
    """Adds one partition's rows, which are in the trace's order."""
    if not len(rows):
        return
    session = session_of[rows["request"]]
    order = np.lexsort((session, rows["block"]))  # stable: in a session, by time
    unsorted, rows, session = rows, rows[order], session[order]
    block, tokens = rows["block"], rows["tokens"].astype(np.int64)
    new_block = _changes(block)
    new_pair = _changes(block, session)  # first time in its session
    starts = np.flatnonzero(new_block)
    counts: Ints = np.diff(np.append(starts, len(rows)))
    sessions = np.add.reduceat(new_pair.astype(np.int64), starts)  # of each block
    first = unsorted[np.minimum.reduceat(order, starts)]  # of each block, in time

    figures.occurrences += len(rows)
    figures.distinct += len(starts)
    figures.repeated += int(counts[counts > 1].sum())
    figures.cross_session += int(counts[sessions > 1].sum())
    figures.within_tokens += int(tokens[~new_pair].sum())
    figures.across_tokens += int(tokens[new_pair].sum() - first["tokens"].sum(dtype=np.int64))
    before = rows["before"]
    figures.inconsistent += int((before != np.repeat(first["before"], counts)).sum())

    few = np.repeat((sessions > 1) & (sessions <= FEW), counts)
    request, place = rows["request"][few], rows["depth"][few] + 1
    np.maximum.at(depth, request, place)
    deepest = depth[request] == place
    anchor[request[deepest]] = block[few][deepest]
