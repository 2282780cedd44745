"""The command lines: what sampling keeps, files in and out, errors a user can act on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmark.agentic.traces import cli
from benchmark.agentic.traces.describe import describe
from benchmark.agentic.traces.survey import survey
from benchmark.traces.generate import generate
from benchmark.traces.read import read, write
from benchmark.traces.record import Record

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("agentic") / "trace.jsonl"
    write(path, generate(20_000, seed=7))
    yield path
    path.unlink()


def test_window_and_thin_keeps_what_random_sampling_destroys(trace: Path, tmp_path: Path) -> None:
    """What the sampler is for: as many requests, nine tenths of the sharing against half."""
    out = tmp_path / "figures.json"
    window = ["--window-seconds", "300", "--window-start", "200"]
    arguments = [str(trace), str(tmp_path / "sample"), "--compare", *window, "--json", str(out)]
    assert cli.sample(arguments) == 0
    figures = json.loads(out.read_text())
    assert figures["keeps"]["window and thin"] > 0.9
    assert figures["keeps"]["random"] < 0.5
    traces = figures["traces"]
    assert traces["random"]["requests"] == pytest.approx(
        traces["window and thin"]["requests"], rel=0.05
    )
    assert len(list(read(tmp_path / "sample"))) == traces["window and thin"]["requests"]


def test_the_single_turn_cap_reaches_the_file(trace: Path, tmp_path: Path) -> None:
    """Guards against a flag that nothing reads."""
    out = tmp_path / "sample"
    cli.sample([str(trace), str(out), "--max-single-turn-ratio", "0.3", "--sample-ratio", "1"])
    assert describe(survey(read(out))).multi_turn_sessions >= 0.7


def test_a_trace_without_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mooncake's format has none: they are derived, and the sample names them."""
    path = tmp_path / "t"
    write(path, [Record(0, 1300, 9, (0, 1, 2)), Record(60, 2000, 9, (0, 1, 3, 4))])
    assert cli.describe([str(path), "--json", str(tmp_path / "j")]) == 0
    figures = json.loads((tmp_path / "j").read_text())["trace"]
    assert (figures["sessions"], figures["requests"]) == (1, 2)
    assert figures["hit_within"] == pytest.approx(1024 / 3300)
    assert "prefill share" in capsys.readouterr().out
    cli.sample([str(path), str(tmp_path / "s"), "--sample-ratio", "1"])
    assert [r.turn for r in read(tmp_path / "s")] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sample-ratio", "2"], "--sample-ratio"),
        (["--window-start", "9999"], "--window-start"),
        (["--block-tokens", "16"], "line 1: "),
    ],
)
def test_errors_name_the_flag_or_the_line(
    trace: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says what to change, and a status that a script sees."""
    assert cli.sample([str(trace), *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_trace_is_not_overwritten(trace: Path) -> None:
    """Writing over the file that is being read would leave neither."""
    assert cli.sample([str(trace), str(trace)]) == 2
    assert next(read(trace)).session_id


def test_empty_and_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named, without a traceback."""
    (tmp_path / "empty").write_text("")
    for name in ("empty", "missing"):
        assert cli.describe([str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err
