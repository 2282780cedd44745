"""A decode server's reports about its pool, with every token once; and when it may sleep."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.decoder import Decoder
from component.decode.stages import OTHERS, bring_to
from component.decode.steps import admit, finish, health_check, ids, land, serve, tick, turn
from sglang.srt.disaggregation.delta.decode import deferred
from sglang.srt.disaggregation.delta.decode.scheduler import readings
from sglang.srt.disaggregation.delta.observability import event_log
from sglang.srt.disaggregation.delta.unserved import ExactId
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache import common
from sglang.srt.observability.metrics_collector import QueueCount, SchedulerStats
from sglang.srt.patchset.environment import EVENT_LOG, QUARANTINE_TIMEOUT

PROMPT = [token % 50 for token in range(3, 163)]  # 160 tokens: 10 pages of 16


@pytest.fixture(params=[1, 16])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """A server with the prompt in its tree, and three requests for it in transfer."""
    decoder = Decoder(request.param, 1024)
    serve(decoder, PROMPT)
    reqs = admit(decoder, *([*PROMPT, *[number] * 32] for number in range(3)), new=4)
    assert decoder.in_transfer == reqs
    return decoder


@pytest.mark.hazard("flush-while-held")
def test_gauges_count_every_token_once(decoder: Decoder) -> None:
    """Guards against tokens of requests or of ended transfers that count as evictable."""
    assert readings(decoder) == {
        "kv_evictable_tokens": 0,
        "num_decode_deferred_kv_release_reqs": 0,
        "decode_deferred_kv_release_tokens": 0,
    }
    decoder.abort(decoder.in_transfer[0].rid)
    decoder.tick_queues()
    found = readings(decoder)
    assert found["num_decode_deferred_kv_release_reqs"] == 1
    assert found["decode_deferred_kv_release_tokens"] == 32
    decoder.drain()
    found = readings(decoder)
    assert found["kv_evictable_tokens"] == decoder.tree_cache.total_size()


def test_a_release_that_raises_keeps_no_other_one(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against one deferred release that raises and leaves the pages of the later ones
    allocated, and against an end of a deferred release that no counter shows."""
    failing, freed, drained = decoder.in_transfer
    stock = common.release_kv_cache

    def release(req: Any, *args: Any, **kwargs: Any) -> None:
        if req is failing:
            raise RuntimeError("double free")
        stock(req, *args, **kwargs)

    monkeypatch.setattr(common, "release_kv_cache", release)
    for req in (failing, freed, drained):
        decoder.abort(req.rid)
    decoder.tick_queues()
    assert decoder.held == [failing, freed, drained]
    available = decoder.token_to_kv_pool_allocator.available_size()
    decoder.room(drained).writing = False
    decoder.tick_queues()
    assert decoder.telemetry.by("decode_deferred_kv_release") == {("drained",): 1}
    late = time.monotonic() + QUARANTINE_TIMEOUT.read()
    monkeypatch.setattr(deferred, "time", SimpleNamespace(monotonic=lambda: late))
    with pytest.raises(RuntimeError, match="double free"):
        decoder.tick_queues()
    assert decoder.held == []
    assert decoder.token_to_kv_pool_allocator.available_size() == available + 2 * 32
    counted = {("drained",): 1, ("error",): 1, ("timeout",): 1}
    assert decoder.telemetry.by("decode_deferred_kv_release") == counted
    (line,) = [line for line in caplog.messages if "release failed" in line]
    assert line.startswith(f"request {failing.rid} (bootstrap_room={failing.bootstrap_room}): ")


def test_usage_is_protected_and_private_tokens(decoder: Decoder) -> None:
    """Guards against SGLang's usage, by which routers balance, that counts a shared prefix for each
    request, or pages of ended transfers as free."""
    used, usage, free, evictable = decoder._get_token_info()
    assert (used, usage) == (160 + 3 * 32, (160 + 3 * 32) / 1024)
    assert free + evictable == 1024 - used
    decoder.abort(decoder.in_transfer[0].rid)
    tick(decoder)
    assert decoder._get_token_info()[0] == used
    queue = decoder.disagg_decode_prealloc_queue
    assert queue.num_tokens_pre_allocated == 2 * 32
    queue.tree_cache = SimpleNamespace(serves_decode=False)  # as without the flag: stock's number
    assert queue.num_tokens_pre_allocated == 2 * (160 + 32)


def test_load_counts_only_what_has_no_pages_on_top(decoder: Decoder) -> None:
    """Guards against requests in transfer, or waiting to run, that count twice: their pages are in
    use already. Stock adds the length of every request that does not run."""
    decoder.__dict__.update(is_hybrid_swa=False, is_hybrid_ssm=False, dp_rank=0)
    land(decoder, decoder.in_transfer[0])
    assert len(decoder.waiting_queue) == 1
    used = decoder._get_token_info()[0]
    assert decoder.get_load().num_tokens == used
    queued = decoder.submit([1] * 100, ready=False)
    load = decoder.get_load()
    assert load.num_tokens == used + queued.seqlen
    assert (load.num_reqs, load.num_waiting_reqs) == (4, 4)


