"""Trace files: what is read, and what is refused; records scaled, and their token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.traces.prompts import Prompts
from benchmark.traces.record import Record, blocks, check, left_out, read, scaled

GOOD = '{"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [0, 7]}\n'
VOCABULARY = range(16, 688)


def test_a_published_line_and_it_streams(tmp_path: Path) -> None:
    """Guards against fields read under other names or in other units. A long trace must not be read
    whole before its first request: the broken second line is noticed only when it is reached."""
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + "broken\n")
    records = read(path)
    assert next(records) == Record(5.0, 700, 3, (0, 7))
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2"):
        next(records)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + '{"timestamp": 5, "input_length": 700, "output_length": 3}', "hash_ids"),
        (GOOD.replace("[0, 7]", "[0]"), "2 blocks of 512"),
        (GOOD.replace("[0, 7]", "[0, -7]"), ">= 0"),
        (GOOD.replace('"output_length": 3', '"output_length": 0'), "1 or more"),
        (GOOD + GOOD.replace('"timestamp": 5', '"timestamp": 4'), "before that of the line above"),
        ("", "trace.jsonl has no requests"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, says: str) -> None:
    """A trace in another format or block size would be replayed as something else."""
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ValueError, match=says):
        list(read(tmp_path / "trace.jsonl"))


def test_invalid_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    """Guards against lines that are lost without a word, and against an invalid one that decides
    which later times are in order."""
    path, skipped = tmp_path / "trace.jsonl", list[str]()
    late = GOOD.replace('"timestamp": 5', '"timestamp": 9').replace("[0, 7]", "[0]")
    path.write_text(GOOD + "broken\n" + late + GOOD)
    assert len(list(read(path, skipped))) == 2
    (said,) = left_out(skipped)
    assert said.startswith("2 invalid lines were left out; the first: ")
    assert "trace.jsonl, line 2: " in said
    assert left_out([]) == []


@given(tokens=st.integers(1, 200_000), block=st.integers(1, 2048), answer=st.integers(1, 4000))
def test_every_block_stays_one(tokens: int, block: int, answer: int) -> None:
    """A prompt whose number of blocks changed would no longer match its ids."""
    record = Record(1000.0, tokens, answer, tuple(range(blocks(tokens))))
    found = scaled(record, block)
    check(found, block)
    assert (found.hash_ids, found.timestamp) == (record.hash_ids, 1000.0)
    assert abs(found.input_length - tokens * block / 512) < 1
    assert abs(found.output_length - answer * block / 512) <= 1


def test_prompts_share_exactly_what_their_ids_share() -> None:
    """Otherwise the hit rate would be that of another trace; and it must not depend on the process,
    as both arms of a comparison, and a later run, must ask the same."""
    prompts = Prompts(VOCABULARY, block_tokens=16)
    a = prompts.prompt(Record(0, 48, 1, (0, 1, 2)))
    b = prompts.prompt(Record(0, 40, 1, (0, 1, 3)))
    assert (len(a), len(b)) == (48, 40)
    assert a[:32] == b[:32] and a[32:40] != b[32:]
    record = Record(0, 4, 1, (123_456,))
    assert Prompts(VOCABULARY, 4).prompt(record) == [339, 115, 606, 136]
    assert Prompts(VOCABULARY, 4, seed=1).prompt(record) != Prompts(VOCABULARY, 4).prompt(record)
