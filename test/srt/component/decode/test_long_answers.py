"""Answers that are longer than SGLang's estimate of an answer."""

from __future__ import annotations

import pytest

from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from sglang.srt.disaggregation import decode

#: SGLang's estimate is 4,096 tokens, beside 512 that are reserved; here both are an eighth or less.
ESTIMATE, RESERVE, ANSWER = 128, 64, 512


@pytest.fixture(autouse=True)
def _short_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "CLIP_MAX_NEW_TOKEN", ESTIMATE)
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS", "0")


def ids(start: int, count: int) -> list[int]:
    """A text of its own for each ``start``."""
    return [(start * 7 + number * (start + 1)) % 50 for number in range(count)]


def reserved(decoder: Decoder) -> int:
    """What admission keeps free for those that run."""
    found: int = decoder.disagg_decode_prealloc_queue._budget.claims.reserved
    return found


def test_a_running_request_reserves_to_its_end() -> None:
    """Guards against a reserve of nothing for a request that has generated more than was expected:
    its next tokens would be given to others, and it would be retracted."""
    decoder = Decoder(16, 1024, reserve=RESERVE)
    req = decoder.submit(ids(1, 64), new=ANSWER)
    decoder.tick_queues()
    decoder.deliver(req)
    decoder.tick_queues()
    while not req.finished():
        decoder.tick_batch()
        check(decoder)
        if not req.finished():
            left = 64 + ANSWER - req.kv_allocated_len
            assert min(left, RESERVE) - 16 < reserved(decoder) <= RESERVE
    check_idle(decoder)


def test_long_answers_are_seldom_retracted() -> None:
    """Guards against a pool that is filled with new requests at the cost of those that run."""
    decoder = Decoder(16, 2048, rows=24, reserve=RESERVE)
    reqs = [decoder.submit(ids(start, 48), new=ANSWER) for start in range(24)]
    decoder.drain(20_000)
    assert all(len(req.output_ids) == ANSWER for req in reqs)
    retractions = sum(req.retraction_count for req in reqs)
    print(f"{retractions} retractions of {len(reqs)} requests")
    assert retractions <= 40
    check_idle(decoder)
