"""The scheduler's part: who is idle, what is prefetched, in which namespace, and what is
reported."""

from __future__ import annotations

import gc
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from sglang.srt.mem_cache.buffer_only import weight_updates
from sglang.srt.mem_cache.buffer_only.patience import Patience
from sglang.srt.mem_cache.buffer_only.scheduler import (
    NAP_S,
    BufferOnlyScheduler,
)


class Stock:
    """As much of SGLang's scheduler as the mixin calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.batch = None
        self.waiting_queue: list[object] = []
        self.running_batch = SimpleNamespace(reqs=[], batch_is_full=False)
        self.chunked_req: object = None
        self.chunked_prefill_size: int | None = None
        self.is_mixed_chunk = self.enable_priority_preemption = False
        self.page_size, self.is_generation = 4, True

    def get_num_allocatable_reqs(self, running: int) -> int:
        return 2 - running

    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        return True

    def flush_cache(self) -> bool:
        self.calls["flush"] += 1
        return self.is_fully_idle()

    def _check_pending_flush(self) -> None:
        self.calls["flushed later"] += self.is_fully_idle()

    def release_memory_occupation(self, recv_req: object) -> None:
        assert self.is_fully_idle()
        self.calls["released"] += 1

    def update(self, recv_req: object) -> object:
        self.on_update()
        return recv_req

    update_weights_from_disk = update_weights_from_distributed = update
    update_weights_from_tensor = update_weights_from_ipc = update

    def run_event_loop(self) -> None:
        self.calls["ran"] += 1

    def maybe_sleep_on_idle(self) -> None:
        self.calls["sleep"] += 1

    def get_new_batch_prefill(self) -> object:
        return self.batch

    def run_batch(self, batch: object, pp_proxy_tensors: object = None) -> object:
        return batch

    def process_batch_result(self, batch: object, result: object) -> None:
        self.calls["result"] += 1

    def handle_generate_request(self, recv_req: SimpleNamespace) -> None:
        self.req = SimpleNamespace(lora_id=recv_req.lora_id, extra_key=recv_req.lora_id)
        self.init_req_max_new_tokens(self.req)

    def init_req_max_new_tokens(self, req: object) -> None:
        self.calls["init"] += 1


class Scheduler(BufferOnlyScheduler, Stock):
    pass


def scheduler(busy: bool = False) -> Scheduler:
    found = Scheduler()
    found.server_args = SimpleNamespace(enable_dp_attention=False)
    found.model_config = SimpleNamespace(is_multimodal=False)
    found.offload_tags = set()
    found.said = []
    prefetches = SimpleNamespace(
        in_line=lambda *line: found.said.append(line), cancel=found.said.append
    )
    found.tree_cache = SimpleNamespace(
        buffer=SimpleNamespace(busy=busy, prefetches=prefetches, context=SimpleNamespace(now_ms=7)),
        take_storage_hit=lambda rid: 0,
    )
    return found


@pytest.mark.hazard("flush-or-detach-under-way", "idle-server")
def test_busy_pipelines_are_not_idle_and_do_not_sleep(monkeypatch: pytest.MonkeyPatch):
    """Idle checks of memory would find the locks of a copy, and a sleeping scheduler would not see
    that it has ended. One that looks without a pause would keep the interpreter from the threads
    that work for it."""
    naps: list[float] = []
    monkeypatch.setattr("time.sleep", naps.append)
    busy, idle = scheduler(busy=True), scheduler()
    assert not busy.is_fully_idle() and idle.is_fully_idle()
    assert busy.is_fully_idle(for_health_check=True)
    busy.maybe_sleep_on_idle(), idle.maybe_sleep_on_idle()
    assert (busy.calls["sleep"], idle.calls["sleep"]) == (0, 1)
    assert naps == [NAP_S] and NAP_S < 0.001


@pytest.mark.parametrize(("waited_ms", "flushed"), [(59_999, 0), (60_000, 1)])
def test_a_flush_that_may_wait_lets_the_store_have_what_it_takes(waited_ms, flushed):
    """``/flush_cache?timeout=``: refused when the time is over, it would be for ever. Its time is
    the ranks' agreed one: each by its own clock, they would empty their trees in different steps.
    """
    busy = scheduler(busy=True)
    busy._engine_paused = False
    busy._pending_flush = (SimpleNamespace(timeout_s=60.0), time.monotonic() - 1)
    context = busy.tree_cache.buffer.context
    busy._check_pending_flush()
    assert not busy.calls["flushed later"]
    context.now_ms += waited_ms
    busy._check_pending_flush()
    assert busy.calls["flushed later"] == flushed


@pytest.mark.hazard("flush-or-detach-under-way")
def test_a_flush_waits_for_no_store(monkeypatch):
    """A store that takes nothing would keep a server from being flushed for ever; an update of the
    weights, which asserts that the flush was done, would end it. The flush after an update names
    the keys by the weights in memory, if they are there."""
    found, named = scheduler(busy=True), []
    monkeypatch.setattr(found, "name_keys", lambda: named.append(1))
    found._weights_changed = True
    for tags in ({"weights"}, set()):
        found.offload_tags = tags
        assert found.flush_cache() and not found.is_fully_idle()
        assert len(named) == (not tags)


@pytest.mark.parametrize(("tags", "flushes"), [(None, 1), (["kv_cache"], 1), (["weights"], 0)])
def test_memory_is_released_when_no_copy_uses_it(tags, flushes):
    """SGLang unmaps the pool before it flushes, and asserts that the server is idle."""
    busy = scheduler(busy=True)
    busy.release_memory_occupation(SimpleNamespace(tags=tags))
    assert busy.calls["flush"] == flushes and busy.calls["released"] == 1


UPDATES = [f"update_weights_from_{where}" for where in ("disk", "distributed", "tensor", "ipc")]


@pytest.mark.parametrize("update", UPDATES)
def test_new_weights_have_keys_of_their_own(update, monkeypatch):
    """Or the store would serve the old weights' KV after an update, unless it is cleared."""
    found = scheduler()
    monkeypatch.setattr(weight_updates, "fingerprint", lambda model: model)
    monkeypatch.setattr(weight_updates, "gathered", lambda mine, group: [mine])
    names = []
    found.tree_cache.buffer.use = lambda namespace, nonce: names.append(namespace)
    found.tree_cache.buffer.context = SimpleNamespace(store=SimpleNamespace(namespace=None))
    found.tree_cache.pool_identity = dict
    runner = SimpleNamespace(model="old")
    found.tp_worker, found.tp_cpu_group = SimpleNamespace(model_runner=runner), None
    found.model_config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=dict))
    found.name_keys()
    found.on_update = lambda: setattr(runner, "model", "new")
    request = SimpleNamespace(flush_cache=True)
    assert getattr(found, update)(request) is request
    assert len(names) == 2 and names[0] != names[1]
    # Weights that come in many pieces: named once, when the cache is flushed at the end.
    hidden: list[str] = []
    found.tree_cache.buffer.hide = hidden.append
    for piece in ("a", "b", "c"):
        found.on_update = lambda piece=piece: setattr(runner, "model", piece)
        getattr(found, update)(SimpleNamespace(flush_cache=False))
    assert len(names) == 2 and len(set(hidden)) == 3
    found.server_args.enable_dp_attention = False
    for _ in range(2):
        assert found.flush_cache()
    assert len(set(names)) == len(names) == 3


