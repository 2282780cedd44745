"""The rig itself: stock 0.5.23 answers through it as an aggregated server does."""

from __future__ import annotations

import random

import pytest

from current.decode import Decode


def talks(count: int, seed: int = 1) -> list[list[int]]:
    """Prompts of some hundred tokens that have nothing in common."""
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(200 + 37 * i)] for i in range(count)]


EACH_LOOP = [
    pytest.param(marks=pytest.mark.server(), id="overlap"),
    pytest.param(marks=pytest.mark.server("--disable-overlap-schedule"), id="plain"),
]


@pytest.mark.parametrize((), EACH_LOOP)
def test_two_turns_are_equal_to_an_aggregated_server(decode: Decode) -> None:
    """Only what the tree lacks is announced, and nothing is left behind."""
    first = talks(4)
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
    """The request ends with an error, its pages are free as soon as prefill has confirmed."""
    (prompt,) = talks(1)
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
    """In the transfer queue; prefill is told, and its confirmation frees the pages."""
    (prompt,) = talks(1)
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
