"""What tests that drive one admission step after another share."""

from __future__ import annotations

import torch

from component.decode import kv
from component.decode.checks import check
from component.decode.decoder import Decoder


def ids(start: int, count: int) -> list[int]:
    """A text of its own for each ``start``."""
    return [(start * 7 + number * (start + 1)) % 50 for number in range(count)]


def poison_free_slots(decoder: Decoder) -> None:
    """Put what is nobody's KV into every slot that is free, of both models."""
    free = decoder.token_to_kv_pool_allocator
    pages = torch.cat([free.free_pages, free.release_pages])
    slots = (pages[:, None] * free.page_size + torch.arange(free.page_size)).flatten()
    for pool in (decoder.pool, decoder.draft_pool):
        if pool is not None:
            kv.write(pool, slots, [-5] * len(slots))


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
