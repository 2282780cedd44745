"""Scaled traces share what the original shares, and fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmark.traces.record import Record, blocks, check
from benchmark.traces.scale import fits, scaled


@given(tokens=st.integers(1, 200_000), block=st.integers(1, 2048), answer=st.integers(1, 4000))
def test_every_block_stays_one(tokens: int, block: int, answer: int) -> None:
    """A prompt whose number of blocks changed would no longer match its ids."""
    record = Record(1000.0, tokens, answer, tuple(range(blocks(tokens))))
    found = scaled(record, block, speed=4.0)
    check(found, block)
    assert found.hash_ids == record.hash_ids
    assert found.timestamp == 250.0
    assert abs(found.input_length - tokens * block / 512) < 1
    assert abs(found.output_length - answer * block / 512) <= 1


def test_requests_that_do_not_fit() -> None:
    """What a server cannot take is left out whole; cutting it would break its sharing."""
    records = [Record(0, 90, 10, (0,)), Record(0, 91, 10, (1,)), Record(0, 5, 5, (2,))]
    assert [r.hash_ids for r in records if fits(r, 100)] == [(0,), (2,)]
