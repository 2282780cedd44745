"""The scheduler's subclass: idleness, prefetches, namespaces, metrics; and each iteration of
SGLang's loops is a step."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import nodes
from component.buffer_only.scenes import reach, steps, stored
from component.buffer_only.servers import PLACES, FormsABatch, Server, request
from component.buffer_only.test_prefetch import pages_fetched
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.store_scheduler import NAP_S
from sglang.srt.sampling.sampling_params import SamplingParams

PROMPT = prompt(1, 9)
UPDATES = [f"update_weights_from_{where}" for where in ("disk", "distributed", "tensor", "ipc")]


def busy_server() -> tuple[Cache, Server]:
    """Return a cache and a server with a queued write."""
    cache = Cache(tokens=80 * PAGE)
    cache.compute(PROMPT)
    return cache, Server(cache)


def keys_of(server: Server, cache: Cache) -> frozenset[str]:
    """Return the keys under which a prompt is written after a flush."""
    assert server.flush_cache()
    cache.store.content.clear()
    cache.compute(PROMPT)
    cache.settle()
    return frozenset(cache.store.content)


# ---- idleness ----


@pytest.mark.hazard("flush-or-detach-under-way", "idle-server")
def test_busy_pipelines_are_not_idle_and_do_not_sleep(monkeypatch: pytest.MonkeyPatch):
    """Guards against an idle memory check that finds the locks of a copy, a sleeping scheduler that
    does not see the copy's end, and a scheduler that polls without a pause and so keeps the
    interpreter from the threads."""
    naps: list[float] = []
    monkeypatch.setattr("time.sleep", naps.append)
    cache, server = busy_server()
    for idle in (False, True):
        assert server.is_fully_idle() is idle and server.is_fully_idle(for_health_check=True)
        server.maybe_sleep_on_idle()
        assert (naps, server.calls["sleep"]) == ([NAP_S], idle)
        assert cache.buffer.is_idle is idle, "its sleep does not count as a step's time"
        cache.settle()
    assert NAP_S < 0.001


@pytest.mark.parametrize("then", ["timeout", "all written", "engine paused"])
def test_a_flush_with_a_timeout_waits_for_writes(then: str, monkeypatch: pytest.MonkeyPatch):
    """Guards against ``/flush_cache?timeout=`` that is refused at its timeout, after which it would
    always be refused; and against ranks that empty their trees in different steps, by their own
    clocks: the time is the agreed one."""
    cache, server = busy_server()
    assert server.flush_cache_wrapped(SimpleNamespace(timeout_s=60.0)) is None
    monkeypatch.setattr("time.monotonic", lambda: 1e9)  # the clock of this rank
    for now in (1.0, 60.999):
        cache.now = now
        cache.step(work=False)
        server.process_input_requests([])
        assert not server.told and nodes(cache.tree)
    if then == "timeout":
        cache.now = 61.001
        cache.step(work=False)
    elif then == "all written":
        cache.settle()
    else:
        server.pause_generation(SimpleNamespace(mode="in_place"))
    server.process_input_requests([])
    assert [output.success for output in server.told] == [True] and not nodes(cache.tree)


@pytest.mark.hazard("flush-or-detach-under-way")
@pytest.mark.parametrize(
    ("tags", "flushed"), [(None, True), (["kv_cache"], True), (["weights"], False)]
)
def test_a_flush_waits_for_no_store(tags: list[str] | None, flushed: bool):
    """Guards against a store that refuses writes and so blocks flushes for ever: a weight update
    asserts that the flush succeeded, and before a release of memory SGLang unmaps the pool and
    asserts that the server is idle."""
    cache, server = busy_server()
    server.release_memory_occupation(SimpleNamespace(tags=tags))
    assert server.calls["released"] == 1 and bool(nodes(cache.tree)) is not flushed
    cache.compute(prompt(2, 3))
    assert not server.is_fully_idle() and server.flush_cache() and not nodes(cache.tree)


@pytest.mark.hazard("idle-server")
@pytest.mark.parametrize("prefill_server", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_every_iteration_is_a_step(prefill_server: bool, full: bool):
    """Guards against copies and store answers that are never noticed on a server with nothing to
    run, or without room for another request."""
    cache = stored(PROMPT[: 3 * PAGE])
    server = Server(cache)
    cache.compute(prompt(2, 12))
    cache.want("r", PROMPT[: 3 * PAGE])
    server.waiting_queue = [request("r")]
    server.running_batch.batch_is_full = full
    form = server.get_next_disagg_prefill_batch_to_run if prefill_server else None
    for _ in range(12):
        cache.work()
        assert (form or server.get_new_batch_prefill)() is None
    assert cache.state("r") is State.STAGED and len(cache.store.content) == 15


# ---- keys of weights and namespaces ----


@pytest.mark.parametrize("update", UPDATES)
def test_new_weights_have_their_own_keys(update: str):
    """Guards against the old weights' KV after an update, unless the store is cleared. Weights that
    arrive in many pieces are hashed once, at the flush in the end; until then keys are private to
    this server."""
    cache, server = busy_server()
    server.name_keys()
    keys = [keys_of(server, cache)]
    change, done = getattr(server, update), SimpleNamespace(flush_cache=True)
    assert change(done) is done
    keys.append(keys_of(server, cache))
    server.offload_tags = {"weights"}
    for _ in range(2):
        cache.want("r", PROMPT)
        change(SimpleNamespace(flush_cache=False))
        assert cache.prefetch("r") is None, "the prefetch would load KV of the old weights"
        keys.append(keys_of(server, cache))
    server.offload_tags = set()
    keys.append(keys_of(server, cache))
    assert len(set(keys)) == 5 and all(len(page_keys) == 9 for page_keys in keys)
    other = Cache(tokens=80 * PAGE)
    twin = Server(other, tp_worker=server.tp_worker)
    twin.name_keys()
    assert keys_of(twin, other) == keys[-1], "servers with the same weights share pages"


@pytest.mark.hazard("tenants-meet-in-store")
@pytest.mark.parametrize(
    ("extra_key", "lora_id", "expected"),
    [(None, None, None), ("t", None, "t"), ("t", "lora", "tlora"), (None, "lora", "lora"),
     ("\ud800", "lora", "\ud800lora"), (["a"], "lora", "['a']lora"), (["a"], None, "['a']")],
)  # fmt: skip
def test_namespaces_are_passed_to_the_request(
    extra_key: Any, lora_id: str | None, expected: str | None
):
    """Guards against tenants that share KV: this release drops the tenant's key when it builds its
    request. The key must not leak into the next request either."""
    server = Server(Cache())
    for extra_key_sent, built in ((extra_key, expected), (None, lora_id)):
        req = request("r", lora_id=lora_id, extra_key=lora_id)
        server.handle_generate_request(SimpleNamespace(extra_key=extra_key_sent, req=req))
        assert req.extra_key == built


@pytest.mark.hazard("tenants-meet-in-store")
def test_images_are_part_of_a_requests_keys():
    """Guards against keys without images for a multimodal model, or changed keys for others."""
    item = SimpleNamespace(pad_value=1_000_005, hash=5)
    req = request("r", [1, 1_000_005, 2], multimodal_inputs=SimpleNamespace(mm_items=[item]))
    server = Server(Cache())
    for takes_images, key in ((False, None), (True, "")):
        server.model_config.is_multimodal = takes_images
        server.handle_generate_request(SimpleNamespace(extra_key=None, req=req))
        assert req.extra_key == key
    assert req.extra_key.images == ((1, 5),)


# ---- queries and metrics ----


@pytest.mark.parametrize(
    ("wanted", "start", "pages"),
    [(True, 12, 3), (True, 11, 2), (True, 0, 0), (True, -1, 9), (False, 12, 9)],
)
def test_a_request_waits_for_no_hit_that_it_cannot_use(wanted: bool, start: int, pages: int):
    """Guards against a fetched hit for tokens whose log probabilities are requested."""
    cache = stored(PROMPT)
    req = request("r", PROMPT[:-1], return_logprob=wanted, logprob_start_len=start)
    req.output_ids = [*PROMPT[-1:], 0]
    Server(cache).handle_generate_request(SimpleNamespace(extra_key=None, req=req))
    steps(cache, 4)
    assert len(pages_fetched(cache)) == pages


@pytest.mark.hazard("wrong-gauges")
@pytest.mark.parametrize(
    ("device", "fetched", "retracted", "expected"),
    [
        (12, 2, False, (4, 8)),
        (6, 2, False, (0, 6)),
        (12, 0, False, (12, 0)),
        (0, 2, False, (0, 0)),
        (12, 2, True, (12, 0)),
    ],
)
def test_storage_hits_are_reported_as_storage_hits(
    device: int, fetched: int, retracted: bool, expected: tuple[int, int]
):
    """Guards against hits reported as host hits (the host keeps nothing), more hits than the
    request has, and hits counted again in each chunk or after a retraction."""
    cache = stored(PROMPT[: fetched * PAGE])
    cache.serve("r", PROMPT)
    req = request("r", cached_tokens_device=device, retracted_stain=retracted)
    server = Server(cache, batch=SimpleNamespace(reqs=[req]), waiting_queue=[req])
    for _ in range(2):
        assert server.get_new_batch_prefill() is server.batch
    assert (req.cached_tokens_device, req.cached_tokens_storage) == expected
    assert req.cached_tokens_host == 0


def test_prefetches_follow_the_queue_and_end_with_their_request():
    """Guards against fetches in another order than the queue's (with requests that wait for their
    decode server at its end), and against pages that a running or gone request keeps for ever."""
    cache = Cache()
    for rid in "abcd":
        cache.want(rid, PROMPT)
    server = Server(cache, disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[request("c")]))
    server.waiting_queue = [request("b"), request("a")]
    server.get_new_batch_prefill()
    assert [prefetch.rid for prefetch in cache.buffer.prefetches.line] == ["b", "a", "c"]
    server.batch = SimpleNamespace(reqs=[request("b")])
    server.get_new_batch_prefill()
    assert [prefetch.rid for prefetch in cache.buffer.prefetches.line] == ["a", "c"]


def chunked(left: int, **changes: Any) -> dict[str, Any]:
    """Return a server's settings with a request of ``left`` more tokens, in chunks of sixteen."""
    changes.setdefault("running", 1)
    req = request("long", [0] * (left + 19), prefix_indices=[0] * 20)
    req.output_ids = [0]
    return changes | {"chunked_req": req, "chunked_prefill_size": 16}


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"running": PLACES - 1}, False),
        ({"found_no_room": True}, True),
        ({"running": PLACES}, True),
        ({"running": PLACES, "enable_priority_preemption": True}, False),
        # Its own place, which is not counted among the running requests.
        (chunked(1, running=PLACES - 1), True),
        (chunked(1, running=PLACES - 1, enable_priority_preemption=True), False),
        (chunked(100), True),
        (chunked(13), True),
        (chunked(13, enable_priority_preemption=True), True),
        (chunked(12), False),
        (chunked(12, is_mixed_chunk=True), True),
        (chunked(11, is_mixed_chunk=True), False),
        (chunked(100) | {"chunked_prefill_size": None}, False),
    ],
)
def test_no_hit_is_loaded_while_no_request_can_be_admitted(changes: dict[str, Any], full: bool):
    """Guards against a hit that is loaded long before its request can run: behind a request in
    chunks SGLang still checks one request, with less than a page of this step left for it."""
    cache = stored(PROMPT)
    server = Server(cache, **changes)
    cache.want("r", PROMPT)
    reach(cache, State.STAGED)
    server.waiting_queue = [request("r")]
    server.get_new_batch_prefill()
    assert cache.buffer.prefetches.loadable("r", 0, len(PROMPT)) == (0 if full else 8 * PAGE)


