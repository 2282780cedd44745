"""Trace files: what is read, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmark.traces.invalid import Invalid
from benchmark.traces.read import read
from benchmark.traces.record import Record

GOOD = '{"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [0, 7]}\n'


def lines(tmp_path: Path, text: str) -> Iterator[Record]:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    return read(path)


def test_a_published_line(tmp_path: Path) -> None:
    """Guards against fields read under other names or in other units."""
    assert list(lines(tmp_path, GOOD)) == [Record(5.0, 700, 3, (0, 7))]


def test_it_streams(tmp_path: Path) -> None:
    """A long trace must not be read whole before its first request: the broken second line is
    noticed only when it is reached."""
    records = lines(tmp_path, GOOD + "broken\n")
    assert next(records).input_length == 700
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2"):
        next(records)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"timestamp": 5, "input_length": 700, "output_length": 3}', "hash_ids"),
        (GOOD.replace("[0, 7]", "[0]"), "2 blocks of 512"),
        (GOOD.replace("[0, 7]", "[0, 7, 8]"), "there are 3 hash_ids"),
        (GOOD.replace('"output_length": 3', '"output_length": 0'), "1 or more"),
        (GOOD.replace('"timestamp": 5', '"timestamp": 4'), "before that of the line above"),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, line: str, says: str) -> None:
    """A trace in another format or block size would be replayed as something else."""
    with pytest.raises(ValueError, match=says):
        list(lines(tmp_path, GOOD + line))


def test_invalid_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    """Guards against lines that are lost without a word, and against an invalid one that decides
    which later times are in order."""
    path = tmp_path / "trace.jsonl"
    late = GOOD.replace('"timestamp": 5', '"timestamp": 9').replace("[0, 7]", "[0]")
    path.write_text(GOOD + "broken\n" + late + GOOD)
    invalid = Invalid(skip=True)
    assert len(list(read(path, invalid=invalid))) == 2
    (said,) = invalid.told()
    assert said.startswith("2 invalid lines were left out; the first: ")
    assert "trace.jsonl, line 2: " in said
    assert Invalid(skip=True).told() == []
