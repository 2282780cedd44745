"""Turns whose new tokens a decode server computes itself, between its decode steps.

A turn that is to be computed here stays in SGLang's prealloc queue, hidden from its admission, and
holds nothing until its chunk runs. Then it is matched and locked, SGLang's own budgets say whether
it fits, and prefill is told. A turn longer than a chunk goes on in later ones. It joins the running
batch when its first token is known: SGLang cannot retract a request before that.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple  # Any: SGLang's objects

from sglang.srt.disaggregation.delta.decode.speculation import own_first_drafts
from sglang.srt.disaggregation.delta.decode.turn_choice import (
    Choice,
    Decision,
    Load,
    Pace,
    count_turn,
    observe_gap,
    observe_turn,
)
from sglang.srt.disaggregation.delta.decode.turn_costs import (
    NEVER,
    UNKNOWN,
    VOTES,
    Costs,
    Limits,
    Measured,
    StepTimes,
    read,
    read_there,
)
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.rank_agreement import minimum
from sglang.srt.disaggregation.lead import local_chunk
from sglang.srt.disaggregation.lead.prefill_exit import ReleasingServers, release_room
from sglang.srt.disaggregation.policy.memory import page_ceil
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)


class Turn(NamedTuple):
    """What is noted of a request, as ``lead_turn`` of SGLang's ``Req``. ``tokens``: new ones as
    they were when it was decided; ``at``: when that was, or when prefill was asked (this rank's
    clock)."""

    decision: Decision
    address: str
    tokens: int
    at: float


def only_prefill_can(entry: Any) -> str | None:
    """Why a queue entry is left to prefill whatever it costs; None if it may be computed here."""
    from sglang.srt.disaggregation.decode import _is_fake_transfer

    req = entry.req
    wants = req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids)
    reasons = {
        "not_shared": _is_fake_transfer(req) or entry.is_rebootstrap or entry.host_staged,
        "input_logprobs": wants,
        "hidden_states": req.return_hidden_states,
        "routed_experts": req.return_routed_experts or req.return_indexer_topk,
        "embeddings": req.input_embeds is not None or req.positional_embed_overrides is not None,
        "multimodal": req.multimodal_inputs is not None,
        "session": req.session is not None or req.beam_group is not None,
        "no_output": req.sampling_params.max_new_tokens < 1,
        "aborted": req.to_finish is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class LocalTurns:
    """The local turns of one decode rank, as ``lead_turns`` of SGLang's ``Scheduler``; only its
    thread comes here."""

    def __init__(
        self, scheduler: Any, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler, self._limits, self._clock = scheduler, limits, clock
        self.measured = Measured(limits.max_itl)
        self.peers, self.telemetry = ReleasingServers(), STATS
        self.choice, self.pace = Choice(limits), Pace(limits.share)
        self.times = StepTimes(self.measured, blocking=scheduler.server_args.device == "cpu")
        #: Admitted in this step, in no batch yet; and the batch that they are built into.
        self._chosen: list[Any] = []
        self._built: Any = None
        #: The one request that goes on in a later chunk.
        self.unfinished: Any = None
        #: Chunks whose result was not processed; batches whose requests have their first token.
        self._launched: deque[Any] = deque()
        self._computed: list[Any] = []

    @property
    def reqs(self) -> list[Any]:
        """The requests that hold pages, or are about to, and are in no batch of SGLang's."""
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

    def decide(self, queue: Any) -> None:
        """Where each request of the prealloc queue that became ready is computed. Equal on all
        ranks: they decide from numbers that they agreed on."""
        for address in self.peers.keep(queue.kv_manager.prefill_info_table):
            self.measured.forget(address)
        entries = ready(queue)
        new = [each for each in entries if turn_of(each.req) is None]
        if not new:
            return
        questions = [self._question(queue, entry) for entry in new]
        agreed = self._agree([vote for *_, vote in questions])
        waiting = [turn_of(each.req) for each in entries]
        queued = sum(turn.tokens for turn in waiting if turn is not None and turn.decision.local)
        for entry, (why, address, tokens, _), vote in zip(new, questions, agreed, strict=True):
            there = None if vote == NEVER else read_there(vote)
            if (lost := lost_reason(entry)) is not None:
                load = self._load(queued)
                decision = self.choice.without_prefill(tokens, load, self.pace.costs, lost)
                if not decision.local:
                    entry.kv_receiver.abort()
            elif why is not None or vote == NEVER:
                decision = Decision(False, why or "peer", None, there)
            else:
                decision = self.choice.decide(tokens, self._load(queued), self.pace.costs, there)
            queued += tokens if decision.local else 0
            entry.req.lead_turn = Turn(decision, address, tokens, self._clock())

    def _agree(self, votes: list[int]) -> list[int]:
        """The smallest of each vote over the ranks; from then on they decide by agreed costs."""
        group = self._scheduler.disagg_decode_prealloc_queue.gloo_group
        agreed = minimum([*self.measured.votes(), *votes], group)
        self.pace.costs = read(agreed[:VOTES])
        return agreed[VOTES:]

    def _question(self, queue: Any, entry: Any) -> tuple[str | None, str, int, int]:
        """Why only prefill can; its address; the new tokens; this rank's vote."""
        from sglang.srt.disaggregation.decode import _bootstrap_addr
        from sglang.srt.mem_cache.common import match_kv_cache

        req, length = entry.req, len(entry.req.origin_input_ids)
        address, why = _bootstrap_addr(req), only_prefill_can(entry)
        if why is not None:
            return why, address, length, UNKNOWN
        match_kv_cache(req, queue.tree_cache, req.origin_input_ids, max_prefix_len=length - 1)
        tokens = length - req.prefix_len
        if lost_reason(entry) is not None:
            return None, address, tokens, UNKNOWN
        peer = self.peers.releases(address)
        return None, address, tokens, self.measured.vote_there(address, tokens) if peer else NEVER

    def _load(self, queued: int) -> Load:
        running = len(self._scheduler.running_batch.reqs)
        is_full = self.places <= len(self._scheduler.waiting_queue)
        return Load(queued + self.pending_tokens, running, self.pace.debt, is_full, self._largest)

    def announced(self, reqs: list[Any]) -> None:
        """SGLang asked prefill for ``reqs``."""
        for req in reqs:
            turn = turn_of(req)
            if turn is not None:
                tokens = len(req.origin_input_ids) - req.kv.cache_protected_len
                req.lead_turn = turn._replace(tokens=tokens, at=self._clock())
                self._made(req)

    def shown(self, reqs: list[Any]) -> None:
        """The first tokens of ``reqs``, which prefill computed, are here."""
        now = self._clock()
        for req in reqs:
            turn, req.lead_turn = turn_of(req), None
            if turn is not None:
                self.measured.shown(turn.address, turn.tokens, now - turn.at)
                observe_turn(self.telemetry, turn.decision, now - turn.at)

    def _made(self, req: Any) -> None:
        turn = req.lead_turn
        self.choice.made(turn.decision)
        count_turn(self.telemetry, turn.decision)
        logger.debug(
            "turn %s (room %s, %d new tokens): %s (%s); expected here %s s, from prefill %s s",
            req.rid,
            req.bootstrap_room,
            turn.tokens,
            turn.decision.where,
            turn.decision.reason,
            turn.decision.here,
            turn.decision.there,
        )

    # ---- admission ----

    @property
    def places(self) -> int:
        """How many more requests may run beside those that run or are computed here."""
        scheduler = self._scheduler
        most = min(scheduler.req_to_token_pool.size, scheduler.max_running_requests)
        return int(max(most - len(scheduler.running_batch.reqs) - len(self.reqs), 0))

    @property
    def _beside(self) -> int:
        """Requests that stand still while a chunk runs."""
        scheduler = self._scheduler
        return len(scheduler.running_batch.reqs) + min(len(scheduler.waiting_queue), self.places)

    @property
    def _largest(self) -> int:
        """Tokens of the largest chunk that fits into the bound on inter-token latency. The bound
        applies where a chunk delays the next token of a request that runs, or of a turn whose first
        token is known, at the latest by the chunk under way."""
        ends = any(len(each.reqs) > (each.chunked_req is not None) for each in self._launched)
        delays = self._beside or self._computed or ends
        return (self.pace.costs if delays else Costs()).largest_chunk(self._limits)

    def _fits(self, left: int) -> bool:
        """Whether the next chunk delays nobody beyond the bound, where the first turn in line has
        ``left`` tokens to compute."""
        return self._largest >= min(self._limits.least, left)

    def _chunk(self, left: int) -> int:
        """Tokens of the chunk that may run now, likewise; 0 if none may."""
        fits = self._fits(left)
        if not self.pace.may_run(self._beside, fits):
            return 0
        return max(self._largest if fits else self._limits.least, self._limits.page)

    def admit(self, queue: Any) -> None:
        """Hides the local turns of the prealloc queue from SGLang, and builds a chunk of those
        that may run now."""
        page, left = self._limits.page, 0 if self.unfinished else None
        ahead, entries = 0, list[Any]()
        for entry in ready(queue):
            turn, req = entry.req.lead_turn, entry.req
            if not turn.decision.local:
                entry.waiting_for_input = lost_reason(entry) is None  # else it ends
                # What SGLang could not admit in the last step, it admits first.
                prefix = len(req.origin_input_ids) - turn.tokens
                ahead = ahead or sum(self._needs(queue, req, prefix))
                continue
            can_leave = lost_reason(entry) is None
            if can_leave and turn.decision.reason != "always" and not self._fits(turn.tokens):
                leave(entry, "itl")  # others run since it was decided, or chunks take longer
                continue
            entry.waiting_for_input = False  # SGLang sets it anew in each step
            left = self._chunk(turn.tokens) if left is None else left
            rows = queue.req_to_token_pool.available_size() - len(entries)
            if left < page or min(self.places, rows) <= 0:
                left = 0
                continue
            need = self._take(queue, req, left, ahead)
            if not need:
                if can_leave:
                    leave(entry, "no_memory")
                else:
                    left = 0
                continue
            entries.append(entry)
            ahead += need
            left = left - req.extend_len if req.extend_end == len(req.origin_input_ids) else 0
        if entries:
            self._launch(queue, entries)

    def _needs(self, queue: Any, req: Any, prefix: int) -> tuple[int, int]:
        """Tokens that ``req`` allocates, and those that have to be left then; SGLang's numbers."""
        length = len(req.origin_input_ids)
        need = int(queue._required_alloc_tokens(fill_len=length, prefix_len=prefix))
        required = queue._required_admission_tokens(req, need, prefix, self._retractable)
        return need, int(required) - need

    @property
    def _retractable(self) -> int:
        """Tokens that SGLang's budgets take to be given back by retraction."""
        running = self._scheduler.running_batch.reqs
        return sum(len(req.origin_input_ids) + len(req.output_ids) for req in running)

    def _take(self, queue: Any, req: Any, left: int, ahead: int) -> int:
        """Locks the prefix of ``req`` and sets how far its first chunk goes, if it fits beside
        ``ahead`` tokens; how many tokens it allocates, or 0."""
        from sglang.srt.mem_cache.common import match_kv_cache

        tree, length = queue.tree_cache, len(req.origin_input_ids)
        match = match_kv_cache(req, tree, req.origin_input_ids, max_prefix_len=length - 1)
        req.lock = tree.lock(match.last_device_node)
        need, reserve = self._needs(queue, req, req.prefix_len)
        if need + reserve + ahead > queue._allocatable_token_budgets(self._retractable):
            tree.unlock(req.lock)
            req.lock = None
            return 0
        req.kv.cache_protected_len = req.prefix_len
        req.extend_end = local_chunk.end_of_chunk(req.prefix_len, length, left, tree.page_size)
        self._chosen.append(req)
        return need

    def _launch(self, queue: Any, entries: list[Any]) -> None:
        """Builds the chunk of the chosen requests, and tells prefill."""
        reqs, self._chosen = self._chosen, []
        if reqs[-1].extend_end < len(reqs[-1].origin_input_ids):
            self.unfinished = reqs[-1]
        self._built = local_chunk.build(self._scheduler, reqs, self.unfinished)
        gone = {id(entry) for entry in entries}
        queue.queue = [entry for entry in queue.queue if id(entry) not in gone]
        for entry in entries:
            release_room(entry.kv_receiver)
            entry.kv_receiver = None
            self._made(entry.req)

    # ---- chunks ----

    def next_batch(self) -> Any:
        """The next chunk as a ``ScheduleBatch``, if one may run now; else None."""
        batch, self._built = self._built, None
        if batch is None and self.unfinished is not None:
            batch = self._next_chunk(self.unfinished)
        if batch is not None:
            self._launched.append(batch)
            self.pace.chunk(batch.extend_num_tokens, self._beside)
            self.telemetry.count("decode_local_tokens", batch.extend_num_tokens)
            self.times.launched(batch.extend_num_tokens, self._clock())
        return batch

    def _next_chunk(self, req: Any) -> Any:
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_len_per_decode
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        scheduler = self._scheduler
        if req.to_finish is not None:
            if not any(req in batch.reqs for batch in self._launched):
                self.unfinished = None
                local_chunk.end(scheduler, req)
            return None
        tree, done, length = scheduler.tree_cache, req.extend_end, len(req.origin_input_ids)
        if self._limits.max_itl is not None:
            self._agree([])  # what fits changes with each chunk, whether or not somebody arrives
        chunk = self._chunk(length - done)
        end = local_chunk.end_of_chunk(done, length, chunk, tree.page_size)
        free = scheduler.token_to_kv_pool_allocator.available_size() + tree.evictable_size()
        # What the next decode step takes of each of the others: a page, or that of its drafts.
        step = page_ceil(get_alloc_len_per_decode(), tree.page_size)
        step *= len(scheduler.running_batch.reqs) + 1
        if not chunk or end - done + step > free:
            return None
        checkpoint_kv_cache(req, tree)
        req.extend_end = end
        if end == length:
            self.unfinished = None
        return local_chunk.build(scheduler, [req], self.unfinished)

    def result(self) -> None:
        """The oldest chunk's result was processed: who has a first token joins in the next step."""
        if not self._launched:
            return
        batch, now = self._launched.popleft(), self._clock()
        if batch.spec_info is not None:
            own_first_drafts(batch)  # a request that is retracted starts from them again
        batch.filter_batch(reqs_to_exclude=batch.chunked_req)
        for req in batch.reqs:
            turn, req.lead_turn = req.lead_turn, None
            observe_turn(self.telemetry, turn.decision, now - turn.at)
        self._computed.append(batch)

    def decoded(self, reqs: list[Any]) -> None:
        """A decode step's tokens for ``reqs`` are about to be sent."""
        rids = frozenset(req.rid for req in reqs if not req.finished())
        gap = self.measured.gaps.step(self._clock(), rids, self._fits(self._limits.least))
        if gap is not None:
            observe_gap(self.telemetry, *gap, self._limits.max_itl)

    def join(self, running: Any, but: Any = None) -> Any:
        """The running batch with the computed requests, without those of the batch ``but``."""
        batches, self._computed = self._computed, []
        return local_chunk.merged(running, [batch for batch in batches if batch is not but])

    def retracted(self) -> None:
        """SGLang took all requests back, also those that are here."""
        for req in self.reqs:
            req.lead_turn = None
        self.unfinished = None
        self._computed.clear()


