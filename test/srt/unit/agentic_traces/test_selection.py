"""Window, thinning and the choice of sessions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from benchmark.agentic.traces.select import (
    Plan,
    beginning,
    cap_single_turns,
    chosen,
    densest,
    draws,
    kept,
    random_requests,
    window_and_thin,
)
from benchmark.agentic.traces.survey import Survey, session_key, survey
from benchmark.traces.generate import generate
from benchmark.traces.record import Record

RECORDS = list(generate(6000, seed=1))


@pytest.fixture(scope="module")
def found() -> Survey:
    return survey(RECORDS)


def test_densest_window() -> None:
    """The window of most requests, not the one after the longest silence; it ends by the end."""
    seconds = np.array([0, 1, 50, 51, 52, 53, 90, 91, 92, 99.0])
    assert densest(seconds * 1000, 10) == 50
    assert densest(seconds * 1000, 1000) == 0
    assert densest(np.array([7000.0]), 10) == 7


def test_the_window_takes_sessions_that_begin_in_it(found: Survey) -> None:
    """A session cut at the window's start would begin with a long prompt that nothing explains;
    one cut at its end would lose the long turns that its memory is for."""
    plan = Plan(window_s=60, window_start_s=30, ratio=1)
    sample = list(chosen(RECORDS, window_and_thin(found, plan)))
    zero = RECORDS[0].timestamp / 1000 + 30
    first = {}
    for r in RECORDS:
        first.setdefault(r.session_id, r.timestamp / 1000)
    names = {name for name, at in first.items() if zero <= at < zero + 60}
    assert {r.session_id for r in sample} == names
    assert len(sample) == sum(r.session_id in names for r in RECORDS)
    assert sample[0].timestamp >= 0
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(sample))
    assert sample[-1].timestamp > 60_000  # long sessions go on


def test_thinning_keeps_its_ratio_and_nests(found: Survey) -> None:
    """Whole sessions by a seeded hash: the ratio holds, another seed keeps others, and a smaller
    sample is part of a larger one."""
    keys = found.columns.sessions
    half, tenth = kept(keys, 0.5, 1), kept(keys, 0.1, 1)
    assert half.mean() == pytest.approx(0.5, abs=0.03)
    assert tenth.mean() == pytest.approx(0.1, abs=0.03)
    assert not (tenth & ~half).any()
    assert (kept(keys, 0.5, 2) & half).mean() == pytest.approx(0.25, abs=0.03)
    assert kept(keys, 1, 3).all()


def test_thinning_by_family_keeps_families_whole(found: Survey) -> None:
    """Kept or dropped together; each session still has the same chance."""
    plan = Plan(window_s=1e6, window_start_s=0, ratio=0.4)
    keep = np.isin(found.columns.sessions, window_and_thin(found, plan).sessions)
    assert keep.mean() == pytest.approx(0.4, abs=0.05)
    assert not set(found.families[keep].tolist()) & set(found.families[~keep].tolist())


def test_cap_of_single_turns() -> None:
    """The cap holds, sessions of several turns all stay, and a cap of 1 is none."""
    turns = np.array([1] * 90 + [5] * 7)
    order = draws(np.arange(97, dtype=np.uint64), 0)
    keep = cap_single_turns(turns, order, 0.3)
    assert keep[90:].all()
    assert keep[:90].sum() == 3
    assert order[:90][keep[:90]].max() < order[:90][~keep[:90]].min()
    assert cap_single_turns(turns, order, 1).all()
    assert not cap_single_turns(turns, order, 0)[:90].any()
    assert cap_single_turns(np.array([1, 1, 1, 1, 1, 2]), order[:6], 0.8).sum() == 5


def test_a_sample_of_the_same_seed_is_the_same(found: Survey) -> None:
    """Arms of a comparison on two machines must get one trace: nothing depends on the process."""
    assert session_key(Record(0, 1, 1, (1,), "s1")) == 6064584127301525897
    one = random_requests(found.columns, 600, 5)
    assert np.array_equal(one.sessions, random_requests(found.columns, 600, 5).sessions)
    assert len(one.sessions) == pytest.approx(0.1 * len(found.columns.sessions), rel=0.15)


def test_beginning_is_half_open(found: Survey) -> None:
    """Two windows side by side share no session and lose none."""
    at = found.columns.time_ms[found.columns.first[0]] / 1000
    one, other = beginning(found.columns, at - 10, 10), beginning(found.columns, at, 1e9)
    assert not (one & other).any()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"window_s": 0}, "--window-seconds"),
        ({"ratio": 0}, "--sample-ratio"),
        ({"ratio": 1.5}, "--sample-ratio"),
        ({"max_single_turn": 1.2}, "--max-single-turn-ratio"),
        ({"window_start_s": -1}, "--window-start"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, float], says: str) -> None:
    """A ratio of 15 for 15% would keep all."""
    with pytest.raises(ValueError, match=says):
        Plan(**flags)  # type: ignore[arg-type]


def test_an_empty_sample_is_an_error(found: Survey) -> None:
    """An empty file would be replayed as a success."""
    with pytest.raises(ValueError, match="--window-start"):
        window_and_thin(found, Plan(window_start_s=1e6))
    with pytest.raises(ValueError, match="--sample-ratio"):
        window_and_thin(found, Plan(ratio=1e-9))
