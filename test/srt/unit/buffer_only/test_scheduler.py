"""The scheduler's part: who is idle, what is prefetched, in which namespace, and what is
reported."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from sglang.srt.mem_cache.buffer_only.scheduler import BufferOnlyScheduler, report_storage_hit


class Stock:
    """As much of SGLang's scheduler as the mixin calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.batch = None

    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        return True

    def maybe_sleep_on_idle(self) -> None:
        self.calls["sleep"] += 1

    def get_new_batch_prefill(self) -> object:
        return self.batch

    def _prefetch_kvcache(self, req: object) -> None:
        self.calls["stock prefetch"] += 1

    def handle_generate_request(self, recv_req: SimpleNamespace) -> None:
        self.req = SimpleNamespace(lora_id=recv_req.lora_id, extra_key=recv_req.lora_id)
        self.init_req_max_new_tokens(self.req)

    def init_req_max_new_tokens(self, req: object) -> None:
        self.calls["init"] += 1


class Scheduler(BufferOnlyScheduler, Stock):
    pass


def scheduler(mode: str = "buffer_only", busy: bool = False) -> Scheduler:
    found = Scheduler()
    found.server_args = SimpleNamespace(hicache_host_memory_mode=mode)
    hits = {"r": 8}
    found.tree_cache = SimpleNamespace(
        buffer=SimpleNamespace(busy=busy), take_storage_hit=lambda rid: hits.pop(rid, 0)
    )
    return found


@pytest.mark.hazard("flush-or-detach-under-way", "idle-server")
def test_busy_pipelines_are_not_idle_and_do_not_sleep():
    """A flush would take the tree from under them, and a sleeping scheduler would not see that a
    copy has ended."""
    busy, idle = scheduler(busy=True), scheduler()
    assert not busy.is_fully_idle() and idle.is_fully_idle()
    assert busy.is_fully_idle(for_health_check=True)
    busy.maybe_sleep_on_idle(), idle.maybe_sleep_on_idle()
    assert (busy.calls["sleep"], idle.calls["sleep"]) == (0, 1)


@pytest.mark.hazard("tenants-meet-in-store")
@pytest.mark.parametrize(
    ("extra_key", "lora_id", "expected"),
    [(None, None, None), ("t", None, "t"), ("t", "lora", "tlora"), (None, "lora", "lora")],
)
def test_namespaces_reach_the_request(extra_key, lora_id, expected):
    """This release drops the tenant's key when it builds its request: tenants would share KV."""
    mine, stock = scheduler(), scheduler(mode="cache")
    for one in (mine, stock):
        one.handle_generate_request(SimpleNamespace(extra_key=extra_key, lora_id=lora_id))
    assert mine.req.extra_key == expected and stock.req.extra_key == lora_id
    # The next request has none, whatever the one before had.
    mine.handle_generate_request(SimpleNamespace(extra_key=None, lora_id=None))
    assert mine.req.extra_key is None


def request(**changes):
    fields = {"rid": "r", "retracted_stain": False, "cached_tokens_device": 12}
    fields |= {"cached_tokens_host": 0, "cached_tokens_storage": 0}
    return SimpleNamespace(**fields | changes)


@pytest.mark.hazard("wrong-gauges")
@pytest.mark.parametrize(
    ("device", "fetched", "expected"),
    [(12, 8, (4, 8)), (6, 8, (0, 6)), (12, 0, (12, 0)), (0, 8, (0, 0))],
)
def test_storage_hits_are_reported_as_such(device, fetched, expected):
    """Never as host hits, for the host keeps nothing; and no more than the request hit at all."""
    req = request(cached_tokens_device=device)
    report_storage_hit(req, fetched)
    assert (req.cached_tokens_device, req.cached_tokens_storage) == expected
    assert req.cached_tokens_host == 0


@pytest.mark.hazard("wrong-gauges")
def test_reported_once():
    """The request runs in several chunks, and perhaps again after a retraction."""
    found = scheduler()
    req = request()
    found.batch = SimpleNamespace(reqs=[req])
    found.get_new_batch_prefill(), found.get_new_batch_prefill()
    assert (req.cached_tokens_device, req.cached_tokens_storage) == (4, 8)
    retracted = request(retracted_stain=True)
    report_storage_hit(retracted, 8)
    assert retracted.cached_tokens_storage == 0


def test_the_stock_mode_is_stock():
    """With SGLang's host cache nothing of this happens."""
    found = scheduler(mode="cache", busy=True)
    req = request()
    found.batch = SimpleNamespace(reqs=[req])
    found.get_new_batch_prefill()
    found._prefetch_kvcache(req)
    found.maybe_sleep_on_idle()
    assert found.is_fully_idle() and req.cached_tokens_storage == 0
    assert found.calls["stock prefetch"] == 1 and found.calls["sleep"] == 1