# ---- preemption ----


def sglang_request(rid: str, tokens: list[int], priority: int, max_new_tokens: int = 4) -> Req:
    """Return a request of SGLang's class."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    sampling.normalize(None)
    req = Req(rid, "", tokens, sampling)
    req.priority = priority
    return req


class Preempting(Server):
    """SGLang chooses the batch itself; requests of priority 0 have all places."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(
            cache,
            enable_hicache_storage=True,
            enable_priority_preemption=True,
            policy=SimpleNamespace(calc_priority=lambda *_: None),
            priority_scheduling_preemption_threshold=5,
            max_prefill_tokens=4096,
            max_prefill_bs=0,
            max_running_requests=PLACES,
            enable_dynamic_chunking=False,
            enable_lora=False,
            truncation_align_size=None,
            dllm_config=None,
            server_args=SimpleNamespace(
                prefill_max_requests=None, schedule_low_priority_values_first=False
            ),
        )
        self.running = [sglang_request(f"low-{n}", prompt(50 + n, 2), 0) for n in range(PLACES)]
        self.running_batch.reqs = self.running
        self.running_batch.release_req = lambda *_: None
        self.running_batch.filter_batch = self._keep

    def _keep(self, keep_indices: list[int]) -> None:
        self.running_batch.reqs = [self.running[index] for index in keep_indices]

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        self._prefetch_kvcache(req)
        self.waiting_queue.append(req)

    def admitted(self, *waiting: Req) -> list[str]:
        """Return the requests of the batch that SGLang forms next."""
        self.waiting_queue, formed = list(waiting), FormsABatch()
        with mock.patch.object(ScheduleBatch, "init_new", side_effect=formed) as init_new:
            self.get_new_batch_prefill()
        return [req.rid for req in init_new.call_args.args[0]] if init_new.called else []