def turn_of(req: Any) -> Any:
    """What is noted of a request (``Turn``), or None."""
    return getattr(req, "lead_turn", None)


def lost_reason(entry: Any) -> str | None:
    """Why a queue entry has no prefill server (``without_prefill``); None if it has one."""
    return getattr(entry.kv_receiver, "reason", None)


def leave(entry: Any, reason: str) -> None:
    """A turn that was to be computed here is left to prefill, which SGLang asks in its order."""
    turn = entry.req.lead_turn
    decision = turn.decision._replace(local=False, reason=reason)
    entry.waiting_for_input, entry.req.lead_turn = True, turn._replace(decision=decision)


def ready(queue: Any) -> list[Any]:
    """The entries of a prealloc queue that wait for admission."""
    return [each for each in queue.queue if each.waiting_for_input and not each.req.finished()]


def limits(page: int) -> Limits:
    """The settings. ``page``: tokens of a page.

    Raises:
        ValueError: a variable is not the number that it must be.
    """
    return Limits(
        tokens=environment.LOCAL_TOKENS.read(),
        chunk=environment.LOCAL_CHUNK.read(),
        share=environment.LOCAL_SHARE.read(),
        always=environment.LOCAL_ALWAYS.read(),
        when_lost=environment.FALLBACK_PREFILL_TOKENS.read(),
        max_itl=environment.LOCAL_MAX_ITL_MS.read() / 1000 or None,
        page=page,
    )
