"""SGLang's own admission over a hit in the stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check_idle
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.scheduler import BufferOnlyScheduler
from sglang.srt.sampling.sampling_params import SamplingParams

PROMPT = prompt(1, 9)


@pytest.fixture
def cache() -> Cache:
    """An empty tree, and the hit of request "r" in the stage."""
    found = Cache()
    found.compute(PROMPT)
    found.settle()
    found.flush()
    found.want("r", PROMPT)
    for _ in range(4):
        found.step()
    assert found.state("r") is State.STAGED
    return found


def request(new_tokens: int = 4) -> Any:
    return Req("r", "", list(PROMPT), SamplingParams(max_new_tokens=new_tokens))


def add(cache: Cache, req: Any, chunk: int | None = None) -> AddReqResult:
    """As the scheduler does for each request that waits."""
    assert cache.tree.check_prefetch_progress(req.rid)
    adder = PrefillAdder(
        PAGE, cache.tree, cache.allocator, None, 0.5, rem_input_tokens=1000, rem_chunk_tokens=chunk
    )
    req.init_next_round_input(cache.tree)
    result = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    assert (result is AddReqResult.CONTINUE) == bool(adder.can_run_list)
    return result


@pytest.mark.parametrize("chunk", [None, 2 * PAGE])
def test_a_hit_is_loaded_when_its_request_is_admitted(cache: Cache, chunk: int | None):
    """It is computed from the end of the hit on, and a chunk is filled with what is left."""
    req = request()
    assert add(cache, req, chunk) is AddReqResult.CONTINUE
    assert len(req.prefix_indices) == 8 * PAGE and req.extend_input_len == PAGE
    assert req.last_node.lock_ref == 2, "the request's, and the copy's"
    assert cache.tree.ready_to_load_host_cache() >= 0 and req.host_hit_length == 0
    cache.settle()
    assert req.last_node.lock_ref == 1
    cache.verify(PROMPT, req.prefix_indices)
    cache.tree.dec_lock_ref(req.last_node)
    check_idle(cache)


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize("free", [0, 8, 9])
def test_a_request_that_has_no_room_for_its_hit(cache: Cache, free: int):
    """It takes not a page: neither from those who run, who would be retracted for it, nor from the
    tree; its hit stays in the stage."""
    room = cache.allocator.available_size() - free * PAGE
    taken = cache.allocator.alloc(room)
    for _ in range(3):
        req = request()
        assert add(cache, req) is AddReqResult.NO_TOKEN
        assert cache.tree.ready_to_load_host_cache() == -1
        assert cache.allocator.available_size() == free * PAGE
        cache.step()
        assert cache.state("r") is State.STAGED and cache.tree.protected_size() == 0
    cache.allocator.free(taken)
    req = request()
    assert add(cache, req) is AddReqResult.CONTINUE and len(req.prefix_indices) == 8 * PAGE
    cache.tree.ready_to_load_host_cache()
    cache.settle()
    cache.tree.dec_lock_ref(req.last_node)
    check_idle(cache)


def test_a_hit_stays_in_the_stage_while_another_prompt_is_computed_in_chunks(cache: Cache):
    """SGLang loads it as soon as it looks at the request, for which the chunk has no room: it would
    wait on the device, where anybody may evict it, and the chunk would wait for its layers."""
    taken = cache.allocator.available_size()
    for _ in range(3):
        cache.buffer.prefetches.in_line(["r"], True)
        cache.step()
        assert add(cache, request(), chunk=0) is AddReqResult.OTHER
        assert cache.tree.ready_to_load_host_cache() == -1
        assert cache.state("r") is State.STAGED and cache.allocator.available_size() == taken
    cache.buffer.prefetches.in_line(["r"], False)
    req = request()
    assert add(cache, req) is AddReqResult.CONTINUE and len(req.prefix_indices) == 8 * PAGE
    cache.tree.ready_to_load_host_cache()
    cache.settle()
    cache.tree.dec_lock_ref(req.last_node)
    check_idle(cache)


@pytest.mark.hazard("copy-not-ordered")
def test_a_request_that_was_loaded_for_a_batch_without_it(cache: Cache):
    """SGLang loads a hit and then finds less than a page left of the chunk (with
    ``--enable-mixed-chunk`` it is no number of pages). The batch that is formed without the request
    may read no KV at all, and so wait for none; the request's own batch waits, while the copy runs.
    """
    cache.slow = True
    assert add(cache, request(), chunk=PAGE - 1) is AddReqResult.OTHER
    layers = cache.tree.ready_to_load_host_cache()
    req = request()
    assert add(cache, req) is AddReqResult.CONTINUE and len(req.prefix_indices) == 8 * PAGE
    assert cache.tree.ready_to_load_host_cache() == layers >= 0
    cache.slow = False
    cache.settle()
    cache.tree.dec_lock_ref(req.last_node)
    check_idle(cache)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_hit_that_is_loaded_ahead_takes_nothing_from_those_that_run(chunked: bool):
    """One that is larger than the stage is copied in rounds, and each locks all that was loaded
    before: those that run would be retracted for a request that cannot be admitted."""
    hit = prompt(3, 20)
    cache = Cache(pages=8, tokens=40 * PAGE)
    cache.compute(hit)
    cache.settle()
    cache.flush()
    running = request(new_tokens=8 * PAGE)
    taken = cache.allocator.alloc(15 * PAGE)
    scheduler: Any = SimpleNamespace(
        page_size=PAGE, tree_cache=cache.tree, token_to_kv_pool_allocator=cache.allocator,
        running_batch=SimpleNamespace(reqs=[] if chunked else [running]), new_token_ratio=1.0,
        chunked_req=None,
    )  # fmt: skip
    if chunked:  # seven pages of its prompt are to come
        running.prefix_indices = taken[: 2 * PAGE]
        scheduler.chunked_req = running
    cache.tree.admission_room = lambda: BufferOnlyScheduler._admission_room(scheduler)
    room = cache.tree.room()
    assert room == (18 if chunked else 17) * PAGE
    cache.want("r", hit)
    for _ in range(10):
        assert not cache.tree.check_prefetch_progress("r")
        cache.step()
        assert cache.tree.protected_size() == 0 and cache.tree.room() == room
    scheduler.running_batch.reqs, scheduler.chunked_req = [], None
    for _ in range(40):
        cache.step()
        if cache.tree.check_prefetch_progress("r"):
            break
    cache.allocator.free(taken)
    assert cache.compute(hit, rid="r") == 19 * PAGE
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("then", ["rounds", "slow", "full"])
def test_a_hit_that_is_larger_than_the_stage_on_a_full_server(then: str):
    """Its rounds cannot begin, and its time is over; it would compute all of it as soon as there is
    room. It keeps its place instead, where nobody behind it gets in before it, and has its time
    once more, but no more than that."""
    hit = prompt(3, 20)
    cache = Cache(pages=8, tokens=40 * PAGE)
    cache.compute(hit)
    cache.settle()
    cache.flush()
    taken = cache.allocator.alloc(30 * PAGE)
    cache.want("r", hit)
    for second in range(60):
        # SGLang admits nobody behind a request that is ready and has no room.
        in_place = cache.tree.check_prefetch_progress("r")
        assert in_place is (second > 11)
        cache.step()
        cache.now += 1.0
    assert cache.buffer.context.counters["prefetch_timeouts"] == 0
    cache.allocator.free(taken)
    assert not cache.tree.check_prefetch_progress("r")
    if then == "full":  # others were faster
        taken = cache.allocator.alloc(30 * PAGE)
    for _ in range(40):
        if cache.tree.check_prefetch_progress("r"):
            break
        cache.step(work=then == "rounds")
        cache.now += 0.1 if then == "rounds" else 1.0
    else:
        raise AssertionError(f"it waits for ever: {cache.describe()}")
    assert cache.buffer.context.counters["prefetch_timeouts"] == (then != "rounds")
    if then == "full":
        assert cache.state("r") is State.STAGED
        cache.allocator.free(taken)
    assert (cache.compute(hit, rid="r") == 19 * PAGE) is (then == "rounds")
    cache.settle()
    check_idle(cache)


def test_a_request_that_wants_logprobs_of_its_prompt(cache: Cache):
    """It computes from there on; of the hit it takes what lies before."""
    req = request()
    req.return_logprob, req.logprob_start_len = True, 3 * PAGE + 1
    assert add(cache, req) is AddReqResult.CONTINUE
    assert len(req.prefix_indices) == 3 * PAGE and cache.prefetch("r") is None
    assert torch.equal(req.prefix_indices, cache.match(PROMPT[: 3 * PAGE]).device_indices)
    cache.tree.ready_to_load_host_cache()
    cache.settle()
    cache.tree.dec_lock_ref(req.last_node)
    check_idle(cache)
