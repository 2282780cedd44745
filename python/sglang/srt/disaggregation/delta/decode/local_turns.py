"""Turns whose new tokens this decode server computes itself, instead of asking prefill for them.

A local turn is admitted like any other request: its prefix is locked, the pages of its new tokens
are its own, and the claims count it. Then it is not announced but waits here, and is computed in
chunks of bounded size, between decode steps. It joins the running batch when its first token is
known: SGLang cannot retract a request before that, and nobody gives back pages that a step under
way still reads.

So are requests whose prefill server is lost, or whose transfer failed, if they are short (fallback
prefill: ``answers.NoPrefill``).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: a Candidate, where it has its lease

import torch

from sglang.srt.disaggregation.delta.decode.request import (
    Stage,
    bootstrap_addr,
    is_fake,
    record_of,
)
from sglang.srt.disaggregation.delta.decode.speculation import own_first_drafts
from sglang.srt.disaggregation.delta.decode.turn_choice import (
    Choice,
    Decision,
    Load,
    Pace,
    Placed,
    count_turn,
    observe_gap,
    observe_turn,
    only_prefill_can,
)
from sglang.srt.disaggregation.delta.decode.turn_costs import (
    NEVER,
    NOT_MEASURED,
    OTHERS_CHUNK,
    UNKNOWN,
    VOTES,
    Costs,
    Limits,
    Measured,
    StepTimes,
    read,
    read_there,
)
from sglang.srt.disaggregation.delta.observability import STATS, Telemetry
from sglang.srt.disaggregation.policy.memory import page_floor

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Turn:
    """A turn that is computed locally. ``done``: tokens of its prompt whose KV was computed, or is
    computed by a chunk that was launched."""

    req: Req
    done: int

    @property
    def left(self) -> int:
        """Tokens that no chunk has taken yet."""
        return len(self.req.origin_input_ids) - self.done

    @property
    def has_begun(self) -> bool:
        """Whether a chunk has taken some of it."""
        return bool(self.done > self.req.cache_protected_len)


class LocalTurns:
    """The local turns of one decode rank; only the scheduler's thread comes here."""

    def __init__(
        self,
        limits: Limits,
        telemetry: Telemetry,
        clock: Callable[[], float],
        *,
        batch: Callable[[], tuple[int, int, int]],
        peer_yields: Callable[[str], bool],
        adapters_fit: Callable[[set[str | None]], bool],
        blocking: bool,
    ) -> None:
        """``batch``: how many requests run, how many that prefill has sent wait to join them, and
        how many may run at most; ``peer_yields``: whether the prefill server at an address leaves a
        request to decode; ``adapters_fit``: whether LoRA adapters have room together; ``blocking``:
        of ``StepTimes``."""
        self._limits, self.telemetry, self._clock = limits, telemetry, clock
        self._batch, self._peer_yields, self._adapters_fit = batch, peer_yields, adapters_fit
        self.measured = Measured(limits.max_itl)
        self.choice = Choice(limits)
        self.pace = Pace(limits.share)
        self.times = StepTimes(self.measured, blocking)
        #: Admitted, in order; the first may have been computed in part.
        self.queue: list[Turn] = []
        #: Chunks that were launched and whose result was not processed: the batch and its turns.
        self.launched: deque[tuple[ScheduleBatch, list[Turn]]] = deque()
        #: Computed batches whose requests have their first token and wait for a place.
        self.computed: list[ScheduleBatch] = []
        self._there: Sequence[int] = ()
        #: True if other data parallel ranks may run requests, which a chunk here would delay: they
        #: ran a batch in the last step, or this rank ran a chunk in it and cannot tell.
        self.others_run = False

    @property
    def is_busy(self) -> bool:
        """Whether a request is here: between its admission and the running batch."""
        return bool(self.queue or self.launched or self.computed)

    @property
    def requests(self) -> list[Req]:
        """All that hold pages here and are in no batch that runs."""
        launched = (turn for _, turns in self.launched for turn in turns)
        found = {id(turn.req): turn.req for turn in (*launched, *self.queue)}
        computed = [req for batch in self.computed for req in batch.reqs if not req.finished()]
        return [*found.values(), *computed]

    # ---- the choice ----

    def votes(self, candidates: Sequence[Any]) -> list[int]:
        """What this rank knows of the costs, for the ranks to agree on."""
        votes = self.measured.votes()
        for candidate in candidates:
            vote = UNKNOWN
            if candidate.lease is not None and not (candidate.resumes or candidate.is_alone):
                address, tokens = bootstrap_addr(candidate.req), candidate.length
                tokens -= candidate.lease.length
                is_asked = self._peer_yields(address)
                vote = self.measured.vote_there(address, tokens) if is_asked else NEVER
            votes.append(vote)
        return votes

    def agree(self, votes: Sequence[int]) -> None:
        """The numbers of this step, as all ranks have them."""
        self.pace.costs = read(votes[:VOTES])
        self._there = votes[VOTES:]

    def decide(self, candidate: Any, at: int) -> Decision:
        """Where the candidate ``at`` of this step, which has its agreed lease, is computed."""
        tokens = candidate.length - self.prefix_here(candidate)
        if candidate.is_alone:
            reason = candidate.entry.kv_receiver.reason
            return self.choice.without_prefill(tokens, self._load(), self.pace.costs, reason)
        if not candidate.shares:
            return Decision(False, "not_shared")
        if self._there[at] == NEVER:
            return Decision(False, "peer")
        there = read_there(self._there[at])
        why = only_prefill_can(candidate.req)
        if why is not None:
            return Decision(False, why, None, there)
        return self.choice.decide(tokens, self._load(), self.pace.costs, there)

    def _load(self) -> Load:
        queued = sum(turn.left for turn in self.queue)
        running, waiting, _ = self._batch()
        # A turn that is taken now has its place behind those that wait for one.
        ahead = sum(not turn.has_begun for turn in self.queue)
        is_full = self.free_places <= ahead + waiting
        return Load(queued, running + self.others_run, self.pace.debt, is_full, self._largest)

    def prefix_here(self, candidate: Any) -> int:
        """How long the prefix of a candidate may be that is computed locally: at least one token is
        left to compute."""
        most = page_floor(candidate.length - 1, self._limits.page)
        return min(int(candidate.lease.length), most)

    def may_save(self, req: Req) -> bool:
        """Whether ``req`` may be computed locally if it has no prefill server any more."""
        return bool(self._limits.when_lost and not is_fake(req) and only_prefill_can(req) is None)

    def take(self, entry: DecodeRequest, decision: Decision) -> None:
        """``entry`` has its row and pages, and is computed locally: prefill is notified."""
        req = entry.req
        entry.kv_receiver.yield_room()
        entry.kv_receiver.clear()
        req.time_stats.set_decode_transfer_queue_entry_time()
        req.time_stats.set_wait_queue_entry_time()
        STATS.count("decode_prefix_prompt_tokens", len(req.origin_input_ids))
        STATS.count("decode_prefix_hit_tokens", req.cache_protected_len)
        record_of(req).hit_tokens = req.cache_protected_len
        self.queue.append(Turn(req, req.cache_protected_len))
        self.placed(req, decision)

    def shown(self, reqs: Sequence[Req]) -> None:
        """The first tokens of ``reqs`` are on their way to the client, or would be if there were a
        place in the running batch.

        Called again for those that waited or were retracted, of which nothing more is measured.
        """
        now = self._clock()
        for record in map(record_of, reqs):
            turn, record.turn = record.turn, None
            if turn is not None:
                observe_turn(self.telemetry, turn.decision, now - turn.at)
                if not turn.decision.local:
                    self.measured.shown(turn.address, turn.tokens, now - turn.at)

    def placed(self, req: Req, decision: Decision) -> None:
        """``req`` was taken, or announced to prefill, which computes it then."""
        tokens = req.kv_allocated_len - req.cache_protected_len
        record_of(req).turn = Placed(decision, bootstrap_addr(req), tokens, self._clock())
        self.choice.made(decision)
        count_turn(self.telemetry, decision)
        logger.debug(
            "turn %s (room %s, %d new tokens): %s (%s); expected local %s s, remote %s s",
            req.rid,
            req.bootstrap_room,
            tokens,
            decision.where,
            decision.reason,
            decision.here,
            decision.there,
        )

    # ---- chunks ----

    def next_turns(self) -> list[Turn]:
        """The first turns in line that fit into the next chunk, the last maybe in part; none if no
        chunk may run now.

        Sets each one's ``fill_ids``, up to which it is computed then.
        """
        first, tokens, least = self.queue[0], self._largest, self._limits.least
        fits = tokens >= min(least, first.left)  # else it delays somebody beyond the bound
        # Who was aborted in a chunk that was launched goes with that one's result.
        if not self.pace.may_run(self._beside, fits) or first.req.to_finish is not None:
            return []
        if not fits:
            tokens = least
        page, chosen = self._limits.page, list[Turn]()
        for turn in self.queue[: max(self.free_places + first.has_begun, 0)]:
            if not self._adapters_fit({t.req.lora_id for t in (*chosen, turn)}):
                break
            prompt = turn.req.origin_input_ids
            end = len(prompt)
            if turn.left > tokens:
                # Chunks are a page at least.
                end = page_floor(turn.done + (tokens if chosen else max(tokens, page)), page)
            if end <= turn.done:
                break
            turn.req.fill_ids = prompt[:end]
            tokens -= end - turn.done
            chosen.append(turn)
            if tokens <= 0 or end < len(prompt):
                break
        return chosen

    def launch(self, turns: list[Turn], batch: ScheduleBatch) -> None:
        """``batch`` computes these ``turns``, the next ones, and is about to run."""
        self.queue = self.queue[len(turns) - (batch.chunked_req is not None) :]
        self.launched.append((batch, turns))
        self.pace.chunk(batch.extend_num_tokens, self._beside)
        self.times.launched(batch.extend_num_tokens, self._clock())

    def stepped(self, batch: ScheduleBatch) -> None:
        """Note that ``batch`` is about to run: a decode step, or with data parallel attention an
        empty batch while other ranks run. A chunk of another rank delays requests here as one of
        this rank does, so no chunk follows in the next step."""
        if batch.is_extend_in_batch:
            self.pace.others_chunk()
        else:
            self.pace.step()
        is_step = batch.forward_mode.is_decode()
        tokens = OTHERS_CHUNK if batch.is_extend_in_batch else 0 if is_step else NOT_MEASURED
        self.times.launched(tokens, self._clock())

    @property
    def _beside(self) -> int:
        """How many requests a chunk delays: those that run, those that prefill has sent since and
        that have a place, and one for all on other data parallel ranks."""
        running, waiting, _ = self._batch()
        return running + min(waiting, self.places_for_others) + self.others_run

    @property
    def _largest(self) -> int:
        """Tokens of the largest chunk that fits into the bound on inter-token latency. The bound
        applies where a chunk delays the next token of a request that runs, or of a turn whose first
        token is known, at the latest by the chunk under way."""
        ends = any(not turn.left for _, turns in self.launched for turn in turns)
        delays = self._beside or self.computed or ends
        return (self.pace.costs if delays else Costs()).largest_chunk(self._limits)

    def decoded(self, reqs: Sequence[Req]) -> None:
        """A decode step's tokens for ``reqs`` are about to be sent."""
        rids = frozenset(req.rid for req in reqs if not req.finished())
        gap = self.measured.gaps.step(self._clock(), rids, self._largest >= self._limits.least)
        if gap is not None:
            observe_gap(self.telemetry, *gap, self._limits.max_itl)

    @property
    def free_places(self) -> int:
        """How many more requests may run. A turn has a place from its first chunk on."""
        running, _, most = self._batch()
        turns = {id(turn) for _, turns in self.launched for turn in turns}
        turns |= {id(turn) for turn in self.queue[:1] if turn.has_begun}
        return most - len(turns) - running - sum(len(batch.reqs) for batch in self.computed)

    @property
    def places_for_others(self) -> int:
        """How many requests that prefill has sent may join the running batch now; none while
        computed ones wait for their adapters to have room, which who passes them would take."""
        return 0 if self.computed else max(self.free_places, 0)

    def before_result(self) -> None:
        """The oldest chunk's result is about to be processed: what it computed may be shared."""
        for turn in self.launched[0][1]:
            if not turn.req.is_chunked:
                record_of(turn.req).enter(Stage.COMMITTED)
                stats = turn.req.time_stats
                if stats.trace_ctx.tracing_enable:
                    # SGLang adds the slice of a prefill to the one of decode, which it opened when
                    # the prompt was first run: by itself it would end that one under another name,
                    # with a warning.
                    stats.prefill_finished_time = time.perf_counter()

    def after_result(self) -> None:
        """It was processed: those that have their first token wait for a slot in the batch."""
        batch, turns = self.launched.popleft()
        if batch.spec_info is not None:
            batch.spec_info.future_indices = None  # so that what it has itself is filtered
        batch.filter_batch(chunked_req_to_exclude=batch.chunked_req)
        done = [turn.req for turn in turns if turn.req is not batch.chunked_req]
        for req in done:
            req.time_stats.decode_prebuilt_finish_time = time.perf_counter()
        self.shown(done)
        if not batch.is_empty():
            tokens = [req.output_ids[-1] for req in batch.reqs]
            batch.output_ids = torch.tensor(tokens, dtype=torch.int64, device=batch.device)
            if batch.spec_info is not None:
                own_first_drafts(batch)
            self.computed.append(batch)
