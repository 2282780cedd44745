"""A prompt through both pipelines, and what copies wait for."""

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
    """A node without device KV is gone, a leaf as well as what is above it: nothing can match,
    load or count what neither device nor host has. The store has it, and a request gets it all."""
    cache = Cache(pages=32)
    base, tokens = prompt(1, 4), prompt(2, 3, base=prompt(1, 4))
    cache.compute(base)
    cache.compute(tokens)
    cache.settle()
    for gone, held in [(3, 4), (4, 0)]:
        assert cache.evict(1) == gone * PAGE
        match = cache.match(tokens)
        assert len(match.device_indices) == held * PAGE and match.host_hit_length == 0
        check(cache)
    assert nodes(cache.tree) == [] and len(cache.store.content) == 7
    assert cache.serve("r", tokens) == 6 * PAGE


# ---- what copies wait for ----


def launches(cache: Cache, forward_stream: str | None = "forward") -> list[str]:
    """Launches of SGLang's controller from now on, and what each one waits for."""
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
    """Launched beside it, a write would store KV that is not computed yet, and a load overwrite
    slots that a batch which still runs writes to."""
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
    ("written", "waits"), [("unknown", 1), ("nothing", 0), ("another's slot", 0), ("its own", 1)]
)
def test_a_load_runs_beside_the_batch_that_runs(written: str, waits: bool):
    """Unless that writes to a slot which a finished request gave back, and the load has now; after
    the load, it would be the running batch's KV there."""
    cache = stored(prompt(1, 3))
    cache.compute(prompt(2, 4))
    held = cache.match(prompt(2, 4)).device_indices
    others = [slot for slot in range(len(cache.device.k_buffer[0])) if slot not in held.tolist()]
    slots = {"nothing": held[:0], "another's slot": held, "its own": torch.tensor(others)}
    cache.want("r", prompt(1, 3))
    steps(cache, 4)
    log, cache.tree.written = launches(cache), slots.get(written)
    cache.admit("r", prompt(1, 3))
    assert log == ["load waits for forward"] * waits + ["load"]


@pytest.mark.parametrize("another_was_faster", [False, True])
def test_a_load_into_slots_that_the_running_batch_still_reads(another_was_faster: bool):
    """A request whose prefix another one has brought meanwhile gives its own slots back, which the
    batch that was launched before reads all the same: a load that gets them waits for that."""
    cache = Cache()
    tokens = prompt(1, 4)
    own, table = cache.allocator.alloc(len(tokens)), ReqToTokenPool(2, 64, "cpu", False)
    cache.fill(tokens, own, 0, None)
    table.write((0, slice(0, len(tokens))), own)
    cache.tree.req_to_token_pool = table
    req = SimpleNamespace(
        fill_ids=tokens, req_pool_idx=0, extra_key=None, priority=0, cache_protected_len=0,
        last_node=cache.tree.root_node, prefix_indices=own[:0],
    )  # fmt: skip
    if another_was_faster:
        cache.compute(tokens)
    cache.tree.written = torch.tensor([len(cache.device.k_buffer[0]) - 1])
    free = cache.allocator.available_size()
    cache.tree.cache_unfinished_req(req)
    given_back = cache.allocator.available_size() - free
    cache.tree.dec_lock_ref(req.last_node)
    assert given_back == (len(tokens) if another_was_faster else 0)
    assert (cache.tree.written is None) is another_was_faster, "a load waits where it is not known"
