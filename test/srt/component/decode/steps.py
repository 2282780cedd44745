"""What tests that drive one admission step after another share."""

from __future__ import annotations

from component.decode.checks import check
from component.decode.decoder import Decoder


def ids(start: int, count: int) -> list[int]:
    """A text of its own for each ``start``."""
    return [(start * 7 + number * (start + 1)) % 50 for number in range(count)]


def tick(decoder: Decoder) -> None:
    """One admission step, checked."""
    decoder.tick_queues()
    check(decoder)


def turn(decoder: Decoder, times: int = 1) -> None:
    """So many turns of the scheduler's loop, an admission step and a batch each, checked."""
    for _ in range(times):
        tick(decoder)
        decoder.tick_batch()
        check(decoder)
