"""One pass over a trace: all that sampling and describing need to know of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmark.agentic.sample.blocks import BlockCounter, BlockFigures
from benchmark.agentic.sample.columns import U64, Columns, ColumnsBuilder
from benchmark.traces.record import BLOCK_TOKENS, Record


@dataclass(frozen=True)
class Survey:
    columns: Columns
    blocks: BlockFigures
    families: U64
    """For each of ``columns.sessions`` a key; sessions with the same one share a prefix with few
    others (see ``blocks.families``)."""


def survey(records: Iterable[Record], block_tokens: int = BLOCK_TOKENS) -> Survey:
    """Of records in order of time that all name their session.

    Raises:
        ValueError: no records, or one without session or with ids that are no unsigned 64 bits.
    """
    builder = ColumnsBuilder()
    with BlockCounter(block_tokens) as counter:
        for record in records:
            builder.add(record)
            counter.add(record)
        columns = builder.build()
        if not len(columns.key):
            raise ValueError("the trace has no requests")
        figures, families = counter.count(columns)
    return Survey(columns, figures, families)
