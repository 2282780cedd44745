"""A retracted request whose prompt's prefix is still in the tree: stock 0.5.23, and the lead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from current.texts import text

if TYPE_CHECKING:
    from current.decode import Decode

SMALL = ("--num-reserved-decode-tokens", "16")
REMAINING = {"SGLANG_DISAGGREGATION_DECODE_ADMISSION": "remaining"}
PREFIX = 288


def comes_back_early(decode: Decode, *, spoil: bool) -> bool:
    """Whether a retracted request runs again while another one with its prefix still does; all
    answers are right. ``spoil``: what of its CPU copy is shared is overwritten, so that it would
    be seen if somebody read it."""
    common = text(PREFIX, 1)
    alone, first, second = text(96, 2), text(16, 3, common), text(16, 4, common)
    lengths = {tuple(alone): 96, tuple(first): 144, tuple(second): 112}
    expected = {key: decode.learn([list(key)], new)[0] for key, new in lengths.items()}
    rids = []
    for each in (alone, first, second):
        rids.append(decode.ask(each, lengths[tuple(each)]))
        decode.step(2)
        decode.deliver()
        decode.step(3)
    decode.until(lambda: bool(decode.prealloc.retracted_queue))
    (retracted,) = decode.prealloc.retracted_queue
    assert retracted.rid == rids[2]
    if spoil:
        for layer in retracted.kv.retraction_backup.cpu_tensors:
            for tensor in layer[0]:
                tensor[:PREFIX] = float("nan")
    tokens = len(decode.output(rids[2]))
    decode.until(lambda: decode.ended(rids[1]))
    came = len(decode.output(rids[2])) > tokens
    decode.finish()
    for rid, want in zip(rids, expected.values(), strict=True):
        assert decode.output(rid) == want
    assert decode.balance()["locked"] == 0, "nobody is here any more"
    return came


@pytest.mark.server(*SMALL, tokens=640)
def test_stock_waits_for_memory_for_the_whole_text(decode: Decode) -> None:
    """The fault: 288 tokens that are in the tree are to be allocated again, and there is no room
    for them until the other request has ended. Until then nobody is admitted."""
    assert not comes_back_early(decode, spoil=False)


@pytest.mark.server(*SMALL, tokens=640, env=REMAINING)
def test_it_comes_back_with_what_the_tree_holds(decode: Decode) -> None:
    """Guards against a resume that does not look into the tree, or that writes to pages which
    others read."""
    assert comes_back_early(decode, spoil=True)
