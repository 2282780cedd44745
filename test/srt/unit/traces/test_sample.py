"""Sharing of blocks between sessions, and the sample that keeps it: functions and commands."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from benchmark.traces import cli, sample
from benchmark.traces.describe import describe
from benchmark.traces.generate import generate
from benchmark.traces.record import Record, read, write
from benchmark.traces.sample import (
    Plan,
    Survey,
    chosen,
    session_key,
    survey,
    window_and_thin,
)

RECORDS = list(generate(6000, seed=1))


@pytest.fixture(scope="module")
def surveyed() -> Survey:
    return survey(RECORDS)


def reference_counts(records: list[Record]) -> Counter[str]:
    """Return the counts by their definitions, with sets."""
    sessions: defaultdict[int, set[str]] = defaultdict(set)
    times: Counter[int] = Counter()
    tokens: Counter[str] = Counter()
    for r in records:
        for place, block in enumerate(r.hash_ids):
            tokens_in_block = min(512, r.input_length - place * 512)
            if r.session_id in sessions[block]:
                tokens["within_tokens"] += tokens_in_block
            elif sessions[block]:
                tokens["across_tokens"] += tokens_in_block
        for block in r.hash_ids:
            sessions[block].add(str(r.session_id))
            times[block] += 1
    occurrences = Counter(
        occurrences=times.total(),
        distinct=len(times),
        repeated=sum(n for n in times.values() if n > 1),
        shared=sum(n for block, n in times.items() if len(sessions[block]) > 1),
    )
    return occurrences + tokens


def test_counts_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the counting, also across parts."""
    records = list(generate(1500, seed=2))
    expected = reference_counts(records)
    whole = survey(records)
    assert whole.blocks == expected
    monkeypatch.setattr(sample, "PART", 1000)
    parts = survey(records)
    assert parts.blocks == expected and parts.sessions.equals(whole.sessions)


def test_the_window_keeps_sessions_that_begin_in_it(surveyed: Survey) -> None:
    """A session cut at the window's start would begin with an unexplained long prompt; one cut at
    the end would lose the long turns that fill its memory."""
    selection = window_and_thin(surveyed, Plan(window_s=60, window_start_s=30, ratio=1))
    records = list(chosen(RECORDS, selection))
    zero = RECORDS[0].timestamp / 1000 + 30
    first: dict[str | None, float] = {}
    for r in RECORDS:
        first.setdefault(r.session_id, r.timestamp / 1000)
    names = {name for name, start_s in first.items() if zero <= start_s < zero + 60}
    assert {r.session_id for r in records} == names
    assert len(records) == selection.requests == sum(r.session_id in names for r in RECORDS)
    assert records[0].timestamp >= 0
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(records))
    assert records[-1].timestamp > 60_000  # long sessions go on


def test_thinning_keeps_families_whole_and_nests(surveyed: Survey) -> None:
    """Guards families that are kept or dropped as a whole, by a seeded hash that is the same in
    every process: each session has the same chance, and a smaller sample is part of a larger
    one."""
    large, small, other = (
        window_and_thin(surveyed, Plan(1e6, 0, ratio, seed=seed)).sessions
        for ratio, seed in ((0.4, 1), (0.1, 1), (0.4, 2))
    )
    sessions = surveyed.sessions
    assert len(large) / len(sessions) == pytest.approx(0.4, abs=0.05)
    assert small < large and other != large
    keep = sessions.index.isin(large)
    assert not set(sessions["family"][keep]) & set(sessions["family"][~keep])
    assert session_key(Record(0, 1, 1, (1,), "s1")) == 6064584127301525897


def test_cap_of_single_turns(surveyed: Survey) -> None:
    """Guards the cap, and that sessions of several turns all stay."""
    everything = Plan(1e6, 0, 1)
    turns = surveyed.sessions["turns"]
    for cap in (0.3, 0.0):
        kept = window_and_thin(surveyed, dataclasses.replace(everything, max_single_turn=cap))
        several = int((turns > 1).sum())
        assert {int(key) for key in turns[turns > 1].index} <= kept.sessions
        assert len(kept.sessions) == several + int(several * cap / (1 - cap))
        assert kept.dropped == len(turns) - len(kept.sessions) > 0
    assert window_and_thin(surveyed, everything).dropped == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"window_s": 0}, "--window-seconds"),
        ({"ratio": 1.5}, "--sample-ratio"),
        ({"max_single_turn": 1.2}, "--max-single-turn-ratio"),
        ({"window_start_s": -1}, "--window-start"),
        ({"window_start_s": 1e6}, "--window-start"),
        ({"ratio": 1e-9}, "--sample-ratio"),
    ],
)
def test_wrong_flags_and_empty_samples_are_errors(
    surveyed: Survey, flags: dict[str, float], message: str
) -> None:
    """A ratio of 15 for 15% would keep all; an empty file would be replayed as a success."""
    with pytest.raises(ValueError, match=message):
        window_and_thin(surveyed, Plan(**flags))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("agentic") / "trace.jsonl"
    assert cli.generate([str(path), "--requests", "20000", "--seed", "7"]) == 0
    yield path
    path.unlink()


@pytest.mark.slow
def test_the_sample_keeps_sharing_that_random_sampling_loses(trace: Path, tmp_path: Path) -> None:
    """Guards the purpose of the sampler: with as many requests it keeps nine tenths of the sharing,
    random sampling half."""
    out = tmp_path / "figures.json"
    window = ("--compare", "--window-seconds", "300", "--window-start", "200")
    assert cli.sample([str(trace), str(tmp_path / "sample"), *window, "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["keeps"]["window and thin"] > 0.9
    assert figures["keeps"]["random"] < 0.5
    counts = {name: trace_["requests"] for name, trace_ in figures["traces"].items()}
    assert counts["random"] == pytest.approx(counts["window and thin"], rel=0.05)
    assert len(list(read(tmp_path / "sample"))) == counts["window and thin"]


def test_a_trace_without_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mooncake's format has no sessions: they are derived, and the sample names them."""
    path = tmp_path / "t"
    write(path, [Record(0, 1300, 9, (0, 1, 2)), Record(60, 2000, 9, (0, 1, 3, 4))])
    with path.open("a") as out:
        out.write("broken\n")
    assert cli.describe([str(path), "--skip-invalid", "--json", str(tmp_path / "j")]) == 0
    figures = json.loads((tmp_path / "j").read_text())["trace"]
    assert (figures["sessions"], figures["requests"]) == (1, 2)
    assert figures["hit_within"] == pytest.approx(1024 / 3300)
    output = capsys.readouterr()
    assert "prefill share" in output.out and "line 3" in output.err
    sampled = [str(path), str(tmp_path / "s"), "--skip-invalid", "--sample-ratio", "1"]
    assert cli.sample([*sampled, "--max-single-turn-ratio", "0.3"]) == 0
    assert [r.turn for r in read(tmp_path / "s")] == [0, 1]
    assert describe(survey(read(tmp_path / "s")))["multi_turn_sessions"] == 1
