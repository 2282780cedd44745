"""A retracted request with its prefix still in the tree: stock 0.5.23, and the lead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from current.environment import REMAINING, SMALL
from current.texts import text

if TYPE_CHECKING:
    from current.decode import Decode

PREFIX = 288


def resumes_early(decode: Decode, *, spoil: bool) -> bool:
    """Return whether a retracted request resumes while another one with its prefix still runs.

    All answers must be right. ``spoil``: overwrite the shared part of its CPU copy, so that a use
    of it would be seen.
    """
    common = text(PREFIX, 1)
    alone, first, second = text(96, 2), text(16, 3, common), text(16, 4, common)
    lengths = {tuple(alone): 96, tuple(first): 144, tuple(second): 112}
    expected = {key: decode.learn([list(key)], new)[0] for key, new in lengths.items()}
    rids = []
    for prompt in (alone, first, second):
        rids.append(decode.ask(prompt, lengths[tuple(prompt)]))
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
    resumed = len(decode.output(rids[2])) > tokens
    decode.finish()
    for rid, want in zip(rids, expected.values(), strict=True):
        assert decode.output(rid) == want
    assert decode.balance()["locked"] == 0, "no request is left"
    return resumed


@pytest.mark.server(*SMALL, tokens=640)
def test_stock_waits_for_memory_for_the_whole_text(decode: Decode) -> None:
    """The fault: 288 tokens that are in the tree are to be allocated again, for which there is no
    memory until the other request has ended. Until then no request is admitted."""
    assert not resumes_early(decode, spoil=False)


@pytest.mark.server(*SMALL, tokens=640, env=REMAINING)
def test_a_retracted_request_shares_the_prefix_in_the_tree(decode: Decode) -> None:
    """Guards against a resume that ignores the tree, or that writes to shared pages."""
    assert resumes_early(decode, spoil=True)
