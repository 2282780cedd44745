"""The most that a cache can hit."""

from __future__ import annotations

import pytest

from benchmark.traces.record import Record
from benchmark.traces.sharing import endless_hit_rate


def test_only_leading_blocks_count() -> None:
    """A cache of prefixes cannot use a block behind one that is new."""
    records = [
        Record(0, 1024, 1, (0, 1)),
        Record(0, 1536, 1, (0, 2, 1)),
        Record(0, 1024, 1, (0, 2)),
    ]
    assert endless_hit_rate(records) == pytest.approx((0 + 1 + 2) / 7)
    assert endless_hit_rate([]) == 0