@pytest.mark.hazard("tenants-meet-in-store")
@pytest.mark.parametrize(
    ("extra_key", "lora_id", "expected"),
    [(None, None, None), ("t", None, "t"), ("t", "lora", "tlora"), (None, "lora", "lora"),
     ("\ud800", "lora", "\ud800lora"), (["a"], "lora", "['a']lora"), (["a"], None, "['a']")],
)  # fmt: skip
def test_namespaces_reach_the_request(extra_key, lora_id, expected):
    """This release drops the tenant's key when it builds its request: tenants would share KV."""
    mine = scheduler()
    mine.handle_generate_request(SimpleNamespace(extra_key=extra_key, lora_id=lora_id))
    assert mine.req.extra_key == expected
    # The next request has none, whatever the one before had.
    mine.handle_generate_request(SimpleNamespace(extra_key=None, lora_id=None))
    assert mine.req.extra_key is None


def request(**changes):
    fields = {"rid": "r", "retracted_stain": False, "cached_tokens_device": 12}
    fields |= {"cached_tokens_host": 0, "cached_tokens_storage": 0}
    return SimpleNamespace(**fields | changes)


@pytest.mark.hazard("wrong-gauges")
@pytest.mark.parametrize(
    ("device", "fetched", "retracted", "expected"),
    [
        (12, 8, False, (4, 8)),
        (6, 8, False, (0, 6)),
        (12, 0, False, (12, 0)),
        (0, 8, False, (0, 0)),
        (12, 8, True, (12, 0)),
    ],
)
def test_storage_hits_are_reported_as_such(device, fetched, retracted, expected):
    """Never as host hits, for the host keeps nothing; no more than the request hit at all; and
    once, though it runs in several chunks, and perhaps again after a retraction."""
    found, req = scheduler(), request(cached_tokens_device=device, retracted_stain=retracted)
    hits = {"r": fetched}
    found.tree_cache.take_storage_hit = lambda rid: hits.pop(rid, 0)
    found.batch = SimpleNamespace(reqs=[req])
    found.get_new_batch_prefill(), found.get_new_batch_prefill()
    assert (req.cached_tokens_device, req.cached_tokens_storage) == expected
    assert req.cached_tokens_host == 0


