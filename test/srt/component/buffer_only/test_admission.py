"""SGLang's own admission of a request with a hit in the stage."""

from __future__ import annotations

from typing import Any

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.scenes import steps, stored
from component.buffer_only.servers import Server
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.sampling.sampling_params import SamplingParams

PROMPT = prompt(1, 9)
#: A prompt whose hit is larger than a stage of eight pages.
LONG = prompt(3, 20)


@pytest.fixture
def cache() -> Cache:
    """A cache with an empty tree, and the hit of request "r" in the stage."""
    cache = stored(PROMPT)
    cache.want("r", PROMPT)
    steps(cache, 4)
    assert cache.state("r") is State.STAGED
    return cache


def request(new_tokens: int = 4) -> Any:
    return Req("r", "", list(PROMPT), SamplingParams(max_new_tokens=new_tokens))


def add(cache: Cache, req: Any, chunk: int | None = None) -> AddReqResult:
    """Add a request to a batch, as the scheduler does for each waiting one."""
    assert cache.tree.check_prefetch_progress(req.rid)
    adder = PrefillAdder(
        PAGE, cache.tree, cache.allocator, None, 0.5, rem_input_tokens=1000, rem_chunk_tokens=chunk
    )
    req.init_next_round_input(cache.tree)
    result = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    assert (result is AddReqResult.CONTINUE) == bool(adder.can_run_list)
    return result


def check_admitted(cache: Cache, req: Any, chunk: int | None = None, hit: int = 8) -> None:
    """Check that the request is added with ``hit`` pages, and that nothing is left at its end."""
    assert add(cache, req, chunk) is AddReqResult.CONTINUE and len(req.prefix_indices) == hit * PAGE
    assert req.last_node.lock_ref == 2, "one lock of the request, one of the copy"
    assert cache.tree.ready_to_load_host_cache() >= 0 and req.host_hit_length == 0
    cache.slow = False
    cache.settle()
    assert req.last_node.lock_ref == 1 and cache.prefetch("r") is None
    cache.verify(PROMPT, req.prefix_indices)
    cache.tree.dec_lock_ref(req.last_node)


@pytest.mark.parametrize("chunk", [None, 2 * PAGE])
def test_a_hit_is_loaded_when_its_request_is_admitted(cache: Cache, chunk: int | None):
    """Guards against a hit of which a part is computed again, and against a chunk that is not
    filled with the rest of the prompt."""
    req = request()
    check_admitted(cache, req, chunk)
    assert req.extend_input_len == PAGE


def test_a_request_that_wants_logprobs_of_its_prompt(cache: Cache):
    """Guards against a hit for tokens whose log probabilities are requested."""
    req = request()
    req.return_logprob, req.logprob_start_len = True, 3 * PAGE + 1
    check_admitted(cache, req, hit=3)


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize("free", [0, 8, 9])
def test_a_request_that_has_no_room_for_its_hit(cache: Cache, free: int):
    """Guards against pages taken from running requests, which would be retracted, or from the tree,
    by a request without enough room. Its hit stays in the stage until there is room."""
    others_slots = cache.allocator.alloc(cache.allocator.available_size() - free * PAGE)
    for _ in range(3):
        assert add(cache, request()) is AddReqResult.NO_TOKEN
        assert cache.tree.ready_to_load_host_cache() == -1
        assert cache.allocator.available_size() == free * PAGE
        cache.step()
        cache.now += 20.0
        assert cache.state("r") is State.STAGED and cache.tree.protected_size() == 0
    cache.allocator.free(others_slots)
    check_admitted(cache, request())


def test_a_hit_stays_in_the_stage_while_another_prompt_is_computed_in_chunks(cache: Cache):
    """Guards against a hit that SGLang loads although the chunk has no room for its request: on the
    device it could be evicted before its use, and the chunk would wait for its layers."""
    free = cache.allocator.available_size()
    for _ in range(3):
        cache.buffer.prefetches.in_line(["r"], True)
        cache.step()
        assert add(cache, request(), chunk=0) is AddReqResult.OTHER
        assert cache.tree.ready_to_load_host_cache() == -1
        assert cache.state("r") is State.STAGED and cache.allocator.available_size() == free
    cache.buffer.prefetches.in_line(["r"], False)
    check_admitted(cache, request())


@pytest.mark.hazard("copy-not-ordered")
def test_a_request_that_was_loaded_for_a_batch_without_it(cache: Cache):
    """Guards against a request's batch that does not wait for its copy: an earlier batch, formed
    without the request, was to wait for it, but read no KV. SGLang loads a hit and then finds less
    than a page left of the chunk (with ``--enable-mixed-chunk`` it is no whole number of pages)."""
    cache.slow = True
    assert add(cache, request(), chunk=PAGE - 1) is AddReqResult.OTHER
    assert cache.tree.ready_to_load_host_cache() >= 0
    check_admitted(cache, request())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_hit_loaded_ahead_takes_no_memory_from_running_requests(chunked: bool):
    """Guards against retractions for a request that cannot be admitted: a hit larger than the stage
    is copied in rounds, and each round would lock all earlier ones."""
    cache = stored(LONG, pages=8)
    running, others_slots = request(new_tokens=8 * PAGE), cache.allocator.alloc(15 * PAGE)
    server = Server(cache)
    server.running_batch.reqs = [] if chunked else [running]
    if chunked:  # seven pages of its prompt are not computed yet
        running.prefix_indices = others_slots[: 2 * PAGE]
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
    cache.allocator.free(others_slots)
    assert cache.run("r", LONG) == 19 * PAGE


@pytest.mark.parametrize("then", ["rounds", "slow", "full"])
def test_a_hit_that_is_larger_than_the_stage_on_a_full_server(then: str):
    """Guards against a request that computes its hit because its rounds cannot begin on a full
    server. It blocks the queue, because requests behind it would take every freed page, and its
    time limit starts when there is room."""
    cache = stored(LONG, pages=8)
    others_slots = cache.allocator.alloc(30 * PAGE)
    cache.want("r", LONG)
    for second in range(60):
        # SGLang admits no request behind a ready one without room.
        assert cache.tree.check_prefetch_progress("r") is (second > 1)
        cache.step()
        cache.now += 1.0
    assert cache.buffer.context.counters["prefetch_timeouts"] == 0
    cache.allocator.free(others_slots)
    assert not cache.tree.check_prefetch_progress("r")
    if then == "full":  # other requests were faster
        others_slots = cache.allocator.alloc(30 * PAGE)
    for _ in range(40):
        if cache.tree.check_prefetch_progress("r"):
            break
        cache.step(work=then == "rounds")
        cache.now += 0.1 if then == "rounds" else 1.0
    assert cache.tree.check_prefetch_progress("r"), "it waits for ever"
    assert cache.buffer.context.counters["prefetch_timeouts"] == (then == "slow")
    if then == "full":
        cache.allocator.free(others_slots)
    assert (cache.compute(LONG, rid="r") == 19 * PAGE) is (then == "rounds")
