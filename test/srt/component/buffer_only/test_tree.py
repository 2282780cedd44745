"""The cache as SGLang builds it: with a stage, with other pools and stores, and without the
mode."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from prometheus_client import REGISTRY

from component.buffer_only.cache import LAYERS, PAGE, Cache, prompt, server_arguments
from component.buffer_only.scenes import steps, stored
from component.buffer_only.scripted_store import ScriptedStore, until
from sglang.srt.disaggregation.delta.decode import invariants
from sglang.srt.mem_cache import hiradix_cache
from sglang.srt.mem_cache.buffer_only import metrics
from sglang.srt.mem_cache.buffer_only.host_pool import staging_buffer
from sglang.srt.mem_cache.buffer_only.jobs import Threads
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool


def device_pool(kind: str) -> Any:
    """Return a device pool of 4096 tokens in pages of 64."""
    if kind == "mha":
        return MHATokenToKVPool(4096, 64, torch.float16, 2, 8, LAYERS, "cpu", False)
    if kind == "mla":
        return MLATokenToKVPool(4096, 64, torch.bfloat16, 16, 4, LAYERS, "cpu", False)
    return NSATokenToKVPool(
        4096, 64, 16, torch.bfloat16, 4, LAYERS, "cpu", 128, False, kv_cache_dim=20
    )


@pytest.mark.hazard("copy-not-ordered")
def test_an_index_is_loaded_before_it_is_read(monkeypatch: pytest.MonkeyPatch):
    """Guards against an attention layer that selects by an index which is not loaded yet: it stores
    the index of its new tokens first, and without SGLang's fused kernel it would not wait there."""
    pool, done = device_pool("nsa"), []
    monkeypatch.setattr(
        "sglang.srt.layers.attention.nsa.index_buf_accessor.SetKAndS.execute",
        lambda **fields: done.append("stored"),
    )
    tokens = torch.zeros(1, dtype=torch.int64)
    pool.set_index_k_scale_buffer(1, tokens, tokens, tokens)
    pool.register_layer_transfer_counter(SimpleNamespace(wait_until=done.append))
    pool.set_index_k_scale_buffer(1, tokens, tokens, tokens)
    assert done == ["stored", 1, "stored"]