@pytest.mark.hazard("preempted-for-a-prefetch")
@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
def test_no_request_is_preempted_for_one_that_waits_for_the_store(policy: str):
    """Guards against preempted requests that are neither running nor waiting, with clients that
    wait for ever: SGLang preempts first and checks the prefetch afterwards. A ready request behind
    the waiting one is admitted. The time limit of a request that cannot preempt does not start."""
    cache = stored(PROMPT, settings={"policy": policy})
    server = Preempting(cache)
    ready, high = [sglang_request(rid, PROMPT, 10) for rid in ("ready", "high")]
    waiting = [high, sglang_request("equal", PROMPT, 0)]
    for req in waiting:
        cache.want(req.rid, PROMPT)
    assert server.admitted(*waiting) == []
    assert server.running_batch.reqs == server.running and server.waiting_queue == waiting
    assert [cache.prefetch(req.rid).waited_ms for req in waiting] == [0, None]
    cache.buffer.prefetches.in_line([])
    cache.want("ready", PROMPT)
    reach(cache, State.STAGED, "ready")
    cache.want("high", PROMPT)
    assert server.admitted(high, ready) == ["ready"]
    cache.tree.dec_lock_ref(ready.last_node)  # it has run
    lost = {*server.running} - {*server.running_batch.reqs, *server.waiting_queue}
    assert not lost and len(server.running_batch.reqs) == PLACES - 1


