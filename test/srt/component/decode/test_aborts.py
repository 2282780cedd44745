"""Aborts that SGLang's own way of doing it leaves half done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.checks import check_idle
from component.decode.decoder import Decoder
from component.decode.test_exits import bring_to
from sglang.srt.disaggregation.delta.decode import scheduler as aborts
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler import Scheduler


class Sender:
    """Counts what happened to a room."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def abort(self) -> None:
        self.calls.append("abort")

    def clear(self) -> None:
        self.calls.append("clear")


def prefill_with(*rids: str) -> tuple[Any, dict[str, Any]]:
    """As much of a prefill scheduler as an abort needs, with requests that wait for their turn."""
    from sglang.srt.disaggregation.utils import DisaggregationMode

    scheduler = Scheduler.__new__(Scheduler)
    reqs = {
        rid: SimpleNamespace(
            rid=rid,
            disagg_kv_sender=Sender(),
            mamba_pool_idx=None,
            metadata_buffer_index=-1,
        )
        for rid in rids
    }
    scheduler.__dict__.update(
        server_args=SimpleNamespace(disaggregation_mode="prefill"),
        disaggregation_mode=DisaggregationMode.PREFILL,
        waiting_queue=list(reqs.values()),
        enable_hicache_storage=False,
        send_to_tokenizer=SimpleNamespace(send_output=lambda *message: None),
        grammar_manager=SimpleNamespace(abort_requests=lambda request: None),
        req_to_metadata_buffer_idx_allocator=SimpleNamespace(free=lambda index: None),
        disagg_prefill_bootstrap_queue=SimpleNamespace(
            queue=[], kv_manager=SimpleNamespace(rooms=object())
        ),
        disagg_prefill_inflight_queue=[],
        running_batch=SimpleNamespace(reqs=[]),
        cur_batch=None,
    )
    return scheduler, reqs


@pytest.mark.parametrize(("rid", "ended"), [("a", ["a"]), ("", ["a", "b"]), ("x", [])])
def test_a_request_that_waits_on_prefill(rid: str, ended: list[str]) -> None:
    """Guards against a room that stays in prefill's tables, and a decode server that waits for it,
    when the abort finds the request in the waiting queue; and against ending another one's."""
    scheduler, reqs = prefill_with("a", "b")
    scheduler.abort_request(AbortReq(rid=rid, abort_all=not rid))
    assert [req.rid for req in scheduler.waiting_queue] == [r for r in reqs if r not in ended]
    for name, req in reqs.items():
        assert req.disagg_kv_sender.calls == (["abort", "clear"] if name in ended else [])


@pytest.mark.parametrize("resumed", [False, True])
def test_tokens_come_before_the_end(resumed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was retracted has sent tokens, the last of which may still be with the
    detokenizer. Guards against an end that overtakes them: the client would wait for ever."""
    decoder = Decoder(16, 1024)
    req = bring_to(decoder, "retracted")
    req.send_token_offset = 3
    if resumed:
        decoder.tick_queues()
        assert req in decoder.waiting_queue
    direct: list[Any] = []
    monkeypatch.setattr(decoder.mailbox, "send_output", lambda *message: direct.append(message))
    decoder.abort(req.rid)
    assert direct == [], "an end that does not go the way of the tokens"
    assert decoder.mailbox.ends[req.rid] == 1
    assert decoder.mailbox.reasons[req.rid]["type"] == "abort"
    assert not hasattr(req, "kv_cache_cpu")
    decoder.drain()
    check_idle(decoder)


@pytest.mark.nightly
def test_without_it_the_end_overtakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a test that would pass in any case."""
    monkeypatch.setattr(aborts, "end_streaming", lambda scheduler, request: None)
    decoder = Decoder(16, 1024)
    req = bring_to(decoder, "retracted")
    direct: list[Any] = []
    monkeypatch.setattr(decoder.mailbox, "send_output", lambda *message: direct.append(message))
    decoder.abort(req.rid)
    assert len(direct) == 1
