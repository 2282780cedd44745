"""Generated agentic traffic has the published shape."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from benchmark.agentic.traces import cli
from benchmark.agentic.traces.describe import Description, describe
from benchmark.agentic.traces.survey import survey
from benchmark.traces.generate import AGENTIC, at_rate, generate
from benchmark.traces.read import read
from benchmark.traces.record import Record, check
from benchmark.traces.sessions import annotate

pytestmark = pytest.mark.slow

#: The published figures. (Their own input and output means give a prefill share of 0.987.)
TARGET = {
    "input mean": 33_600,
    "input p50": 20_000,
    "input p90": 88_000,
    "output mean": 445,
    "output p50": 80,
    "prefill share": 0.98,
    "hit": 0.67,
    "within share of hits": 0.62,
    "cross-session share": 0.52,
    "growth per turn": 2_000,
}
RECORDS = list(generate(30_000, seed=3))


@pytest.fixture(scope="module")
def found() -> Description:
    return describe(survey(RECORDS))


def test_lengths(found: Description) -> None:
    """What a server computes: a long tail of prompts, short answers. The tail makes the means of
    30,000 requests vary by some percent from seed to seed."""
    assert found.input_tokens.mean == pytest.approx(TARGET["input mean"], rel=0.1)
    assert found.input_tokens.p50 == pytest.approx(TARGET["input p50"], rel=0.1)
    assert found.input_tokens.p90 == pytest.approx(TARGET["input p90"], rel=0.15)
    assert found.output_tokens.mean == pytest.approx(TARGET["output mean"], rel=0.1)
    assert found.output_tokens.p50 == pytest.approx(TARGET["output p50"], rel=0.05)
    assert found.prefill_share == pytest.approx(TARGET["prefill share"], abs=0.01)


def test_reuse(found: Description) -> None:
    """What a cache is worth, and whom it has to serve for it. Of 20 minutes, later turns
    are missing, so that less is reused within sessions than in two hours."""
    assert found.hit == pytest.approx(TARGET["hit"], abs=0.05)
    assert found.within_share_of_hits == pytest.approx(TARGET["within share of hits"], abs=0.08)
    assert found.cross_session_share == pytest.approx(TARGET["cross-session share"], abs=0.05)
    assert found.inconsistent_blocks == 0


def test_sessions(found: Description) -> None:
    """Most have one turn; the tail reaches beyond the 36 turns that were reported, growing by 2,000
    tokens a turn."""
    assert 0.05 < found.multi_turn_sessions < 0.2
    assert found.longest_session >= 36
    assert found.growth_per_turn == pytest.approx(TARGET["growth per turn"], rel=0.1)


def test_valid_and_in_order() -> None:
    """What the reader refuses must not be generated; each prompt contains the one before it."""
    sessions: defaultdict[str | None, list[Record]] = defaultdict(list)
    for record in RECORDS:
        check(record)
        sessions[record.session_id].append(record)
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(RECORDS))
    for turns in sessions.values():
        assert [r.turn for r in turns] == list(range(len(turns)))
        for a, b in pairwise(turns):
            full = a.input_length // 512
            assert a.hash_ids[:full] == b.hash_ids[:full]
            assert b.input_length > a.input_length + a.output_length


def test_seeded() -> None:
    """A shorter trace is the start of a longer one; another seed is another trace."""
    assert list(generate(300, seed=3)) == RECORDS[:300]
    assert list(generate(300, seed=4)) != RECORDS[:300]


def test_sessions_are_found_again_without_their_names() -> None:
    """Recognizing conversations by ids has to work on this traffic, where families share long
    prefixes: nineteen of twenty requests are placed as the generator did; the
    others end within what is shared."""
    bare = (msgspec.structs.replace(r, session_id=None, turn=None) for r in RECORDS)
    same = 0
    previous: dict[str | None, str | None] = {}  # derived name by true name
    owner: dict[str | None, str | None] = {}
    for true, derived in zip(RECORDS, annotate(bare), strict=True):
        expected = previous.get(true.session_id)
        fresh = derived.session_id not in owner
        same += derived.session_id == expected if true.turn else fresh
        previous[true.session_id] = derived.session_id
        owner[derived.session_id] = true.session_id
    assert same / len(RECORDS) > 0.95


def test_command(tmp_path: Path) -> None:
    """The file is what the function gives, with or without sessions."""
    assert cli.generate([str(tmp_path / "a"), "--requests", "50", "--seed", "3"]) == 0
    assert list(read(tmp_path / "a")) == RECORDS[:50]
    cli.generate([str(tmp_path / "b"), "--requests", "50", "--no-sessions"])
    assert {r.session_id for r in read(tmp_path / "b")} == {None}


def test_another_rate_is_more_people() -> None:
    """Guards against a rate that nothing reads: as fast, but fewer."""
    few = list(generate(4000, 3, at_rate(AGENTIC, 5.0, 3)))
    seconds = (few[-1].timestamp - few[0].timestamp) / 1000
    assert len(few) / seconds == pytest.approx(5, rel=0.2)
