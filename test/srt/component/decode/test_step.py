"""One admission step: leases of those who come later, and of one that stays blocked."""

from __future__ import annotations

import pytest

from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from component.decode.steps import ids, tick

pytestmark = pytest.mark.usefixtures("no_prefix_wait")


def test_those_behind_let_go_for_the_first(matches: list[int]) -> None:
    """Guards against a request that does not fit because others behind it, tried in the same step,
    hold the memory that could be evicted; and against locks that the step leaves behind."""
    decoder = Decoder(16, 640)
    for start in (1, 2):
        decoder.submit(ids(start, 160), new=1)
    decoder.drain()
    matches.clear()
    large = decoder.submit(ids(3, 480), new=1)
    others = [decoder.submit([*ids(start, 160), 1], new=1) for start in (1, 2)]
    tick(decoder)
    assert matches == [480, 161]
    assert decoder.in_transfer == [large] and decoder.queued == others
    decoder.drain()
    check_idle(decoder)


@pytest.mark.hazard("lost-lock")
def test_a_step_that_admits_nobody_leaves_no_lock() -> None:
    """Guards against leases of a step that end with their requests still queued."""
    decoder = Decoder(16, 640)
    decoder.submit(ids(1, 160), new=1)
    decoder.drain()
    filler = decoder.submit(ids(2, 440), new=1)
    tick(decoder)
    assert decoder.in_transfer == [filler]
    blocked = [decoder.submit([*ids(1, 160), *ids(start, 100)], new=4) for start in (3, 4, 5)]
    for _ in range(3):
        tick(decoder)
        assert decoder.queued == blocked and decoder.tree_cache.protected_size() == 0
    decoder.drain()
    check_idle(decoder)


def test_a_blocked_prefix_is_not_matched_again(matches: list[int]) -> None:
    """Guards against a head whose own prefix looks like free memory once its lease is given back:
    it would be matched and refused on every step while others run."""
    decoder = Decoder(16, 640)
    decoder.submit(ids(1, 160), new=1)
    decoder.drain()
    running = decoder.submit(ids(2, 300), new=100)
    tick(decoder)
    decoder.deliver(running)
    tick(decoder)
    decoder.tick_batch()
    blocked = decoder.submit([*ids(1, 160), *ids(3, 150)], new=4)
    matches.clear()
    for _ in range(30):
        decoder.tick_queues()
        decoder.tick_batch()
        check(decoder)
    assert decoder.queued == [blocked] and matches == [310]
    decoder.drain()
    assert len(blocked.output_ids) == 4
    check_idle(decoder)


def test_more_than_one_step_can_try() -> None:
    """Guards against requests behind the first eight that are never tried."""
    decoder = Decoder(16, 1024, rows=30)
    reqs = [decoder.submit(ids(number, 16), new=1) for number in range(20)]
    for admitted in (8, 16, 20):
        tick(decoder)
        assert decoder.in_transfer == reqs[:admitted]
    decoder.drain()
    check_idle(decoder)
