"""A prompt through both pipelines, and the order of copies and forward passes."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, nodes
from component.buffer_only.scenes import steps, stored
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool


@pytest.mark.hazard("node-nowhere")
def test_evicted_node_by_node_and_read_back():
    """Guards against nodes without device KV that can be matched, loaded or counted: an evicted
    node is gone, a leaf as well as its ancestors. The store has the KV, and a request gets all of
    it."""
    cache = Cache(pages=32)
    base, tokens = prompt(1, 4), prompt(2, 3, base=prompt(1, 4))
    cache.compute(base)
    cache.compute(tokens)
    cache.settle()
    for evicted, held in [(3, 4), (4, 0)]:
        assert cache.evict(1) == evicted * PAGE
        match = cache.match(tokens)
        assert len(match.device_indices) == held * PAGE and match.host_hit_length == 0
        check(cache)
    assert nodes(cache.tree) == [] and len(cache.store.content) == 7
    assert cache.serve("r", tokens) == 6 * PAGE


# ---- order of copies and forward passes ----


def launches(cache: Cache, forward_stream: str | None = "forward") -> list[str]:
    """Return a log of the controller's launches from now on, and of their waits."""
    log: list[str] = []
    controller = cache.tree.cache_controller
    cache.tree.forward_stream = forward_stream
    for name, launch in (("write", "start_writing"), ("load", "start_loading")):
        start = getattr(controller, launch)
        noted = mock.Mock(side_effect=lambda name=name, start=start: log.append(name) or start())
        setattr(controller, launch, noted)
        stream = getattr(controller, f"{name}_stream")
        stream.wait_stream = lambda other, name=name: log.append(f"{name} waits for {other}")
    return log


@pytest.mark.hazard("copy-not-ordered")
@pytest.mark.parametrize("forward_stream", ["forward", None])
def test_copies_wait_for_the_forward_pass(forward_stream: str | None):
    """Guards against copies beside a forward pass: a write would store KV that is not computed yet,
    and a load would overwrite slots that the running batch writes to."""
    cache = Cache()
    log = launches(cache, forward_stream)
    cache.compute(prompt(1, 3))
    cache.settle()
    cache.flush()
    assert cache.serve("r", prompt(1, 3)) == 2 * PAGE
    if forward_stream:
        assert log == ["write waits for forward", "write", "load waits for forward", "load"]
    else:
        assert log == ["write", "load"]


@pytest.mark.hazard("copy-not-ordered")
@pytest.mark.parametrize(
    ("written", "waits"),
    [("unknown", 1), ("nothing", 0), ("another slot", 0), ("the loaded slot", 1)],
)
def test_a_load_runs_beside_the_batch_that_runs(written: str, waits: bool):
    """Guards against a load that always waits for the running batch, and against one that does not
    wait although the batch writes to a slot that a finished request freed and the load got: the
    batch's KV would end up there."""
    cache = stored(prompt(1, 3))
    cache.compute(prompt(2, 4))
    held = cache.match(prompt(2, 4)).device_indices
    others = [slot for slot in range(len(cache.device.k_buffer[0])) if slot not in held.tolist()]
    slots = {"nothing": held[:0], "another slot": held, "the loaded slot": torch.tensor(others)}
    cache.want("r", prompt(1, 3))
    steps(cache, 4)
    log, cache.tree.written = launches(cache), slots.get(written)
    cache.admit("r", prompt(1, 3))
    assert log == ["load waits for forward"] * waits + ["load"]


@pytest.mark.parametrize("another_was_faster", [False, True])
def test_a_load_into_slots_that_the_running_batch_still_reads(another_was_faster: bool):
    """Guards against a load into slots that the running batch reads: a request frees its own slots
    when another one has loaded the same prefix, and a load that gets them must wait."""
    cache = Cache()
    tokens = prompt(1, 4)
    private_slots, table = cache.allocator.alloc(len(tokens)), ReqToTokenPool(2, 64, "cpu", False)
    cache.fill(tokens, private_slots, 0, None)
    table.write((0, slice(0, len(tokens))), private_slots)
    cache.tree.req_to_token_pool = table
    req = SimpleNamespace(
        fill_ids=tokens, req_pool_idx=0, extra_key=None, priority=0, cache_protected_len=0,
        last_node=cache.tree.root_node, prefix_indices=private_slots[:0],
    )  # fmt: skip
    if another_was_faster:
        cache.compute(tokens)
    cache.tree.written = torch.tensor([len(cache.device.k_buffer[0]) - 1])
    free = cache.allocator.available_size()
    cache.tree.cache_unfinished_req(req)
    freed = cache.allocator.available_size() - free
    cache.tree.dec_lock_ref(req.last_node)
    assert freed == (len(tokens) if another_was_faster else 0)
    assert (cache.tree.written is None) is another_was_faster, (
        "a load waits if the written slots are not known"
    )