def test_prefetches_know_the_line_and_who_runs():
    """They are fetched in the order of the queue, with those behind it that wait for their decode
    server; what is kept for a request that runs would never be given back."""
    found = scheduler()
    found.waiting_queue = [request(rid="b"), request(rid="a")]
    found.get_new_batch_prefill()
    found.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[request(rid="c")])
    found.batch = SimpleNamespace(reqs=[request(rid="b")])
    found.get_new_batch_prefill()
    assert found.said == [(["b", "a"], False), (["b", "a", "c"], False), "b"]


@pytest.mark.parametrize(
    ("running", "changes", "full"),
    [
        (1, {}, False),
        (2, {}, True),
        (1, {"chunked_req": "a place of its own"}, True),
        (0, {"running_batch": SimpleNamespace(reqs=[], batch_is_full=True)}, True),
        (2, {"enable_priority_preemption": True}, False),
    ],
)
def test_prefetches_know_whether_somebody_can_be_admitted(running, changes, full):
    """A step that gives the store time for a request that does not get in takes longer for
    nothing."""
    found = scheduler()
    found.running_batch.reqs = [request()] * running
    found.__dict__.update(changes)
    found.get_new_batch_prefill()
    assert found.said == [([], full)]


@pytest.mark.parametrize("preemption", [False, True])
@pytest.mark.parametrize(
    ("left", "mixed", "full"),
    [(100, False, True), (16, False, True), (13, False, True), (12, False, False),
     (12, True, True), (11, True, False)],
)  # fmt: skip
def test_a_prompt_in_chunks_keeps_others_out(left: int, mixed: bool, full: bool, preemption: bool):
    """SGLang looks at one request behind it all the same, and would load the hit of that long
    before it can run: less than a page of this step is left to it."""
    found = scheduler()
    found.get_num_allocatable_reqs = lambda running: 9
    found.running_batch.reqs = [request()]
    found.chunked_prefill_size, found.is_mixed_chunk = 16, mixed
    found.enable_priority_preemption = preemption
    found.chunked_req = request(
        origin_input_ids=[0] * (left + 19), output_ids=[0], prefix_indices=[0] * 20
    )
    found.get_new_batch_prefill()
    assert found.said == [([], full)]


@pytest.mark.parametrize(
    ("wanted", "start", "asked"), [(True, 7, 7), (True, 0, 0), (True, -1, 11), (False, 7, 11)]
)
def test_a_request_waits_for_no_hit_that_it_cannot_use(wanted: bool, start: int, asked: int):
    """With logprobs of its prompt it computes from there on, whatever the store has of that."""
    found = scheduler()
    keys = []
    found.tree_cache.request_prefetch = lambda rid, key: keys.append(key.token_ids)
    found._prefetch_kvcache(
        request(origin_input_ids=list(range(10)), output_ids=[10, 11], extra_key=None,
                return_logprob=wanted, logprob_start_len=start)
    )  # fmt: skip
    # The tree leaves the last of them to be computed.
    assert keys == [list(range(asked + 1))]


