"""Tests of the rig: stock 0.5.23 gives an aggregated server's answers through it."""

from __future__ import annotations

import pytest

from current.decode import Decode
from current.environment import PLAIN
from current.texts import text

EACH_LOOP = [
    pytest.param(marks=pytest.mark.server(), id="overlap"),
    pytest.param(marks=pytest.mark.server(PLAIN), id="plain"),
]


@pytest.mark.parametrize((), EACH_LOOP)
def test_two_turns_are_equal_to_an_aggregated_server(decode: Decode) -> None:
    """Guards against a rig that announces tokens of the tree, or that leaks pages."""
    first = [text(200 + 37 * i, i) for i in range(4)]
    answers = decode.learn(first, 12)
    second = [p + a + [5, 6, 7] * 7 for p, a in zip(first, answers, strict=True)]
    expected = decode.learn(second, 10)
    rids = [decode.ask(prompt, 12) for prompt in first]
    decode.finish()
    assert [decode.output(rid) for rid in rids] == answers
    rids = [decode.ask(prompt, 10) for prompt in second]
    decode.finish()
    assert [decode.output(rid) for rid in rids] == expected
    held = [decode.room(rid).announced["prefix"] for rid in rids]
    assert held == [(len(p) + 11) // 16 * 16 for p in first]


@pytest.mark.server()
def test_a_failed_transfer_leaves_nothing(decode: Decode) -> None:
    """Guards against pages that stay in use after prefill's confirmation."""
    prompt = text(200)
    decode.learn([prompt], 4)
    rid = decode.ask(prompt, 4)
    decode.step(2)
    assert decode.arriving() == [rid]
    decode.fail(rid)
    decode.step(2)
    assert decode.ended(rid)
    decode.confirm(rid)
    decode.until(decode.is_idle)


@pytest.mark.server()
def test_an_abort_ends_a_request_that_waits_for_prefill(decode: Decode) -> None:
    """Guards against an abort in the transfer queue that is not sent to prefill, and against pages
    that prefill's confirmation does not free."""
    prompt = text(200)
    decode.learn([prompt], 4)
    rid = decode.ask(prompt, 4)
    decode.step(2)
    sent = len(decode.frames)
    decode.abort(rid)
    decode.step(2)
    assert decode.ended(rid)
    assert [frames[0] for frames in decode.frames[sent:]] == [b"ABORT"]
    decode.confirm(rid)
    decode.until(decode.is_idle)
