"""The fields at the end of SGLang's "Decode batch" lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from sglang.srt.disaggregation.delta.decode.scheduler import DecodeLineFields
from sglang.srt.disaggregation.delta.observability import STATS


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger with the fields, and counters that the test may change."""
    monkeypatch.setattr(STATS, "totals", dict(STATS.totals))
    logger = logging.getLogger("test_log_fields")
    fields = DecodeLineFields()
    logger.addFilter(fields)
    yield logger
    logger.removeFilter(fields)


def test_what_happened_since_the_last_line(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against totals in the place of differences, and against fields in front of SGLang's
    own, which tools parse from the left."""
    with caplog.at_level(logging.INFO):
        STATS.add("decode_prefix_prompt_tokens", 100)
        STATS.add("decode_prefix_hit_tokens", 64)
        STATS.add("kv_transfer_requested_bytes", 1_250_000)
        logger.info("Decode batch, #running-req: 3, gen throughput (token/s): 12.00")
        STATS.add("decode_prefix_prompt_tokens", 10)
        logger.info("Decode batch, #running-req: 4")
        logger.info("Decode batch, #running-req: 5")
    assert caplog.messages == [
        "Decode batch, #running-req: 3, gen throughput (token/s): 12.00"
        ", #prefix-hit-token: 64, #prefix-miss-token: 36, kv requested (MB): 1.25",
        "Decode batch, #running-req: 4"
        ", #prefix-hit-token: 0, #prefix-miss-token: 10, kv requested (MB): 0.00",
        "Decode batch, #running-req: 5"
        ", #prefix-hit-token: 0, #prefix-miss-token: 0, kv requested (MB): 0.00",
    ]


def test_other_lines_stay_as_they_are(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against changed or lost lines, and against a line that eats the difference."""
    with caplog.at_level(logging.INFO):
        STATS.add("decode_prefix_prompt_tokens", 5)
        logger.info("Prefill batch, #new-seq: %d", 2)
        logger.info({"no": "text"})
        logger.info("Decode batch")
    assert caplog.messages[:2] == ["Prefill batch, #new-seq: 2", "{'no': 'text'}"]
    assert "#prefix-miss-token: 5" in caplog.messages[2]
