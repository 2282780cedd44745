"""Trace files: accepted and refused lines; records scaled, and their token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.traces.prompts import Prompts
from benchmark.traces.record import Record, blocks, check, left_out, read, scaled

GOOD = '{"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [0, 7]}\n'
VOCABULARY = range(16, 688)


def test_a_published_line_is_read_as_a_stream(tmp_path: Path) -> None:
    """Guards against fields read under other names or in other units. A long trace must not be read
    whole before its first request: the broken second line is noticed only when reached."""
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + "broken\n")
    records = read(path)
    assert next(records) == Record(5.0, 700, 3, (0, 7))
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2"):
        next(records)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + '{"timestamp": 5, "input_length": 700, "output_length": 3}', "hash_ids"),
        (GOOD.replace("[0, 7]", "[0]"), "2 blocks of 512"),
        (GOOD.replace("[0, 7]", "[0, -7]"), ">= 0"),
        (GOOD.replace('"output_length": 3', '"output_length": 0'), "1 or more"),
        (GOOD + GOOD.replace('"timestamp": 5', '"timestamp": 4'), "before that of the line above"),
        ("", "trace.jsonl has no requests"),
    ],
)
def test_refused_lines(tmp_path: Path, text: str, message: str) -> None:
    """A trace in another format or block size would be replayed with other requests."""
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read(tmp_path / "trace.jsonl"))


def test_invalid_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    """Guards against lines that are dropped silently, and against an invalid line that decides
    which later times are in order."""
    path, skipped = tmp_path / "trace.jsonl", list[str]()
    late = GOOD.replace('"timestamp": 5', '"timestamp": 9').replace("[0, 7]", "[0]")
    path.write_text(GOOD + "broken\n" + late + GOOD)
    assert len(list(read(path, skipped))) == 2
    (warning,) = left_out(skipped)
    assert warning.startswith("2 invalid lines were left out; the first: ")
    assert "trace.jsonl, line 2: " in warning
    assert left_out([]) == []


@given(tokens=st.integers(1, 200_000), block=st.integers(1, 2048), answer=st.integers(1, 4000))
def test_scaling_keeps_the_number_of_blocks(tokens: int, block: int, answer: int) -> None:
    """A prompt whose number of blocks changed would no longer match its ids."""
    record = Record(1000.0, tokens, answer, tuple(range(blocks(tokens))))
    scaled_record = scaled(record, block)
    check(scaled_record, block)
    assert (scaled_record.hash_ids, scaled_record.timestamp) == (record.hash_ids, 1000.0)
    assert abs(scaled_record.input_length - tokens * block / 512) < 1
    assert abs(scaled_record.output_length - answer * block / 512) <= 1


def test_prompts_share_exactly_what_their_ids_share() -> None:
    """Otherwise the trace would have another hit rate. The tokens must not depend on the process,
    since both arms of a comparison, and a later run, must send the same requests."""
    prompts = Prompts(VOCABULARY, block_tokens=16)
    a = prompts.prompt(Record(0, 48, 1, (0, 1, 2)))
    b = prompts.prompt(Record(0, 40, 1, (0, 1, 3)))
    assert (len(a), len(b)) == (48, 40)
    assert a[:32] == b[:32] and a[32:40] != b[32:]
    record = Record(0, 4, 1, (123_456,))
    assert Prompts(VOCABULARY, 4).prompt(record) == [339, 115, 606, 136]
    assert Prompts(VOCABULARY, 4, seed=1).prompt(record) != Prompts(VOCABULARY, 4).prompt(record)
