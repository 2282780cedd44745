"""A prompt through both pipelines; who drives them: SGLang's loops in every iteration, and what one
step costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, nodes
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.stage import Copier
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


class Loop:
    """As much of a scheduler as SGLang's own methods use when they find nothing to run."""

    chunked_req = None
    enable_hierarchical_cache = True
    enable_priority_preemption = False

    def __init__(self, cache: Cache, waiting: list[Any], full: bool) -> None:
        self.tree_cache, self.waiting_queue = cache.tree, waiting
        self.running_batch = SimpleNamespace(batch_is_full=full, reqs=[])
        self.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)

    def process_prefill_chunk(self) -> None: ...

    def maybe_prepare_mlp_sync_batch(self, batch: Any) -> Any:
        return batch

    def get_new_batch_prefill(self) -> Any:
        return Scheduler._get_new_batch_prefill_raw(self, None)


@pytest.mark.hazard("idle-server")
@pytest.mark.parametrize("prefill_server", [False, True])
@pytest.mark.parametrize(("waiting", "full"), [([], False), (["a request"], True)])
def test_every_iteration_is_a_step(prefill_server: bool, waiting: list[str], full: bool):
    """With nothing to run, and with no room for another request, copies and answers of the store
    still have to be seen: what waits for them would wait for ever."""
    cache = Cache()
    cache.compute(prompt(1, 3))
    cache.settle()
    cache.flush()
    cache.compute(prompt(2, 12))
    cache.want("r", prompt(1, 3))
    loop: Any = Loop(cache, waiting, full)
    if prefill_server:
        full = loop.running_batch.batch_is_full = False  # its loop resets it
        loop.waiting_queue = []
    for _ in range(12):
        cache.work()
        if prefill_server:
            mixin = SchedulerDisaggregationPrefillMixin
            assert mixin.get_next_disagg_prefill_batch_to_run(loop) is None
        else:
            assert loop.get_new_batch_prefill() is None
    assert cache.state("r") is State.STAGED and len(cache.store.content) == 15


@pytest.mark.hazard("launch-per-node")
def test_a_long_prompt_in_chunks_is_presented_once():
    """Presented with all its ancestors after every chunk, a prompt of n chunks would cost n * n."""
    cache = Cache(tokens=200 * PAGE)
    requested = []
    request = cache.buffer.backups.request
    cache.buffer.backups.request = lambda node: requested.append(node) or request(node)
    tokens = prompt(1, 100)
    for chunk in range(1, 100):
        cache.compute(tokens[: chunk * PAGE], chunked=True)
    assert not requested
    cache.compute(tokens)
    assert len(requested) <= 100
    cache.settle()
    assert len(cache.store.content) == 100


class Order:
    """Streams and launches, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}")
        )


def copier(order: Order, *of_scheduler: Any) -> Copier:
    """One whose launches and waits are noted."""
    controller = SimpleNamespace(
        write_stream=order.stream("write"), load_stream=order.stream("load"),
        write_queue=[], load_queue=[], ack_write_queue=[], ack_load_queue=[],
    )  # fmt: skip
    ack = SimpleNamespace(finish_event="event")

    def start_writing() -> None:
        order.log.append(f"write {len(controller.write_queue)}")
        controller.ack_write_queue.append(ack)

    def start_loading() -> int:
        order.log.append(f"load {len(controller.load_queue)}")
        controller.ack_load_queue.append(ack)
        return 2

    controller.start_writing, controller.start_loading = start_writing, start_loading
    return Copier(controller, *of_scheduler)


@pytest.mark.hazard("copy-not-ordered")
@pytest.mark.parametrize("overlap", [False, True])
def test_copies_wait_for_the_forward_pass(overlap: bool):
    """Launched beside it, a write would store KV that is not computed yet, and a load overwrite
    slots that a batch which still runs writes to."""
    order = Order()
    forward = order.stream("forward") if overlap else None
    found = copier(order, lambda: forward)
    pair = (torch.arange(4), torch.arange(4))
    assert found.to_stage([pair, pair]) == "event"
    assert found.to_device([pair]) == ("event", 2)
    assert [line for line in order.log if "waits" not in line] == ["write 2", "load 1"]
    if overlap:
        assert order.log[::2] == ["write waits for forward", "load waits for forward"]


@pytest.mark.hazard("copy-not-ordered")
@pytest.mark.parametrize(
    ("written", "waits"),
    [(None, True), ([], False), ([4, 5, 9], False), ([9, 3], True)],
)
def test_a_load_runs_beside_the_batch_that_runs(written: list[int] | None, waits: bool):
    """Unless that writes to a slot which a finished request gave back, and the load has now; after
    the load, it would be the running batch's KV there."""
    order = Order()
    slots = None if written is None else torch.tensor(written, dtype=torch.int64)
    pairs = [(torch.arange(2), torch.arange(2)), (torch.arange(2), torch.arange(2, 4))]
    copier(order, lambda: order.stream("forward"), lambda: slots).to_device(pairs)
    assert ("load waits for forward" in order.log) is waits


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
    order = Order()
    loads = copier(order, lambda: order.stream("forward"), lambda: cache.tree.written)
    loads.to_device([(torch.arange(PAGE), own[:PAGE])])
    assert ("load waits for forward" in order.log) is another_was_faster


def test_the_schedulers_forward_stream_is_the_one_that_is_waited_for():
    """It is made after the cache."""
    cache = Cache()
    copier = cache.tree._build_context(16).copier
    assert copier._forward_stream() is None
    cache.tree.forward_stream, cache.tree.written = "made later", "slots"
    assert (copier._forward_stream(), copier._written()) == ("made later", "slots")
