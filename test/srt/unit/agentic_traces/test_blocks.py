"""Who shares which blocks: counted by partitions and sorting, as by plain sets."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from benchmark.agentic.traces import survey as module
from benchmark.agentic.traces.survey import FEW, BlockFigures, survey
from benchmark.traces.generate import generate
from benchmark.traces.record import Record
from benchmark.traces.sharing import endless_hit_rate


def plainly(records: list[Record]) -> BlockFigures:
    """The definitions, written down with sets."""
    sessions: defaultdict[int, set[str]] = defaultdict(set)
    times: Counter[int] = Counter()
    within = across = 0
    for r in records:
        for place, block in enumerate(r.hash_ids):
            tokens = min(512, r.input_length - place * 512)
            if r.session_id in sessions[block]:
                within += tokens
            elif sessions[block]:
                across += tokens
        for block in r.hash_ids:
            sessions[block].add(str(r.session_id))
            times[block] += 1
    return BlockFigures(
        occurrences=times.total(),
        distinct=len(times),
        repeated=sum(n for n in times.values() if n > 1),
        cross_session=sum(n for block, n in times.items() if len(sessions[block]) > 1),
        within_tokens=within,
        across_tokens=across,
    )


def test_as_counted_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the sorting, and that nothing is lost between partitions."""
    records = list(generate(1500, seed=2))
    expected = plainly(records)
    assert survey(records).blocks == expected
    monkeypatch.setattr(module, "PARTITION", 1000)
    assert survey(records).blocks == expected


def test_hit_is_that_of_an_endless_cache() -> None:
    """Both ways to count agree where blocks are full: what was seen before is a leading part."""
    records = [
        Record(r.timestamp, 512 * len(r.hash_ids), 1, r.hash_ids, r.session_id)
        for r in generate(800, seed=3)
    ]
    figures = survey(records).blocks
    hit = (figures.within_tokens + figures.across_tokens) / (512 * figures.occurrences)
    assert hit == pytest.approx(endless_hit_rate(records))


def test_ids_without_their_prefix_are_noticed() -> None:
    """A trace that hashes each block alone would seem to share more than a prefix cache can hit."""
    records = [Record(0, 1024, 1, (1, 2), "a"), Record(1, 1024, 1, (3, 2), "b")]
    assert survey(records).blocks.inconsistent == 1
    assert survey(records[:1] * 3).blocks.inconsistent == 0


def test_ids_of_64_bits_and_others() -> None:
    """Traces with hashes as ids are read; what is no id is refused, not wrapped around."""
    assert survey([Record(0, 5, 1, (2**64 - 1,), "a")]).blocks.distinct == 1
    with pytest.raises(ValueError, match="2\\^64"):
        survey([Record(0, 5, 1, (-1,), "a")])


def test_families() -> None:
    """Who shares a prefix with few is in one family; a prefix of all does not make one of all."""
    shared = [Record(0, 1300, 1, (0, 1, 10 + i), f"a{i}") for i in range(3)]
    alone = [Record(0, 900, 1, (0, 100 + i), f"b{i}") for i in range(FEW)]
    found = survey([*shared, *alone])
    family = dict(
        zip(
            (found.columns.key[i] for i in found.columns.first),
            found.families,
            strict=True,
        )
    )
    keys = [family[key] for key in found.columns.key]
    assert len(set(keys[:3])) == 1
    assert len(set(keys)) == 1 + FEW


def test_sessions_are_needed() -> None:
    """Unnamed sessions would all be one."""
    with pytest.raises(ValueError, match="annotate"):
        survey([Record(0, 5, 1, (1,))])
    with pytest.raises(ValueError, match="no requests"):
        survey([])
