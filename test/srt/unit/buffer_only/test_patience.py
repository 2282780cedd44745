"""How long a step gives the store to answer for requests that have just arrived."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.buffer_only.patience import LONGEST_PAUSE, MOST_S, PART, Patience


@pytest.mark.parametrize(
    ("batches", "seconds"), [([], 0.0), ([0.02], 0.02 * PART), ([3.0], MOST_S)]
)
def test_a_small_part_of_a_batch_and_little_whatever_a_batch_takes(batches, seconds):
    """Nothing before anything was measured."""
    patience = Patience()
    for batch in batches:
        patience.batch(batch)
    assert patience.seconds() == pytest.approx(seconds)


def test_a_store_that_is_slow_costs_next_to_nothing():
    """The steps that asked it and gave it no time: twice as many after each that waited in vain."""
    patience = Patience()
    patience.batch(1.0)
    without = []
    for _ in range(9):
        steps = 0
        while not patience.seconds():
            steps += 1
        without.append(steps)
        patience.ended(answered=False)
    assert without == [0, 1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE]
    while not patience.seconds():
        pass
    patience.ended(answered=True)
    assert patience.seconds() == MOST_S