@pytest.mark.hazard("preempted-for-a-prefetch")
@pytest.mark.parametrize("low_first", [False, True])
@pytest.mark.parametrize(
    ("outranked", "max_new_tokens", "can_preempt"),
    [(9, 160, True), (9, 161, False), (4, 140, True), (4, 141, False)],
)
def test_a_request_for_which_preemption_makes_no_room(
    outranked: int, max_new_tokens: int, can_preempt: bool, low_first: bool
):
    """Guards against a hit that is given up, and against smaller requests that take each free page.
    SGLang preempts only if the outranked requests, of four tokens each here, free enough. Otherwise
    the time limit does not start, and the requests behind wait."""
    cache = stored(PROMPT, settings={"policy": "wait_complete"}, tokens=40 * PAGE)
    server, sign = Preempting(cache), -1 if low_first else 1
    server.server_args.schedule_low_priority_values_first = low_first
    for req in server.running[outranked:]:
        req.priority = 8 * sign
    big = sglang_request("big", PROMPT, 10 * sign, max_new_tokens)
    small = sglang_request("small", prompt(7, 2), 10 * sign, max_new_tokens=1)
    cache.want("big", PROMPT)
    assert server.admitted(big, small) == ["small"] * can_preempt
    assert cache.prefetch("big").waited_ms == (0 if can_preempt else None)