@pytest.mark.hazard("host-pool-size")
@pytest.mark.parametrize("kind", ["mha", "mla", "nsa"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("size", [1, 3, 2e-4], ids=["1 page", "3 pages", "0.2 MB"])
def test_a_host_pool_smaller_than_the_device_pool(
    kind: str, layout: str, size: float, caplog: pytest.LogCaptureFixture
):
    """Guards against SGLang's refusal of a host pool smaller than the device pool; in other modes
    it stays. The log has the size. Gigabytes are those of 0.5.23: 10**9 bytes of this rank's KV,
    and SGLang's one page for padding."""
    caplog.set_level("INFO")
    build = getattr(hiradix_cache, f"{kind.upper()}TokenToKVPoolHost")
    pool = device_pool(kind)
    with staging_buffer(pages=size) if size >= 1 else staging_buffer(gigabytes=size):
        host = build(pool, 2.0, 0, 64, layout)
    pages = size if size >= 1 else int(size * 1e9 // host.size_per_token) // 64 + 1
    assert host.page_num == max(pages, LAYERS) and host.is_staging and host.device_pool is pool
    assert f"a staging buffer of {pages} pages of 64 tokens (" in caplog.text
    with pytest.raises(AssertionError, match="larger than the device memory"):
        build(pool, 0.5, 0, 64, layout)
    assert not getattr(build(pool, 2.0, 0, 64, layout), "is_staging", False)


@pytest.mark.hazard("host-pool-size")
@pytest.mark.parametrize(
    ("settings", "threshold", "message"),
    [
        ({"pages": 9}, 5, "--hicache-buffer-pages 9 is too small"),
        ({"pages": None, "hicache_size": 2e-7}, 1, "--hicache-size 2e-07 is too small"),
        ({"pages": None, "hicache_size": 4e-6}, 40, "--hicache-size 4e-06 is too small"),
    ],
)
def test_a_stage_that_is_too_small(settings: dict[str, Any], threshold: int, message: str):
    """Guards against a stage in which no transfer fits. Only here a file's threshold is known."""
    extra = json.dumps({"interface_v1": 1, "prefetch_threshold": threshold * PAGE})
    with pytest.raises(ValueError, match=message):
        Cache(**settings, hicache_storage_backend_extra_config=extra)


@pytest.mark.hazard("wrong-gauges")
@pytest.mark.parametrize(
    ("settings", "pages"),
    [
        ({}, 40),  # five gigabytes, limited to the size of the device pool
        ({"hicache_ratio": 0.5}, 20),
        ({"hicache_ratio": 1.5}, 60),
        ({"hicache_ratio": 0.5, "pages": 16}, 16),
        ({"hicache_size": 4e-5}, None),
    ],
    ids=str,
)
def test_sizes_of_the_stage(settings: dict[str, Any], pages: int | None):
    """Guards against wrong stage sizes (default, SGLang 0.5.23's ratio, gigabytes) and against a
    wrong ``sglang:hicache_host_used_tokens``, the pool's size less its free part: SGLang's own list
    of free slots does not know the stage."""
    cache = Cache(**({"pages": None} | settings))
    host = cache.tree.token_to_kv_pool_host
    assert cache.stage.pages == (pages or host.page_num) > 4
    cache.compute(prompt(1, 3))
    cache.step()
    assert host.size - host.available_size() == 3 * PAGE == cache.stage.used() * PAGE
    cache.settle()
    assert host.available_size() == host.size


@pytest.mark.hazard("wrong-gauges")
def test_gauges_and_counters():
    """Guards against wrong values: gauges show the current state, counters grow by the events since
    the last update, at most once a second, and each token counts once."""
    cache, collector = stored(prompt(1, 3)), mock.Mock()
    labels = {"tp_rank": "0", "storage_backend": "a test"}

    def values(*names: str, **more: str) -> list[float | None]:
        names = [f"sglang:{name}".replace(":.", ":hicache_buffer_") for name in names]
        return [REGISTRY.get_sample_value(name, labels | more) for name in names]

    buffer_metrics = metrics.BufferMetrics(labels, collector, PAGE, clock=lambda: cache.now)
    read = cache.buffer.gauges, cache.buffer.totals
    cache.buffer.context.observe = buffer_metrics.observe
    cache.store.fail("batch_exists")
    for rid in ("fails", "r"):
        cache.flush()
        cache.serve(rid, prompt(1, 3))
        cache.now += 1.0
        cache.settle()
    cache.compute(prompt(2, 2))
    buffer_metrics.update(*read)
    assert values(".pages", ".write_pages", ".read_pages", ".peak_pages") == [16, 0, 0, 3]
    assert values(".pending_intents", ".pending_tokens") == [1, 2 * PAGE]
    assert values(".store_read_pages_total", ".store_written_pages_total") == [2, 4]
    # Named as in SGLang 0.5.23.
    assert values("storage_prefetch_hit_tokens_total") == [2 * PAGE]
    assert values(".store_faults_total", fault="error") == [1]
    assert values(".store_faults_total", fault="deadline") == [0], "exported before the first fault"
    assert values(".prefetch_choices_total", choice="slower") == [0]
    assert values(".load_back_seconds_sum", ".load_back_seconds_count") == [1.0, 1]
    cache.evict(1000)
    cache.compute(prompt(3, 2))
    cache.step(work=False)
    cache.store.hang("batch_set_v1")
    steps(cache, 2)
    for write_pages in (0, 2):  # at most once in a second
        buffer_metrics.update(*read)
        assert values(".write_pages") == [write_pages]
        cache.now += 1.0
    assert values(".store_up", ".store_calls", ".store_overdue_calls") == [0, 1, 1]
    assert values(".dropped_tokens_total", reason="evicted") == [2 * PAGE]
    # SGLang's own counters, in tokens.
    logged = [call.args for call in collector.log_prefetched_tokens.mock_calls]
    assert logged == [(2 * PAGE,), (0,)]
    assert collector.log_backuped_tokens.mock_calls[0].args == (4 * PAGE,)


def test_an_idle_prefill_server_checks_its_invariants(monkeypatch: pytest.MonkeyPatch):
    """Guards against a change after which invariants are not checked: the server compares numbers
    that both servers' trees have. A flush is a change, because decode may have computed all
    requests before it."""
    checks = []
    monkeypatch.setattr(invariants, "idle_rooms", lambda manager: [])
    monkeypatch.setattr(invariants, "idle_problems", lambda server: checks.append(server) or [])
    cache = Cache()
    server = SimpleNamespace(
        disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=None), tree_cache=cache.tree,
        _checked=None, _leftover_since=None,
    )  # fmt: skip
    for _ in range(2):
        invariants.BalancedScheduler.check_invariants(server)
    assert len(checks) == 1
    cache.tree.reset()
    invariants.BalancedScheduler.check_invariants(server)
    assert len(checks) == 2


def test_an_idle_server_with_another_tree_checks_its_rows_and_slots(monkeypatch):
    """Guards against unchecked rows and slots on prefill servers of models with recurrent state,
    which use another tree of SGLang: leaks must be found, and the check must be recorded."""
    monkeypatch.setattr(invariants, "idle_rooms", lambda manager: [])
    server = SimpleNamespace(
        disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=None), tree_cache=object(),
        token_to_kv_pool_allocator=None, max_total_num_tokens=0, _checked=None,
        req_to_token_pool=SimpleNamespace(size=2, free_slots=[1, 0]), _leftover_since=None,
        req_to_metadata_buffer_idx_allocator=SimpleNamespace(size=2, free_slots=[0]),
    )  # fmt: skip
    check = invariants.BalancedScheduler.check_invariants
    with pytest.raises(invariants.InvariantError, match="1 of 2 metadata slots are free"):
        check(server)
    server.req_to_metadata_buffer_idx_allocator.free_slots.append(1)
    check(server)
    assert server._checked is not None


def test_without_the_mode_sglangs_own_cache_is_used():
    """Guards against changes on servers that have the patch set installed without the mode."""
    args = server_arguments(hicache_host_memory_mode="cache", hicache_buffer_pages=None)
    tree = Cache().build_tree(args)
    try:
        assert not hasattr(tree, "buffer") and not tree.cache_controller.staging
        assert tree.cache_controller.prefetch_thread.is_alive()
        assert tree.token_to_kv_pool_host.size > 40 * PAGE
        assert type(tree.eviction_strategy).__name__ == "LRUStrategy"
        tree.check_hicache_events()
        assert tree.check_prefetch_progress("unknown")
        tree.reset()
    finally:
        ok, _ = tree.detach_storage_backend()
    assert ok


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_HICACHE_BUFFER_READ_TIMEOUT", "a while"),
        ("SGLANG_HICACHE_STORE_DEADLINE", "soon"),
        ("SGLANG_HICACHE_STORE_DEADLINE", "-1"),
    ],
)
def test_variables_are_refused_at_start(monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    """Guards against an invalid value that raises when the store hangs, or sets a wrong limit."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} must be"):
        Cache()


def test_the_read_timeout_variable_is_in_seconds(monkeypatch: pytest.MonkeyPatch):
    """Guards against a variable in seconds that is read as milliseconds."""
    monkeypatch.setenv("SGLANG_HICACHE_BUFFER_READ_TIMEOUT", "2.5")
    assert Cache().buffer.context.settings.prefetch_timeout_ms == 2500


@pytest.mark.hazard("flush-or-detach-under-way")
@pytest.mark.parametrize("in_a_call", [False, True])
def test_the_store_cannot_be_changed_while_the_server_runs(in_a_call: bool):
    """Guards against a change of the store, which alone keeps KV, while calls run. The end of the
    process closes the store, but not during a call: a native client without its memory would
    crash."""
    cache, closed = Cache(), []
    for ok, message in (
        cache.tree.detach_storage_backend(),
        cache.tree.attach_storage_backend("dynamic", hicache_write_policy="write_back"),
    ):
        assert not ok and "--hicache-storage-backend" in message and "Restart" in message
    assert cache.tree.write_through_threshold == 1
    if in_a_call:
        cache.store.hang("batch_set_v1")
    assert cache.tree.enable_storage and cache.serve("r", prompt(1, 3)) == 0
    steps(cache, 4)
    cache.store.close = lambda: closed.append(True)
    cache.tree.shutdown()
    assert cache.tree.enable_storage is in_a_call
    assert closed == ([] if in_a_call else [True]), "closed once"


def test_with_threads():
    """Guards against faults that need real threads, in which the order of events is not fixed."""
    cache, tokens = Cache(threads=Threads), prompt(1, 6)
    cache.compute(tokens)
    stepping_until(cache, lambda: not cache.buffer.busy and not cache.stage.used())
    cache.flush()
    cache.want("r", tokens)
    stepping_until(cache, lambda: cache.tree.check_prefetch_progress("r"))
    assert cache.compute(tokens, rid="r") == 5 * PAGE
    stepping_until(cache, lambda: not cache.buffer.busy and not cache.stage.used())
    assert cache.buffer.close()


def stepping_until(cache: Cache, condition: Any) -> None:
    """Run idle steps of a scheduler until ``condition``; only steps make progress."""
    until(lambda: cache.step(work=False) or condition(), pause=0.001)


@pytest.mark.hazard("holes-in-answers")
def test_keys_of_the_prefix():
    """Guards against a wrong prefix for backends that place pages by their prefix: they get all of
    it, in every batch, even if they changed the list of the previous call."""
    seen: list[tuple[str, list[str], list[str]]] = []

    class Placing(ScriptedStore):
        def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
            return self._note("exists", keys, extra_info, super().batch_exists(keys))

        def batch_get_v1(self, keys: list[str], slots: Any, extra_info: Any = None) -> list[bool]:
            return self._note("get", keys, extra_info, super().batch_get_v1(keys, slots))

        def batch_set_v1(self, keys: list[str], slots: Any, extra_info: Any = None) -> list[bool]:
            return self._note("set", keys, extra_info, super().batch_set_v1(keys, slots))

        def _note(self, method: str, keys: list[str], extra_info: Any, answer: Any) -> Any:
            seen.append((method, list(keys), list(extra_info.prefix_keys)))
            extra_info.prefix_keys.extend(keys)
            return answer

    cache = Cache(Placing(), settings={"pass_prefix_keys": True})
    tokens = prompt(2, 20, base=prompt(1, 3))
    cache.compute(prompt(1, 3))
    cache.compute(tokens)
    cache.settle()
    chain = cache.keys(tokens)
    cache.flush()
    cache.serve("r", tokens)
    cache.settle()
    assert len({method for method, _, _ in seen}) == 3
    for _, keys, before in seen:
        assert before == chain[: len(before)] and keys == chain[len(before) :][: len(keys)]
