"""Log lines about peers: rare for each, bounded for all, and short."""

from __future__ import annotations

import logging

import pytest

from sglang.srt.disaggregation.delta import observability
from sglang.srt.disaggregation.delta.observability import INTERVAL_S, RateLimitedLog
from unit.delta.fakes import Clock

LOGGER = logging.getLogger(__name__)


def test_once_in_a_while_for_each_peer(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a noisy peer that fills the disk, or hides another one's trouble; later
    trouble of the same peer is seen again."""
    clock = Clock()
    made = RateLimitedLog(LOGGER, clock=clock)
    for _ in range(1000):
        made.error("a:1", "first")
        made.error("b:1", "other")
    assert [record.getMessage() for record in caplog.records] == [
        "first",
        "other",
    ]
    clock.now += INTERVAL_S
    made.error("a:1", "later")
    assert len(caplog.records) == 3


def test_a_stranger_with_many_names(caplog: pytest.LogCaptureFixture) -> None:
    """Messages say themselves whom they are from. Guards against one that claims another name each
    time, and is logged each time; known peers are still told apart, and the table stays small."""
    clock = Clock()
    made = RateLimitedLog(LOGGER, clock=clock)
    made.error("a:1", "real")
    for number in range(10_000):
        made.error(f"{number}:1", "noise")
    assert len(caplog.records) == observability._REMEMBERED_KEYS + 1
    assert len(made._last) <= observability._REMEMBERED_KEYS + 1
    clock.now += INTERVAL_S
    made.error("a:1", "real again")
    assert caplog.records[-1].getMessage() == "real again"


def test_what_is_wrong_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """Errors quote what a peer sent. Guards against a line of the size of its message."""
    error = ValueError(f"peer {'x' * 1_000_000} never registered")
    RateLimitedLog(LOGGER).error("a:1", "dropped a message from %s: %s", "a:1", error)
    text = caplog.records[0].getMessage()
    assert text.startswith("dropped a message from a:1: peer xxx") and len(text) < 1000