def test_a_priority_beyond_any_float():
    """Guards against a scheduler that ends because of a client's number. While no request runs, a
    burst takes all places, and the request left over is compared with none."""
    server = Preempting(stored(PROMPT))
    server.running_batch.reqs = []
    burst = [sglang_request(f"r{n}", prompt(60 + n, 2), 0) for n in range(PLACES)]
    last = sglang_request("last", prompt(99, 2), -(10**400))
    assert server.admitted(*burst, last) == [req.rid for req in burst]


def test_a_preempted_request_is_queued_again_if_no_other_is_admitted():
    """Guards against a lost request that was preempted for one that did not fit after all."""
    cache = stored(PROMPT, tokens=20 * PAGE)
    server = Preempting(cache)
    large = sglang_request("large", prompt(7, 19), 10, max_new_tokens=4 * PAGE)
    server.admitted(large)
    (preempted,) = {*server.running} - {*server.running_batch.reqs}
    assert server.waiting_queue == [large, preempted]
    assert cache.prefetch(preempted.rid) is not None


# ---- batches ----


def batch(tokens: int, extend: bool = True) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: extend, is_decode=lambda: not extend),
        prefill_stats=SimpleNamespace(log_input_tokens=tokens),
        out_cache_loc="slots",
    )


def test_the_speed_of_prefill_is_measured(monkeypatch: pytest.MonkeyPatch):
    """Guards against wrong times: a batch launched during another one begins at that one's end, and
    a decode batch still carries its prefill's figures but computes no prompt."""
    cache, now = Cache(), 100.0
    server = Server(cache)
    monkeypatch.setattr("time.monotonic", lambda: now)
    first, second, third = batch(1000), batch(500), batch(1, extend=False)
    with mock.patch.object(cache.buffer, "ran") as ran:
        server.run_batch(first)
        now = 101.0
        server.run_batch(second)
        now = 102.0
        server.process_batch_result(first, None)
        server.run_batch(third)
        now = 105.0
        server.process_batch_result(second, None)
        server.process_batch_result(third, None)
    assert [call.args for call in ran.mock_calls] == [(2.0, 1000), (3.0, 500), (0.0, 0)]
    assert server.calls["result"] == 3


def test_the_event_loop_freezes_objects_and_sets_the_forward_stream():
    """Guards against copies that do not wait for the forward stream, which is created after the
    cache; and against a full garbage collection of the start's objects, which would stall an early
    request for most of a second."""
    cache, left = Cache(), [1]
    server = Server(cache, forward_stream="made later")
    assert any(tracked is left for tracked in gc.get_objects())
    server.run_event_loop()
    assert not any(tracked is left for tracked in gc.get_objects())
    assert server.calls["ran"] == 1 and cache.tree.forward_stream == "made later"


@pytest.mark.hazard("copy-not-ordered")
@pytest.mark.parametrize(("generates", "expected"), [(False, [2, -1]), (True, [])])
def test_batches_wait_for_loaded_layers(generates: bool, expected: list[int]):
    """Guards against an embedding computed before its KV is loaded: SGLang gives layers the
    copy to wait for only if the model generates. Guards against a decode batch without CUDA graphs
    that waits for a later copy, because it keeps the layer events of its prefill. Slots written by
    a draft model are unknown, because its verification writes to more than the batch says."""
    cache, indices = Cache(), []
    server = Server(cache, is_generation=generates)
    server.spec_algorithm = SimpleNamespace(is_none=lambda: generates)
    server.tp_worker.set_hicache_consumer = indices.append
    for extend, index, waits_for in [(True, 2, 2), (True, -1, -1), (False, 2, -1)]:
        if extend or generates:
            running = batch(1, extend)
            running.hicache_consumer_index = index
            assert server.run_batch(running).hicache_consumer_index == waits_for
    assert indices == expected and cache.tree.written == ("slots" if generates else None)
