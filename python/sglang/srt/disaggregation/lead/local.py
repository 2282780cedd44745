"""Local turns: a decode server computes their new tokens itself, between its decode steps.

A local turn stays in SGLang's prealloc queue, hidden from its admission, and holds nothing until
its chunk runs. Then it is matched and locked, SGLang's own budgets say whether it fits, and prefill
is notified. A turn longer than a chunk continues in later ones. It joins the running batch when its
first token is known, because SGLang cannot retract a request before that.

Contract: scheduler thread, no lock. All ranks of a server call the same methods in the same steps,
and decide from the numbers of ``_agree`` and from queues that are equal on all ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any  # Any: SGLang's objects

from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.rank_agreement import minimum
from sglang.srt.disaggregation.lead import explain
from sglang.srt.disaggregation.lead.batches import (
    build_chunk,
    can_load_adapter,
    end_aborted,
    end_of_chunk,
    has_room,
    merged,
)
from sglang.srt.disaggregation.lead.prefill_exit import ReleasingServers, release_room
from sglang.srt.disaggregation.policy.choice import (
    Decision,
    choose,
    choose_without_prefill,
    prefill_only_reason,
    record_choice,
)
from sglang.srt.disaggregation.policy.chunks import Chunks, own_first_drafts
from sglang.srt.disaggregation.policy.memory import page_ceil
from sglang.srt.disaggregation.policy.pace import Limits


def reason_for_prefill(entry: Any) -> str | None:
    """Return why a queue entry is left to prefill, whatever its length, or None."""
    from sglang.srt.disaggregation.decode import _is_fake_transfer

    if _is_fake_transfer(entry.req) or entry.is_rebootstrap or entry.host_staged:
        return "not_shared"
    return prefill_only_reason(entry.req)


class QueuedTurns(Chunks):
    """The local turns of one decode rank, as ``lead_turns`` of SGLang's ``Scheduler``."""

    def __init__(
        self, scheduler: Any, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(limits, STATS, clock, blocking=scheduler.server_args.device == "cpu")
        self._scheduler, self.peers = scheduler, ReleasingServers()
        #: Requests that were admitted in this step and are in no batch yet.
        self._chosen: list[Any] = []
        #: Batch that is built of them.
        self._built: Any = None
        #: Request that continues in a later chunk.
        self.unfinished: Any = None
        #: Launched chunks without a processed result.
        self._launched: deque[Any] = deque()
        #: Computed batches; their requests have a first token and are not running.
        self._computed: list[Any] = []

    @property
    def reqs(self) -> list[Any]:
        """Requests that hold pages, or are about to, and are in no batch of SGLang's."""
        batches = (self._built, *self._launched, *self._computed)
        held = [req for batch in batches if batch is not None for req in batch.reqs]
        held += self._chosen if self.unfinished is None else [*self._chosen, self.unfinished]
        return list({id(req): req for req in held if not req.finished()}.values())

    @property
    def pending_tokens(self) -> int:
        """Tokens that the unfinished turn has not allocated."""
        req = self.unfinished
        return len(req.origin_input_ids) - req.extend_end if req else 0

    # ---- the choice ----

    def decide(self, queue: Any, entries: list[Any]) -> None:
        """Choose the server for each of the ready ``entries`` that is new. Equal on all ranks,
        because they choose from numbers that they agreed on."""
        self.peers.keep(queue.kv_manager.prefill_info_table)
        new = [each for each in entries if decision_of(each.req) is None]
        if not new:
            return
        questions = [self._question(queue, entry) for entry in new]
        agreed = self._agree([vote for *_, vote in questions])
        decided = [made for each in entries if (made := decision_of(each.req)) and made.local]
        queued = self.pending_tokens + sum(each.tokens for each in decided)
        # Earlier turns, and requests from prefill, take their places first.
        ahead = len(decided) + len(self._scheduler.waiting_queue)
        places, delays = self.places, self.delays
        for entry, (reason, tokens, _), releases in zip(new, questions, agreed, strict=True):
            reason = reason or (None if releases else "peer")
            if (lost := lost_reason(entry)) is not None:
                decision = choose_without_prefill(tokens, self.limits, lost)
                if not decision.local:
                    entry.kv_receiver.abort()
            elif reason is not None:
                decision = Decision(False, reason, tokens)
            else:
                fits = self.pace.fits(queued + tokens, delays)
                decision = choose(tokens, self.limits, is_full=places <= ahead, fits=fits)
            if decision.local:
                queued, ahead = queued + tokens, ahead + 1
            entry.req.lead_turn = decision

    def _agree(self, votes: list[int]) -> Sequence[int]:
        """Return the smallest of each vote over the ranks; take over the times they agreed on."""
        group = self._scheduler.disagg_decode_prealloc_queue.gloo_group
        return self.take_over(minimum([*self.measured.votes(), *votes], group))

    def _question(self, queue: Any, entry: Any) -> tuple[str | None, int, bool]:
        """Return why only prefill can compute an entry, its new tokens, and whether this rank knows
        that the prefill server releases rooms: all ranks must."""
        from sglang.srt.mem_cache.common import match_kv_cache

        req, length = entry.req, len(entry.req.origin_input_ids)
        if (reason := reason_for_prefill(entry)) is not None:
            return reason, length, True
        match_kv_cache(req, queue.tree_cache, req.origin_input_ids, max_prefix_len=length - 1)
        releases = lost_reason(entry) is not None or self.peers.releases(_address(req))
        return None, length - req.prefix_len, releases

    def announced(self, reqs: list[Any]) -> None:
        """Count requests that SGLang announced to prefill."""
        for req in reqs:
            decision, req.lead_turn = decision_of(req), None
            if decision is not None:
                record_choice(self.telemetry, req, decision)
                explain.note(req, req.kv.cache_protected_len, decision)

    # ---- admission ----

    @property
    def places(self) -> int:
        """Number of requests that may run beside running requests and local turns."""
        scheduler = self._scheduler
        max_running = min(scheduler.req_to_token_pool.size, scheduler.max_running_requests)
        return int(max(max_running - len(scheduler.running_batch.reqs) - len(self.reqs), 0))

    @property
    def beside(self) -> int:
        """See ``Chunks``."""
        scheduler = self._scheduler
        waiting = min(len(scheduler.waiting_queue), self.places)
        return len(scheduler.running_batch.reqs) + waiting + self.others_run

    @property
    def delays(self) -> bool:
        """See ``Chunks``."""
        ends = any(len(each.reqs) > (each.chunked_req is not None) for each in self._launched)
        return bool(self.beside or self._computed or ends)

    def admit(self, queue: Any, entries: list[Any]) -> None:
        """Hide the local turns among the ready ``entries`` from SGLang, and build a chunk of those
        that may run now."""
        page, left, delays = self.limits.page, 0 if self.unfinished else None, self.delays
        taken = blocked = 0
        admitted, unloadable = list[Any](), set[str | None]()
        room = queue.token_to_kv_pool_allocator.create_prefill_budget(queue.tree_cache)
        for entry in entries:
            req, can_leave = entry.req, lost_reason(entry) is None
            new_tokens = req.lead_turn.tokens
            if can_leave and req.lead_turn.local and not self.pace.fits(new_tokens, delays):
                leave(entry, "itl")  # requests began to run since the choice, or chunks are slower
            if req.lead_turn.local:
                entry.waiting_for_input = False  # SGLang sets it again in each step
                left = self.next_chunk(new_tokens) if left is None else left
                rows = queue.req_to_token_pool.available_size() - len(admitted)
                if left < page or min(self.places, rows) <= 0:
                    left = 0
                    continue
                if req.lora_id in unloadable or not can_load_adapter(self._scheduler, req):
                    unloadable.add(req.lora_id)
                    continue
                if need := self._take(queue, req, left, taken + blocked, room):
                    admitted.append(entry)
                    # Behind a turn that is not complete, less than a page is left.
                    taken, left = taken + need, left - req.extend_len
                    continue
                if not can_leave:
                    left = 0
                    continue
                leave(entry, "no_memory")
            entry.waiting_for_input = can_leave  # else it ends
            # Because SGLang admits in order, keep the memory that the first request needs.
            prefix = len(req.origin_input_ids) - new_tokens
            blocked = blocked or sum(self._needs(queue, req, prefix))
        if admitted:
            self._launch(queue, admitted)

    def _needs(self, queue: Any, req: Any, prefix: int) -> tuple[int, int]:
        """Return the tokens that ``req`` allocates, and those that must stay free, by SGLang."""
        length = len(req.origin_input_ids)
        need = int(queue._required_alloc_tokens(fill_len=length, prefix_len=prefix))
        required = queue._required_admission_tokens(req, need, prefix, self._retractable)
        return need, int(required) - need

    @property
    def _retractable(self) -> int:
        """Tokens that SGLang's budgets count as released by a retraction."""
        running = self._scheduler.running_batch.reqs
        return sum(len(req.origin_input_ids) + len(req.output_ids) for req in running)

    def _take(self, queue: Any, req: Any, left: int, ahead: int, room: Any) -> int:
        """Lock the prefix of ``req`` and set the end of its first chunk, if it fits into ``room``
        and beside ``ahead`` tokens. Return the tokens that it allocates, or 0."""
        from sglang.srt.mem_cache.allocation import ensure_mamba_capacity
        from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache

        tree, prompt, length = queue.tree_cache, req.origin_input_ids, len(req.origin_input_ids)
        has_state = tree.supports_mamba()
        if not ensure_mamba_capacity(queue.req_to_token_pool, [*self._chosen, req], tree):
            return 0
        match = match_kv_cache(req, tree, prompt, cow_mamba=has_state, max_prefix_len=length - 1)
        req.lock = tree.lock(match.last_device_node)
        need, reserve = self._needs(queue, req, req.prefix_len)
        fits = need + reserve + ahead <= queue._allocatable_token_budgets(self._retractable)
        # A later chunk also needs the window before it.
        chunk = self.limits.chunk + (tree.sliding_window_size or 0) + 2 * tree.page_size
        if not (fits and has_room(room, need, reserve, chunk)):
            tree.unlock(req.lock)
            if has_state:
                release_kv_cache(req, tree, checkpoint=False)
            req.lock, req.kv = None, type(req.kv)()
            return 0
        room.reserve(need, reserve, chunk_limit=chunk)
        req.kv.cache_protected_len = req.prefix_len
        req.extend_end = end_of_chunk(req.prefix_len, length, left, tree.page_size)
        self._chosen.append(req)
        return need

    def _launch(self, queue: Any, entries: list[Any]) -> None:
        """Build the chunk of the chosen requests, and notify prefill."""
        reqs, self._chosen = self._chosen, []
        if reqs[-1].extend_end < len(reqs[-1].origin_input_ids):
            self.unfinished = reqs[-1]
        self._built = build_chunk(self._scheduler, reqs, self.unfinished)
        gone = {id(entry) for entry in entries}
        queue.queue = [entry for entry in queue.queue if id(entry) not in gone]
        for entry in entries:
            release_room(entry.kv_receiver)
            entry.kv_receiver = None
            record_choice(self.telemetry, entry.req, entry.req.lead_turn)
            explain.note(entry.req, entry.req.kv.cache_protected_len, entry.req.lead_turn)

    # ---- chunks ----

    def next_batch(self) -> Any:
        """Return the next chunk as a ``ScheduleBatch`` if one may run now, else None."""
        batch, self._built = self._built, None
        if batch is None and self.unfinished is not None:
            batch = self._next_chunk(self.unfinished)
        if batch is not None:
            self._launched.append(batch)
            self.chunk_launched(batch.extend_num_tokens)
            self.telemetry.count("decode_local_tokens", batch.extend_num_tokens)
        return batch

    def _next_chunk(self, req: Any) -> Any:
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_len_per_decode
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        scheduler = self._scheduler
        if req.to_finish is not None:
            if not any(req in batch.reqs for batch in self._launched):
                self.unfinished = None
                end_aborted(scheduler, req)
            return None
        tree, done, length = scheduler.tree_cache, req.extend_end, len(req.origin_input_ids)
        if self.limits.max_itl is not None:
            self._agree([])  # the largest chunk changes with each one, also without arrivals
        chunk = self.next_chunk(length - done)
        end = end_of_chunk(done, length, chunk, tree.page_size)
        room = scheduler.token_to_kv_pool_allocator.create_prefill_budget(tree)
        # Each other request takes a page in the next decode step, or the pages of its drafts.
        step = page_ceil(get_alloc_len_per_decode(), tree.page_size)
        step *= len(scheduler.running_batch.reqs) + 1
        if not chunk or not has_room(room, end - done + step):
            return None
        checkpoint_kv_cache(req, tree)
        req.extend_end = end
        if end == length:
            self.unfinished = None
        return build_chunk(scheduler, [req], self.unfinished)

    def processed(self) -> None:
        """Queue the turns of the oldest chunk, whose result was processed, for the running
        batch."""
        if not self._launched:
            return
        batch = self._launched.popleft()
        if batch.spec_info is not None:
            own_first_drafts(batch)  # a request that is retracted starts from them again
        batch.filter_batch(reqs_to_exclude=batch.chunked_req)
        for req in batch.reqs:
            req.lead_turn = None
        self._computed.append(batch)

    def join(self, running: Any, but: Any = None) -> Any:
        """Return the running batch with the computed requests, except those of batch ``but``."""
        batches, self._computed = self._computed, []
        return merged(running, [batch for batch in batches if batch is not but])

    def retracted(self) -> None:
        """Forget all turns, because SGLang retracted all requests."""
        for req in self.reqs:
            req.lead_turn = None
        self.unfinished = None
        self._computed.clear()


def decision_of(req: Any) -> Decision | None:
    """Return the decision on a request that is not announced or running, or None."""
    return getattr(req, "lead_turn", None)


def _address(req: Any) -> str:
    """Return the address of its prefill server."""
    from sglang.srt.disaggregation.decode import _bootstrap_addr

    return str(_bootstrap_addr(req))


def lost_reason(entry: Any) -> str | None:
    """Return why a queue entry has no prefill server (``without_prefill``), or None."""
    return getattr(entry.kv_receiver, "reason", None)


def leave(entry: Any, reason: str) -> None:
    """Leave a local turn to prefill; SGLang announces it in its order."""
    entry.waiting_for_input = True
    entry.req.lead_turn = entry.req.lead_turn._replace(local=False, reason=reason)


def ready(queue: Any) -> list[Any]:
    """Return the entries of a prealloc queue that wait for admission, in SGLang's order."""
    scheduler = queue.scheduler
    entries = [each for each in queue.queue if each.waiting_for_input and not each.req.finished()]
    if scheduler.enable_priority_scheduling:  # SGLang sorts the queue only afterwards
        sign = 1 if scheduler.schedule_low_priority_values_first else -1
        entries.sort(key=lambda entry: entry.priority * sign)
    return entries
