"""What a decode server reports about its pool: every token once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from component.decode.checks import check
from component.decode.decoder import Decoder
from sglang.srt.disaggregation.delta.decode.scheduler import readings
from sglang.srt.observability.metrics_collector import QueueCount

PROMPT = [token % 50 for token in range(3, 163)]  # 160 tokens: 10 pages of 16


@pytest.fixture(params=[1, 16])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A server whose tree holds the prompt, with three requests for it in transfer."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS", "0")
    decoder = Decoder(request.param, 1024)
    decoder.submit(PROMPT, new=1)
    decoder.drain()
    for number in range(3):
        decoder.submit([*PROMPT, *[number] * 32], new=4)
    decoder.tick_queues()
    check(decoder)
    assert len(decoder.in_transfer) == 3
    return decoder


@pytest.mark.hazard("flush-while-held")
def test_gauges_count_every_token_once(decoder: Decoder) -> None:
    """Guards against shared tokens that count once for each request that holds them."""
    assert readings(decoder) == {
        "decode_prefix_leases": 3,
        "decode_protected_tokens": 160,
        "kv_evictable_tokens": 0,
        "num_decode_deferred_kv_release_reqs": 0,
        "decode_deferred_kv_release_tokens": 0,
    }
    decoder.abort(decoder.in_transfer[0].rid)
    decoder.tick_queues()
    found = readings(decoder)
    assert found["decode_prefix_leases"] == 3
    assert found["num_decode_deferred_kv_release_reqs"] == 1
    assert found["decode_deferred_kv_release_tokens"] == 32
    decoder.drain()
    found = readings(decoder)
    assert (found["decode_prefix_leases"], found["decode_protected_tokens"]) == (0, 0)
    assert found["kv_evictable_tokens"] == decoder.tree_cache.total_size()


def test_usage_is_protected_and_private_tokens(decoder: Decoder) -> None:
    """Guards against SGLang's usage, by which routers balance, counting a shared prefix for each
    request, or pages of ended transfers as free."""
    used, usage, free, evictable = decoder._get_token_info()
    assert (used, usage) == (160 + 3 * 32, (160 + 3 * 32) / 1024)
    assert free + evictable == 1024 - used
    decoder.abort(decoder.in_transfer[0].rid)
    decoder.tick_queues()
    assert decoder._get_token_info()[0] == used
    assert decoder.disagg_decode_prealloc_queue.num_tokens_pre_allocated == 2 * 32


def test_load_counts_only_what_has_no_pages_on_top(decoder: Decoder) -> None:
    """Guards against requests in transfer, or waiting to run, that count twice: their pages are in
    use already. Stock adds the length of every request that does not run."""
    decoder.__dict__.update(is_hybrid_swa=False, is_hybrid_ssm=False, dp_rank=0)
    decoder.deliver(decoder.in_transfer[0])
    decoder.tick_queues()
    assert len(decoder.waiting_queue) == 1
    used = decoder._get_token_info()[0]
    assert decoder.get_load().num_tokens == used
    queued = decoder.submit([1] * 100, ready=False)
    load = decoder.get_load()
    assert load.num_tokens == used + queued.seqlen
    assert (load.num_reqs, load.num_waiting_reqs) == (4, 4)


def test_a_server_without_the_flag_is_left_alone(decoder: Decoder) -> None:
    """Guards against stock numbers that change: without the flag nothing is shared."""
    queue = decoder.disagg_decode_prealloc_queue
    queue.tree_cache = SimpleNamespace(serves_decode=False)
    assert queue.num_tokens_pre_allocated == 3 * (160 + 32)


def test_queues_are_counted_by_priority(decoder: Decoder) -> None:
    """Guards against statistics that end a server which schedules by priority: SGLang asks the
    entries of decode's queues for one."""
    for number, req in enumerate(decoder.in_transfer):
        req.priority = number % 2
    counted = QueueCount.from_reqs(decoder.disagg_decode_transfer_queue.queue, True)
    assert (counted.total, counted.by_priority) == (3, {0: 2, 1: 1})
