"""SGLang's own admission over a hit in the stage."""

from __future__ import annotations

from typing import Any

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.scenes import steps, stored
from component.buffer_only.servers import Server
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.buffer_only.prefetch import PrefetchState
from sglang.srt.sampling.sampling_params import SamplingParams

PROMPT = prompt(1, 9)
#: A prompt whose hit is larger than a stage of eight pages.
LONG = prompt(3, 20)


@pytest.fixture
def cache() -> Cache:
    """An empty tree, and the hit of request "r" in the stage."""
    found = stored(PROMPT)
    found.want("r", PROMPT)
    steps(found, 4)
    assert found.state("r") is PrefetchState.STAGED
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


def admitted(cache: Cache, req: Any, chunk: int | None = None, hit: int = 8) -> None:
    """The request is added with so many pages, and nothing is left when it has ended."""
    assert add(cache, req, chunk) is AddReqResult.CONTINUE and len(req.prefix_indices) == hit * PAGE
    assert req.last_node.lock_ref == 2, "the request's, and the copy's"
    assert cache.tree.ready_to_load_host_cache() >= 0 and req.host_hit_length == 0
    cache.slow = False
    cache.settle()
    assert req.last_node.lock_ref == 1 and cache.prefetch("r") is None
    cache.verify(PROMPT, req.prefix_indices)
    cache.tree.dec_lock_ref(req.last_node)


@pytest.mark.parametrize("chunk", [None, 2 * PAGE])
def test_a_hit_is_loaded_when_its_request_is_admitted(cache: Cache, chunk: int | None):
    """It is computed from the end of the hit on, and a chunk is filled with what is left."""
    req = request()
    admitted(cache, req, chunk)
    assert req.extend_input_len == PAGE


def test_a_request_that_wants_logprobs_of_its_prompt(cache: Cache):
    """It computes from there on; of the hit it takes what lies before."""
    req = request()
    req.return_logprob, req.logprob_start_len = True, 3 * PAGE + 1
    admitted(cache, req, hit=3)


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize("free", [0, 8, 9])
def test_a_request_that_has_no_room_for_its_hit(cache: Cache, free: int):
    """It takes not a page: neither from those who run, who would be retracted for it, nor from the
    tree; its hit stays in the stage, for as long as it takes."""
    taken = cache.allocator.alloc(cache.allocator.available_size() - free * PAGE)
    for _ in range(3):
        assert add(cache, request()) is AddReqResult.NO_TOKEN
        assert cache.tree.ready_to_load_host_cache() == -1
        assert cache.allocator.available_size() == free * PAGE
        cache.step()
        cache.now += 20.0
        assert cache.state("r") is PrefetchState.STAGED and cache.tree.protected_size() == 0
    cache.allocator.free(taken)
    admitted(cache, request())


def test_a_hit_stays_in_the_stage_while_another_prompt_is_computed_in_chunks(cache: Cache):
    """SGLang loads it as soon as it looks at the request, for which the chunk has no room: it would
    wait on the device, where anybody may evict it, and the chunk would wait for its layers."""
    free = cache.allocator.available_size()
    for _ in range(3):
        cache.buffer.prefetches.set_queue(["r"], True)
        cache.step()
        assert add(cache, request(), chunk=0) is AddReqResult.OTHER
        assert cache.tree.ready_to_load_host_cache() == -1
        assert cache.state("r") is PrefetchState.STAGED and cache.allocator.available_size() == free
    cache.buffer.prefetches.set_queue(["r"], False)
    admitted(cache, request())


@pytest.mark.hazard("copy-not-ordered")
def test_a_request_that_was_loaded_for_a_batch_without_it(cache: Cache):
    """SGLang loads a hit and then finds less than a page left of the chunk (with
    ``--enable-mixed-chunk`` it is no number of pages). The batch that is formed without the request
    may read no KV at all, and so wait for none; the request's own batch waits, while the copy runs.
    """
    cache.slow = True
    assert add(cache, request(), chunk=PAGE - 1) is AddReqResult.OTHER
    assert cache.tree.ready_to_load_host_cache() >= 0
    admitted(cache, request())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_hit_that_is_loaded_ahead_takes_nothing_from_those_that_run(chunked: bool):
    """One that is larger than the stage is copied in rounds, and each locks all that was loaded
    before: those that run would be retracted for a request that cannot be admitted."""
    cache = stored(LONG, pages=8)
    running, taken = request(new_tokens=8 * PAGE), cache.allocator.alloc(15 * PAGE)
    server = Server(cache)
    server.running_batch.reqs = [] if chunked else [running]
    if chunked:  # seven pages of its prompt are to come
        running.prefix_indices = taken[: 2 * PAGE]
        server.chunked_req = running
    server.run_event_loop()
    room = cache.tree.room()
    assert room == (18 if chunked else 17) * PAGE
    cache.want("r", LONG)
    for step in range(10):
        assert cache.tree.check_prefetch_progress("r") is (step > 1)
        cache.step()
        assert cache.tree.protected_size() == 0 and cache.tree.room() == room
    server.running_batch.reqs, server.chunked_req = [], None
    while not cache.tree.check_prefetch_progress("r"):
        cache.step()
    cache.allocator.free(taken)
    assert cache.run("r", LONG) == 19 * PAGE


@pytest.mark.parametrize("then", ["rounds", "slow", "full"])
def test_a_hit_that_is_larger_than_the_stage_on_a_full_server(then: str):
    """Its rounds cannot begin. It stands in line, where no request behind it takes each page that
    others give back, and has its time when there is room: else it would compute all of it."""
    cache = stored(LONG, pages=8)
    taken = cache.allocator.alloc(30 * PAGE)
    cache.want("r", LONG)
    for second in range(60):
        # SGLang admits nobody behind a request that is ready and has no room.
        assert cache.tree.check_prefetch_progress("r") is (second > 1)
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
    assert cache.tree.check_prefetch_progress("r"), "it waits for ever"
    assert cache.buffer.context.counters["prefetch_timeouts"] == (then == "slow")
    if then == "full":
        cache.allocator.free(taken)
    assert (cache.compute(LONG, rid="r") == 19 * PAGE) is (then == "rounds")
