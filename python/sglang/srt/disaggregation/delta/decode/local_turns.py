"""Local turns: this decode server computes their new tokens itself.

A local turn is admitted like any other request: its prefix is locked, its new tokens get pages of
their own, and the claims count it. It is not announced to prefill but queued here, and computed in
chunks of bounded size between decode steps. It joins the running batch when its first token is
known, because SGLang cannot retract a request before that, and a step under way still reads its
pages.

Short requests that lost their prefill server or transfer are computed in the same way (fallback
prefill: ``answers.NoPrefill``).

Contract: scheduler thread, no lock. All ranks of one attention TP group call the same methods in
the same steps, and decide from the numbers of ``agree`` and from queues that are equal on them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: a Candidate, where it has its lease

import torch

from sglang.srt.disaggregation.delta import observability
from sglang.srt.disaggregation.delta.decode.request import (
    Stage,
    bootstrap_addr,
    is_fake,
    record_of,
)
from sglang.srt.disaggregation.delta.observability import (
    STATS,
    Computed,
    TakenLocally,
    Telemetry,
    now,
)
from sglang.srt.disaggregation.policy.choice import (
    Decision,
    choose,
    choose_without_prefill,
    prefill_only_reason,
    record_choice,
)
from sglang.srt.disaggregation.policy.chunks import Chunks, own_first_drafts
from sglang.srt.disaggregation.policy.memory import page_floor
from sglang.srt.disaggregation.policy.pace import Limits

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

#: Vote of a rank: the candidate's prefill server takes part in local turns.
_YIELDS = 0
#: Vote of a rank: it does not, as far as this rank knows. The smallest over the ranks counts.
_NEVER = -2


@dataclass(eq=False)
class Turn:
    """A turn that is computed locally. ``done``: prompt tokens with computed KV, a launched
    chunk included."""

    req: Req
    done: int

    @property
    def left(self) -> int:
        """Tokens that are in no chunk yet."""
        return len(self.req.origin_input_ids) - self.done

    @property
    def has_begun(self) -> bool:
        """True if a chunk with some of its tokens was launched."""
        return bool(self.done > self.req.cache_protected_len)


class LocalTurns(Chunks):
    """The local turns of one decode rank."""

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
        """``batch``: number of running requests, of requests from prefill that wait to join them,
        and of requests that may run at most; ``peer_yields``: True if the prefill server at an
        address leaves a request to decode; ``adapters_fit``: True if LoRA adapters have room
        together; ``blocking``: see ``StepTimes``."""
        super().__init__(limits, telemetry, clock, blocking=blocking)
        self._batch, self._peer_yields, self._adapters_fit = batch, peer_yields, adapters_fit
        #: Admitted, in order; the first may have been computed in part.
        self.queue: list[Turn] = []
        #: Launched chunks without a processed result: the batch and its turns.
        self.launched: deque[tuple[ScheduleBatch, list[Turn]]] = deque()
        #: Computed batches; their requests have a first token and wait for a place.
        self.computed: list[ScheduleBatch] = []
        self._yields: Sequence[int] = ()

    @property
    def is_busy(self) -> bool:
        """True if a request is between its admission and the running batch."""
        return bool(self.queue or self.launched or self.computed)

    @property
    def requests(self) -> list[Req]:
        """Requests that hold pages here and are in no running batch."""
        launched = (turn for _, turns in self.launched for turn in turns)
        found = {id(turn.req): turn.req for turn in (*launched, *self.queue)}
        computed = [req for batch in self.computed for req in batch.reqs if not req.finished()]
        return [*found.values(), *computed]

    # ---- the choice ----

    def votes(self, candidates: Sequence[Any]) -> list[int]:
        """Return this rank's times, and a vote on the prefill server of each candidate."""
        votes = self.measured.votes()
        for candidate in candidates:
            asks = candidate.lease is not None and not (candidate.resumes or candidate.is_alone)
            yields = not asks or self._peer_yields(bootstrap_addr(candidate.req))
            votes.append(_YIELDS if yields else _NEVER)
        return votes

    def agree(self, votes: Sequence[int]) -> None:
        """Take over the numbers of this step that the ranks agreed on."""
        self._yields = self.take_over(votes)

    def decide(self, candidate: Any, at: int) -> Decision:
        """Return the server that computes candidate number ``at`` of this step, which has its
        agreed lease."""
        tokens = candidate.length - self.prefix_here(candidate)
        if candidate.is_alone:
            return choose_without_prefill(tokens, self.limits, candidate.entry.kv_receiver.reason)
        reason: str | None = "not_shared"
        if candidate.shares:
            is_stock = self._yields[at] == _NEVER
            reason = "peer" if is_stock else prefill_only_reason(candidate.req)
        if reason is not None:
            return Decision(False, reason, tokens)
        _, waiting, _ = self._batch()
        # Earlier turns, and requests from prefill, take their places first.
        ahead = sum(not turn.has_begun for turn in self.queue)
        is_full = self.free_places <= ahead + waiting
        fits = self.fits(sum(turn.left for turn in self.queue) + tokens)
        return choose(tokens, self.limits, is_full=is_full, fits=fits)

    def prefix_here(self, candidate: Any) -> int:
        """Return the length of the prefix that a local turn uses: at least one token is left to
        compute."""
        most = page_floor(candidate.length - 1, self.limits.page)
        return min(int(candidate.lease.length), most)

    def may_save(self, req: Req) -> bool:
        """Return True if fallback prefill may compute ``req`` when its prefill server is lost."""
        is_on = self.limits.when_lost > 0
        return is_on and not is_fake(req) and prefill_only_reason(req) is None

    def take(self, entry: DecodeRequest, decision: Decision) -> None:
        """Queue ``entry``, which has its row and pages, and notify prefill."""
        req = entry.req
        entry.kv_receiver.yield_room()
        entry.kv_receiver.clear()
        req.time_stats.set_decode_transfer_queue_entry_time()
        req.time_stats.set_wait_queue_entry_time()
        STATS.count("decode_prefix_prompt_tokens", len(req.origin_input_ids))
        STATS.count("decode_prefix_hit_tokens", req.cache_protected_len)
        self.queue.append(Turn(req, req.cache_protected_len))
        self.placed(req, decision)
        observability.record(
            "decode",
            lambda: TakenLocally(
                at=now(),
                room=req.bootstrap_room,
                rid=str(req.rid),
                prompt_tokens=len(req.origin_input_ids),
                prefix_tokens=req.cache_protected_len,
                reason=decision.reason,
            ),
        )

    def placed(self, req: Req, decision: Decision) -> None:
        """Count ``req``, which was taken here or announced to prefill."""
        record_choice(self.telemetry, req, decision)

    # ---- chunks ----

    def next_turns(self) -> list[Turn]:
        """Return the first queued turns that fit into the next chunk, the last one perhaps in part;
        none if no chunk may run now.

        Sets the ``fill_ids`` of each, up to which the chunk computes it.
        """
        first = self.queue[0]
        tokens = self.next_chunk(first.left)
        # A turn that was aborted in a launched chunk is removed with the result of that chunk.
        if not tokens or first.req.to_finish is not None:
            return []
        page, chosen = self.limits.page, list[Turn]()
        for turn in self.queue[: max(self.free_places + first.has_begun, 0)]:
            if not self._adapters_fit({t.req.lora_id for t in (*chosen, turn)}):
                break
            prompt = turn.req.origin_input_ids
            end = len(prompt)
            if turn.left > tokens:
                end = page_floor(turn.done + tokens, page)
            if end <= turn.done:
                break
            turn.req.fill_ids = prompt[:end]
            tokens -= end - turn.done
            chosen.append(turn)
            if tokens <= 0 or end < len(prompt):
                break
        return chosen

    def launch(self, turns: list[Turn], batch: ScheduleBatch) -> None:
        """Note that ``batch`` with the next ``turns`` is about to run."""
        self.queue = self.queue[len(turns) - (batch.chunked_req is not None) :]
        self.launched.append((batch, turns))
        self.chunk_launched(batch.extend_num_tokens)

    @property
    def beside(self) -> int:
        """Running requests, requests from prefill that have a place, and one for all on other
        data-parallel ranks."""
        running, waiting, _ = self._batch()
        return running + min(waiting, self.places_for_others) + self.others_run

    @property
    def delays(self) -> bool:
        """See ``Chunks``."""
        ends = any(not turn.left for _, turns in self.launched for turn in turns)
        return bool(self.beside or self.computed or ends)

    @property
    def free_places(self) -> int:
        """Number of further requests that may run. A turn has a place from its first chunk on."""
        running, _, most = self._batch()
        turns = {id(turn) for _, turns in self.launched for turn in turns}
        turns |= {id(turn) for turn in self.queue[:1] if turn.has_begun}
        return most - len(turns) - running - sum(len(batch.reqs) for batch in self.computed)

    @property
    def places_for_others(self) -> int:
        """Number of requests from prefill that may join the running batch now; 0 while computed
        turns wait for room for their adapters, because later requests would take that room."""
        return 0 if self.computed else max(self.free_places, 0)

    def before_result(self) -> None:
        """Prepare the turns that end with the oldest chunk, whose result is processed next: their
        KV is committed, so that the tree may share it."""
        for turn in self.launched[0][1]:
            if not turn.req.is_chunked:
                req = turn.req
                record_of(req).enter(Stage.COMMITTED)
                _log_computed(req)
                stats = req.time_stats
                if stats.trace_ctx.tracing_enable:
                    # Otherwise SGLang would end the trace slice that it opened at the turn's first
                    # chunk under another name, with a warning.
                    stats.prefill_finished_time = time.perf_counter()

    def after_result(self) -> None:
        """Queue the turns that ended with the processed chunk for a place in the running batch."""
        batch, turns = self.launched.popleft()
        if batch.spec_info is not None:
            # Otherwise SGLang filters the future map's entries and not this batch's own.
            batch.spec_info.future_indices = None
        batch.filter_batch(chunked_req_to_exclude=batch.chunked_req)
        done = [turn.req for turn in turns if turn.req is not batch.chunked_req]
        for req in done:
            req.time_stats.decode_prebuilt_finish_time = time.perf_counter()
        if not batch.is_empty():
            tokens = [req.output_ids[-1] for req in batch.reqs]
            batch.output_ids = torch.tensor(tokens, dtype=torch.int64, device=batch.device)
            if batch.spec_info is not None:
                own_first_drafts(batch)
            self.computed.append(batch)


def _log_computed(req: Req) -> None:
    room, rid = req.bootstrap_room, str(req.rid)
    observability.record("decode", lambda: Computed(at=now(), room=room, rid=rid))