@pytest.mark.hazard("tenants-meet-in-store")
def test_the_images_of_a_request_reach_its_keys():
    """Of a model that takes images; of others the key stays as it is, also where there is none."""
    item = SimpleNamespace(pad_value=1_000_005, hash=5)
    req = request(
        origin_input_ids=[1, 1_000_005, 2], output_ids=[], extra_key=None, return_logprob=False,
        multimodal_inputs=SimpleNamespace(mm_items=[item]),
    )  # fmt: skip
    found, keys = scheduler(), []
    found.tree_cache.request_prefetch = lambda rid, key: keys.append(key.extra_key)
    found._prefetch_kvcache(req)
    found.model_config.is_multimodal = True
    found._prefetch_kvcache(req)
    assert keys == [None, ""] and keys[1].images == req.extra_key.images == ((1, 5),)


def batch(tokens: int, extend: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: extend, is_decode=lambda: not extend),
        prefill_stats=SimpleNamespace(log_input_tokens=tokens),
        out_cache_loc="slots",
    )


def test_the_speed_of_prefill_is_measured(monkeypatch: pytest.MonkeyPatch):
    """A batch that was launched under another one begins when that has ended; a decode batch that
    still has the figures of its prefill computes none."""
    found = scheduler()
    found.spec_algorithm = SimpleNamespace(is_none=lambda: True)
    ran: list[tuple[float, int]] = []
    found.tree_cache.buffer.ran = lambda *what: ran.append(what)
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    first, second, third = batch(1000), batch(500), batch(1, extend=False)
    found.run_batch(first)
    assert found.tree_cache.written == "slots"
    now = 101.0
    found.run_batch(second)
    now = 102.0
    found.process_batch_result(first, None)
    found.run_batch(third)
    now = 105.0
    found.process_batch_result(second, None)
    found.process_batch_result(third, None)
    assert ran == [(2.0, 1000), (3.0, 500), (0.0, 0)] and found.calls["result"] == 3


@pytest.mark.parametrize("paired", [False, True])
def test_a_prefill_server_of_a_pair_does_not_wait_for_the_store(paired: bool):
    """Its requests wait for their decode server meanwhile."""
    found = scheduler()
    found.tree_cache.buffer.prefetches.patience = patience = Patience()
    if paired:
        found.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[])
    found.run_event_loop()
    patience.batch(1.0)
    assert found.calls["ran"] == 1 and (patience.seconds() == 0) is paired


def test_no_full_collection_looks_through_what_the_start_left():
    """Guards against a server that stands still for most of a second at some early request."""
    left: list[object] = []
    assert any(each is left for each in gc.get_objects())
    scheduler().run_event_loop()
    assert not any(each is left for each in gc.get_objects())


@pytest.mark.hazard("copy-not-ordered")
@pytest.mark.parametrize(("generates", "told"), [(False, [2, -1]), (True, [])])
def test_who_waits_for_what_is_loaded(generates: bool, told: list[int]):
    """SGLang tells the layers which copy to wait for where a model generates, and nowhere else: an
    embedding would be that of KV which is not there yet. A batch keeps the layer events of its
    prefill: where decoding runs without CUDA graphs, it would wait for whatever copy was made with
    them since. Slots that a draft model writes are not known: its verification writes to more than
    the batch says."""
    found, heard = scheduler(), []
    found.spec_algorithm = SimpleNamespace(is_none=lambda: generates)
    found.tp_worker = SimpleNamespace(set_hicache_consumer=heard.append)
    found.is_generation = generates
    for extend, index, waits_for in [(True, 2, 2), (True, -1, -1), (False, 2, -1)]:
        if extend or generates:
            running = batch(1, extend)
            running.hicache_consumer_index = index
            assert found.run_batch(running).hicache_consumer_index == waits_for
    assert heard == told
    assert found.tree_cache.written == ("slots" if generates else None)
