"""Texts for operators: log lines about peers, fields of SGLang's lines, and the event log."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sglang.srt.disaggregation.delta import observability
from sglang.srt.disaggregation.delta.decode.scheduler import DecodeLineFields
from sglang.srt.disaggregation.delta.observability import INTERVAL_S, STATS, RateLimitedLog
from sglang.srt.patchset.environment import EVENT_LOG
from unit.delta.fakes import Clock

LOGGER = logging.getLogger(__name__)
#: More names than a server tells apart.
STRANGER_COUNT = 10_000
#: Bound on the lines that are logged about them.
MAX_LINES = 200


def test_a_peer_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """Messages name their sender, and errors quote it. Guards against a noisy peer, or a stranger
    with ever new names, that fills the disk or hides another peer's errors; against a log line as
    long as a message; and against later errors that are never logged."""
    clock = Clock()
    log = RateLimitedLog(LOGGER, clock=clock)
    for _ in range(1000):
        log.error("a:1", "first")
        log.error("b:1", "other: %s", "x" * 1_000_000)
    assert caplog.messages[0] == "first" and caplog.messages[1].startswith("other: xxx")
    assert len(caplog.messages) == 2 and len(caplog.messages[1]) < 1000
    clock.now += INTERVAL_S
    log.error("a:1", "later")
    assert caplog.messages[2:] == ["later"]
    for number in range(STRANGER_COUNT):
        log.error(f"{number}:1", "noise")
    assert 100 < len(caplog.messages) < MAX_LINES
    for text in ("too soon", "again"):
        clock.now += INTERVAL_S / 2
        log.error("a:1", text)
        log.error("c:1", text)
    assert caplog.messages[-3:] == ["noise", "again", "again"]


@pytest.fixture
def decode_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger with the fields, and counters that the test may change."""
    monkeypatch.setattr(STATS, "totals", STATS.totals.copy())
    logger, fields = logging.getLogger("test_log_lines"), DecodeLineFields()
    logger.addFilter(fields)
    yield logger
    logger.removeFilter(fields)


def test_fields_of_decode_lines(
    decode_lines: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against totals in place of differences, against fields in front of SGLang's own, which
    tools parse from the left, and against other lines that change or consume the difference."""
    with caplog.at_level(logging.INFO):
        STATS.count("decode_prefix_prompt_tokens", 100)
        STATS.count("decode_prefix_hit_tokens", 64)
        STATS.count("kv_transfer_requested_bytes", 1_250_000)
        decode_lines.info("Prefill batch, #new-seq: %d", 2)
        decode_lines.info({"no": "text"})
        decode_lines.info("Decode batch, #running-req: 3, gen throughput (token/s): 12.00")
        STATS.count("decode_prefix_prompt_tokens", 10)
        decode_lines.info("Decode batch, #running-req: 4")
        decode_lines.info("Decode batch")
    assert caplog.messages == [
        "Prefill batch, #new-seq: 2",
        "{'no': 'text'}",
        "Decode batch, #running-req: 3, gen throughput (token/s): 12.00"
        ", #prefix-hit-token: 64, #prefix-miss-token: 36, kv requested (MB): 1.25",
        "Decode batch, #running-req: 4"
        ", #prefix-hit-token: 0, #prefix-miss-token: 10, kv requested (MB): 0.00",
        "Decode batch, #prefix-hit-token: 0, #prefix-miss-token: 0, kv requested (MB): 0.00",
    ]


ADMITTED = observability.Admitted(
    at=12.5, room=None, rid="r1", prompt_tokens=40, prefix_tokens=32, pages=[7]
)
SENT = observability.Sent(
    at=13.0, room=5, peer="agent", source_pages=[1, 2], destination_pages=[8, 9], bytes=64
)


@pytest.fixture
def restart() -> Iterator[None]:
    """Clears the cache of the process's event log, as a restart does."""
    observability.event_log.cache_clear()
    yield
    observability.event_log.cache_clear()


@pytest.mark.parametrize("value", [None, ""])
def test_no_event_log_by_default(
    monkeypatch: pytest.MonkeyPatch, restart: None, value: str | None
) -> None:
    """Guards against a log without the setting."""
    monkeypatch.delenv(EVENT_LOG.name, raising=False)
    if value is not None:
        monkeypatch.setenv(EVENT_LOG.name, value)
    assert observability.event_log("decode") is None


def test_event_log(monkeypatch: pytest.MonkeyPatch, restart: None, tmp_path: Path) -> None:
    """Guards against lines that are still buffered when a server is killed, or lack their type;
    against both sides writing to one file; and against a restarted server with the same process id
    that erases the earlier log."""
    monkeypatch.setenv(EVENT_LOG.name, str(tmp_path / "log"))
    for _ in range(2):
        for side, event in (("decode", ADMITTED), ("prefill", SENT)):
            log = observability.event_log(side)
            assert log is not None and observability.event_log(side) is log
            observability.record(side, lambda event=event: event)
        observability.event_log.cache_clear()
    for side, name, event in (("decode", "admitted", ADMITTED), ("prefill", "sent", SENT)):
        lines = (tmp_path / "log" / f"{side}-{os.getpid()}.jsonl").read_text().splitlines()
        expected = {"type": name} | msgspec.structs.asdict(event)
        assert [json.loads(line) for line in lines] == [expected] * 2
