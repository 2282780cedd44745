"""A decode scheduler without a model: SGLang's real class, queues, pool, tree and batches.

Replaced are ``__init__``, the forward pass (writes the tag of each new token), transfers (made by
the test), output (counted), metrics, the order of equal leaves, and measured costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmark.harness import without_engine
from component.decode import drafting, kv, recurrent
from component.decode.forward import ForwardPasses
from component.decode.peer import Mailbox, Manager, Room, WarmUpRoom
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import (
    DecodeReqToTokenPool,
    DecodeRequest,
)
from sglang.srt.disaggregation.delta.decode.request import is_fake, record_of
from sglang.srt.disaggregation.delta.decode.scheduler import DisaggScheduler
from sglang.srt.disaggregation.delta.observability import Telemetry
from sglang.srt.disaggregation.policy.chunk_times import UNKNOWN
from sglang.srt.disaggregation.policy.pace import Limits
from sglang.srt.disaggregation.utils import (
    FAKE_BOOTSTRAP_HOST,
    DisaggregationMode,
)
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import AbortReq, UpdateWeightFromDiskReqInput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.patchset import start_check
from sglang.srt.patchset.combine import combine
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

VOCABULARY = 64
METADATA_SLOTS = 24
#: Constant and slope per token of a chunk, and a decode step, as the ranks agree on them. Fixed,
#: because measured costs would differ in every run.
COSTS = (1000, 20_000, 1500, UNKNOWN)


class OrderedSet(dict[Any, None]):
    """The part of ``set`` that the tree uses for its leaves, in a fixed order.

    Leaves of equal age are evicted in the set's order, which depends on addresses: the same seed
    would not always give the same life.
    """

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    def remove(self, item: Any) -> None:
        del self[item]


class Decoder(ForwardPasses, combine(scheduler_module.Scheduler, DisaggScheduler)):  # type: ignore[misc]
    """One rank of a decode server. ``steps``: draft steps a decode step, 0 for none."""

    #: Local turns; None on a server without the flag.
    local_turns: Any = None

    def __init__(
        self,
        page: int,
        tokens: int,
        *,
        rows: int = 12,
        reserve: int = 32,
        policy: str = "lru",
        group: Any = None,
        steps: int = 0,
        local: int = 0,
        lost: int = 0,
        chunk: int = 16,
        limits: Limits | None = None,
        costs: tuple[int, ...] | None = COSTS,
        clock: Callable[[], float] | None = None,
        device: str = "cpu",
        latent: bool = False,
        sparse: bool = False,
        states: int = 0,
    ) -> None:
        """``local``: most new tokens of a turn that is always computed here, in chunks of
        ``chunk``; ``lost``: likewise if prefill is lost; or ``limits`` sets both. ``costs``: agreed
        costs, None to measure them by ``clock``. ``device``: reported device type. ``latent``:
        pools of MLA models; ``sparse``: with an index, in pages of 64; ``states``: number of slots
        of recurrent state."""
        self.steps, self.costs = steps, costs
        #: Clock of the queues and the local turns, in seconds; set by a test.
        self.now = 0.0
        #: Tokens of each launched chunk of local turns; and computed tokens of each turn.
        self.chunks: list[int] = []
        self.computed: dict[str, int] = {}
        #: Requests in the last step of the draft model.
        self.drafted: set[str] = set()
        self.spec_algorithm = SpeculativeAlgorithm.from_string("EAGLE" if steps else None)
        self.server_args = without_engine.set_arguments(page, **drafting.arguments(steps))
        self.server_args.disaggregation_decode_enable_radix_cache = True
        self.page_size, self.max_total_num_tokens = page, tokens
        kind = {"latent": latent, "sparse": sparse}
        if states:
            built = recurrent.build(tokens, page, rows, states)
            self.req_to_token_pool, self.pool, self.token_to_kv_pool_allocator = built
        else:
            self.req_to_token_pool = DecodeReqToTokenPool(rows, 1024, "cpu", False, 8)
            self.pool, self.token_to_kv_pool_allocator = kv.build_pool(tokens, page, **kind)
        state_lens = recurrent.item_lens(self.req_to_token_pool) if states else []
        self.draft_pool = kv.build_pool(tokens, page, latent=latent)[0] if steps else None
        #: Tags of draft KV that may be a guess, because it was not recomputed after the answer's
        #: end.
        self.guessed: set[int] = set()
        self.tree_cache = without_engine.build_tree(
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            page,
            policy,
            is_eagle=self.spec_algorithm.is_eagle(),
        )
        self.tree_cache.evictable_leaves = OrderedSet()
        self.tree_cache.serve_decode(self.draft_pool)
        state_lens = [132 * page] if sparse else state_lens
        self.kv_manager = Manager([16 * page, 16 * page], state_lens)
        self.send_to_tokenizer = self.mailbox = Mailbox()
        self.submitted: list[Any] = []
        self.rooms: list[Room] = []
        #: Prompts with their answers, for next turns.
        self.finished_texts: list[list[int]] = []
        self._set_plain_state()
        if local or lost:
            limits = Limits(local, chunk, when_lost=lost)
        if limits is not None:
            self.server_args.disaggregation_decode_local_tokens = limits.tokens
            self.server_args.disaggregation_decode_fallback_prefill_tokens = limits.when_lost
            start_check.equip(self, self.server_args)
            self.server_args.device = device
            turns = self.turns_within(replace(limits, page=page), clock or (lambda: self.now))
            self.__dict__["local_turns"] = turns
            measured = turns.measured.votes
            turns.measured.votes = lambda: measured() if self.costs is None else list(self.costs)
        self._build_queues(group or dist.group.WORLD, reserve)
        self.disagg_decode_prealloc_queue.clock = lambda: self.now

    def _set_plain_state(self) -> None:
        """Set the attributes that SGLang's own ``__init__`` sets on a server without extras."""
        self.__dict__.update(
            disaggregation_mode=DisaggregationMode.DECODE,
            model_config=SimpleNamespace(
                vocab_size=VOCABULARY,
                is_encoder_decoder=False,
                is_matryoshka=False,
                hidden_size=1,
                dtype=torch.float32,
            ),
            enable_kv_cache_events=False,
            spec_num_accepted_tokens=0,
            telemetry=Telemetry(),
            spec_num_forward_ct=0,
            grammar_manager=SimpleNamespace(
                grammar_queue=[],
                has_waiting_grammars=lambda: False,
                abort_requests=lambda request: None,
                clear=lambda: None,
            ),
            dllm_manager=SimpleNamespace(any_staging_reqs=lambda: False),
            tp_worker=SimpleNamespace(
                is_hybrid_swa=False, update_weights_from_disk=lambda request: (True, "")
            ),
            running_batch=ScheduleBatch(reqs=[], batch_is_full=False),
            waiting_queue=[],
            max_running_requests=self.req_to_token_pool.size,
            new_token_ratio=1.0,
            new_token_ratio_decay=0.01,
            min_new_token_ratio=0.1,
            pp_size=1,
            max_req_len=10**9,
            num_generated_tokens=0,
            is_generation=True,
            forward_ct=0,
            forward_ct_decode=0,
        )
        nothing = (
            "last_batch",
            "cur_batch",
            "chunked_req",
            "future_map",
            "draft_worker",
            "tp_cpu_group",
        )
        self.__dict__.update(dict.fromkeys((*nothing, "_pending_flush")))
        off = (
            "enable_hisparse",
            "enable_metrics",
            "current_scheduler_metrics_enabled",
            "enable_overlap",
            "_engine_paused",
            "enable_hierarchical_cache",
            "enable_hicache_storage",
            "enable_lora",
            "require_mlp_sync",
        )
        self.__dict__.update(dict.fromkeys(off, False))

    def _build_queues(self, group: Any, reserve: int) -> None:
        self.disagg_decode_prealloc_queue: Any
        self.disagg_decode_transfer_queue: Any
        queue = without_engine.build_queues(
            self,
            tree=self.tree_cache,
            rows=self.req_to_token_pool,
            pool=self.pool,
            allocator=self.token_to_kv_pool_allocator,
            metadata_slots=METADATA_SLOTS,
            reserve=reserve,
            group=group,
            manager=self.kv_manager,
            spec_algorithm=self.spec_algorithm,
        )
        self.metadata = queue.metadata_buffers
        self.req_to_metadata_buffer_idx_allocator = queue.req_to_metadata_buffer_idx_allocator

    # ---- replaced: model, clients and metrics ----

    def stream_output(self, reqs: list[Any], *arguments: Any, **options: Any) -> None:
        self.mailbox.stream(reqs)

    def report_decode_stats(self, *arguments: Any, **options: Any) -> None:
        """Log nothing."""

    def report_prefill_stats(self, *arguments: Any, **options: Any) -> None:
        """Log nothing."""

    def log_batch_result_stats(self, *arguments: Any) -> None:
        """Log nothing."""

    def _maybe_clear_mm_inputs(self, batch: Any) -> None:
        """Do nothing: there are no images."""

    def maybe_send_health_check_signal(self) -> None:
        """Do nothing: there are no health checks."""

    def maybe_collect_routed_experts(self, req: Any) -> None:
        """Do nothing: there are no experts."""

    def reset_metrics(self) -> None:
        """Do nothing: there are no metrics."""

    # ---- the outside world ----

    def submit(
        self,
        token_ids: list[int],
        *,
        new: int = 8,
        extra_key: str | None = None,
        warm_up: bool = False,
        ready: bool = True,
        pending: bool = False,
        host: str = "10.0.0.1",
        lora_id: str | None = None,
    ) -> Any:
        """Submit a request; ``ready``: the handshake with its prefill server is done.

        ``pending``: the handshake has not begun, because the prefill server's topology is unknown.
        """
        number = len(self.submitted)
        where = FAKE_BOOTSTRAP_HOST if warm_up else host
        apart = {"extra_key": extra_key, "lora_id": lora_id}
        req = without_engine.request(
            number, list(token_ids), new, VOCABULARY, bootstrap_host=where, **apart
        )
        self.init_req_max_new_tokens(req)
        return self.enqueue(req, ready=ready, pending=pending)

    def enqueue(self, req: Any, *, ready: bool = True, pending: bool = False) -> Any:
        """Queue a request with the receiver of a new room."""
        warm_up = is_fake(req)
        room = WarmUpRoom() if warm_up else Room()
        if ready and not warm_up:
            room.state = KVPoll.WaitingForInput
        self.submitted.append(req)
        if isinstance(room, Room):
            self.rooms.append(room)
        entry = DecodeRequest(req=req, kv_receiver=room)
        self.disagg_decode_prealloc_queue.queue.append(entry)
        if pending:
            self.disagg_decode_prealloc_queue.pending_reqs.append(entry)
        return req

    @property
    def has_states(self) -> bool:
        """True if the model has recurrent state."""
        return hasattr(self.pool, "mamba_pool")

    @property
    def nothing_waits(self) -> bool:
        """True if the scheduler may sleep."""
        return bool(self._nothing_waits)

    @property
    def local(self) -> list[Any]:
        """Requests that are computed here and have not joined the batch yet."""
        return [] if self.local_turns is None else self.local_turns.requests

    @property
    def in_transfer(self) -> list[Any]:
        return [entry.req for entry in self.disagg_decode_transfer_queue.queue]

    @property
    def queued(self) -> list[Any]:
        return [entry.req for entry in self.disagg_decode_prealloc_queue.queue]

    @property
    def retracted(self) -> list[Any]:
        found: list[Any] = self.disagg_decode_prealloc_queue.retracted_queue
        return found

    @property
    def held(self) -> list[Any]:
        """Ended requests with pages that prefill may still write to."""
        return list(self.disagg_decode_transfer_queue.deferred_requests)

    def room(self, req: Any) -> Any:
        """Return the receiver of a request that is queued, in transfer or held."""
        transfer = self.disagg_decode_transfer_queue
        queued = [*self.disagg_decode_prealloc_queue.queue, *transfer.queue]
        entries = [*queued, *(deferred.entry for deferred in transfer.deferred)]
        return next(entry.kv_receiver for entry in entries if entry.req is req)

    def deliver(
        self, req: Any, *, first_token: int = 1, cached: int = 0, metadata: bool = True
    ) -> None:
        """Fill the announced pages as prefill does, and then the metadata, or not yet.

        ``first_token``: prefill's answer, unless the KV has determined it already."""
        room = self.room(req)
        if isinstance(room, WarmUpRoom):
            return
        assert not room.announced or room.prompt_tokens == len(req.origin_input_ids)
        if room.first_token is None:
            room.first_token = first_token
        if room.poll() == KVPoll.Transferring:
            page, prefix = self.page_size, room.prefix_len
            # Prefill computed the prompt when the request arrived.
            weights = record_of(req).generation
            values = kv.tags(req.origin_input_ids, req.extra_key, weights=weights)[prefix:]
            slots = (torch.tensor(room.pages)[:, None] * page + torch.arange(page)).reshape(-1)
            slots = slots.to(torch.int64)[: len(values)]
            kv.write(self.pool, slots, values, index=False)
            if self.has_states:
                whole = kv.tags(req.origin_input_ids, req.extra_key, weights=weights)
                recurrent.write(self.req_to_token_pool, room.state_pages.tolist(), whole[-1])
            elif room.state_pages is not None:
                assert room.state_pages.tolist() == room.pages.tolist()
                kv.write_index(self.pool, slots, values)
            if self.draft_pool is not None:
                whole = [*req.origin_input_ids, room.first_token]
                drafts = kv.tags(whole, req.extra_key, weights=weights)[prefix + 1 :]
                kv.write(self.draft_pool, slots, drafts)
            room.state = KVPoll.Success
        if metadata and room.poll() == KVPoll.Success and room.writing:
            index = room.metadata_index
            self.metadata.output_ids[index, 0] = room.first_token
            self.metadata.cached_tokens[index, 0] = cached
            if self.steps:
                drafting.send_start(self.metadata, index, req)
            self.metadata.bootstrap_room[index, 0] = req.bootstrap_room
            room.writing = False

    def write_late(self, room: Room) -> None:
        """Complete a transfer that decode gave up, which writes to pages announced long ago."""
        slots = (torch.tensor(room.pages)[:, None] * self.page_size).reshape(-1)
        slots = (slots[:, None] + torch.arange(self.page_size)).reshape(-1).to(torch.int64)
        for pool in (self.pool, self.draft_pool):
            if pool is not None:
                kv.write(pool, slots, [-7] * len(slots))
        if self.has_states:
            recurrent.write(self.req_to_token_pool, room.state_pages.tolist(), -7)
        self.metadata.bootstrap_room[room.metadata_index, 0] = 7
        room.writing = False

    def abort(self, rid: str) -> None:
        """Disconnect the client."""
        self.abort_request(AbortReq(rid=rid))

    # ---- the scheduler ----

    def tick_queues(self) -> None:
        """Run the first half of a turn (resume, admit, collect); ``tick_batch`` is the second."""
        self.process_decode_queue()

    def retract(self) -> None:
        """Retract requests, as SGLang does when the pool is full."""
        self.running_batch.filter_batch()
        if len(self.running_batch.reqs) < 2:
            return
        retracted, _, aborted = self.running_batch.retract_decode(self.server_args)
        for req in aborted:
            self.mailbox.send_output(AbortReq(rid=req.rid), req)
        for req in retracted:
            self._add_request_to_queue(req, is_retracted=True)

    def update_weights(self) -> None:
        """Load new weights from disk, and flush."""
        answer = self.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path="new"))
        assert answer.success

    def drain(self, limit: int = 20_000) -> None:
        """Run until the server is idle."""
        for _ in range(limit):
            for req in self.queued:
                room = self.room(req)
                if isinstance(room, Room) and room.state == KVPoll.Bootstrapping:
                    room.state = KVPoll.WaitingForInput
            for req in self.in_transfer:
                self.deliver(req)
            for given_up in self.rooms:
                if given_up.writing and given_up.cleared:
                    self.write_late(given_up)
            self.tick_queues()
            self.tick_batch()
            if self.nothing_waits:
                return
        raise AssertionError(f"not idle after {limit} steps: {len(self.queued)} queued")