def test_load_counts_local_turns() -> None:
    """Guards against a server that looks idle to routers while it computes turns itself: such a
    request is in none of SGLang's queues. Its pages are in use already."""
    decoder = Decoder(16, 6400, local=400, chunk=256)
    decoder.__dict__.update(is_hybrid_swa=False, is_hybrid_ssm=False, dp_rank=0)
    decoder.stats = SchedulerStats()
    admit(decoder, *(ids(number, 200) for number in range(8)), new=100)
    assert len(decoder.local) == 8
    while decoder.local:
        turn(decoder)
        running = len(decoder.running_batch.reqs)
        load, loads = decoder.get_load(), decoder.get_loads()
        assert (load.num_reqs, load.num_waiting_reqs) == (8, 8 - running)
        assert (loads.num_running_reqs, loads.num_waiting_reqs) == (running, 8 - running)
        assert load.num_tokens == loads.num_used_tokens == decoder._get_token_info()[0]
    assert running == 8
    finish(decoder)


@pytest.mark.parametrize(("first", "counted"), [(1, 6), (5, 1)])
def test_reasoning_tokens_of_a_remote_turn(first: int, counted: int) -> None:
    """Guards against a client's count that lacks one token, or, if prefill's token ends the
    reasoning, against one that has the whole answer: stock counts only tokens that decode
    computes."""
    server = Decoder(16, 640)
    server._think_end_id = 5
    (req,) = admit(server, [7] * 20, new=6)
    req.require_reasoning = True
    land(server, req, first_token=first)
    finish(server)
    assert req.reasoning_tokens == counted


def test_the_event_log_names_admitted_requests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against ids unknown to the log's encoder: every event of decode was lost."""
    monkeypatch.setenv(EVENT_LOG.name, str(tmp_path))
    event_log.cache_clear()
    decoder = Decoder(16, 640)
    req = decoder.submit(PROMPT, new=4)
    req.rid = ExactId(req.rid)
    decoder.tick_queues()
    land(decoder, req)
    finish(decoder)
    event_log.cache_clear()
    (log,) = tmp_path.glob("decode-*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["rid"] for line in lines if line["type"] == "admitted"] == [str(req.rid)]


def test_queues_are_counted_by_priority(decoder: Decoder) -> None:
    """Guards against statistics that end a server with priority scheduling: SGLang reads the
    priority of the entries in decode's queues."""
    for number, req in enumerate(decoder.in_transfer):
        req.priority = number % 2
    counted = QueueCount.from_reqs(decoder.disagg_decode_transfer_queue.queue, True)
    assert (counted.total, counted.by_priority) == (3, {0: 2, 1: 1})


# ---- health checks ----


@pytest.mark.parametrize("what", ["nothing", "queue", "transfer", "retracted", "held", "released"])
def test_health_of_a_server_on_which_nothing_runs(what: str) -> None:
    """Guards against a server that is restarted because prefill computes a long prompt: SGLang's
    health check becomes a request, which waits behind others for memory that transfers own."""
    decoder = Decoder(16, 1024)
    if what in ("queue", "transfer"):
        admit(decoder, [7] * 1000, new=4)
    if what == "queue":
        decoder.submit([3] * 500)
    if what in ("retracted", "held"):
        bring_to(decoder, what)
        for _ in range(OTHERS):  # until the requests beside it end
            decoder.tick_batch()
    decoder.offload_tags = {"kv_cache"} if what == "released" else set()
    assert health_check(decoder) == ((0, 1) if what == "nothing" else (1, 0))


# ---- when a scheduler may sleep (``--sleep-on-idle``) ----


class Sleeper:
    """Counts sleeps instead of sleeping."""

    def __init__(self) -> None:
        self.naps = 0

    def maybe_sleep(self) -> None:
        self.naps += 1


def naps(decoder: Any) -> int:
    """Return the number of sleeps of the scheduler now: one or none."""
    decoder.idle_sleeper = Sleeper()
    decoder.maybe_sleep_on_idle()
    return decoder.idle_sleeper.naps


def test_a_prefill_server_is_awake_while_a_handshake_is_under_way() -> None:
    """Guards against up to a second of sleep during a handshake, although the decode server
    announces its pages then: stock's scheduler does that."""
    prefill = Scheduler.__new__(Scheduler)
    manager = SimpleNamespace(rooms=object())
    bootstrap = SimpleNamespace(queue=[], kv_manager=manager)
    prefill.__dict__.update(
        vars(Decoder(16, 640)),
        disaggregation_mode=DisaggregationMode.PREFILL,
        disagg_prefill_inflight_queue=[],
        disagg_prefill_bootstrap_queue=bootstrap,
    )
    assert naps(prefill) == 1
    bootstrap.queue.append("a request whose room is not announced yet")
    assert naps(prefill) == 0


@pytest.mark.parametrize("stage", ["retracted", "held"])
def test_a_decode_server_is_awake_while_requests_wait_that_stock_does_not_count(stage: str) -> None:
    """Guards against a second of sleep before each check of a retracted request, or of pages that
    are freed once prefill has stopped writing to them."""
    decoder = Decoder(16, 640)
    bring_to(decoder, stage)
    decoder.submitted[0].to_finish = FINISH_ABORT()
    for _ in range(2):  # until the requests beside it have left
        decoder.tick_batch()
    assert decoder.is_fully_idle() and naps(decoder) == 0
    finish(decoder)
    assert naps(decoder) == 1
