"""The record of one request on a decode server: its stage, its explanation, what it may share.

SGLang's queues hold a ``DecodeRequest`` until a request runs, and then the bare ``Req``. The record
is an attribute of the ``Req`` (``req.delta``), which lives as long as the request; nothing else is
set on SGLang's objects.

Contract: the scheduler's thread only. Stages are the same on all ranks; ``arrived``, ``failure``,
``unreachable`` and times are this rank's, and are used in votes only.
"""

from __future__ import annotations

import copy
import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple  # Any: a chunk of KV; a Req

import torch

from sglang.srt.disaggregation.delta.pages import load_private, load_state

if TYPE_CHECKING:
    from sglang.srt.disaggregation.policy.choice import Decision
    from sglang.srt.managers.schedule_batch import MultimodalDataItem, Req
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool

logger = logging.getLogger(__name__)


class Stage(enum.Enum):
    """Stage of a request on a decode server. ``NEXT`` has every transition."""

    #: The prefill server is being queried.
    HANDSHAKE = "handshake"
    #: Waits for memory and owns nothing.
    IN_LINE = "in line"
    #: Owns pages that were announced: prefill may write to them.
    TRANSFER = "in transfer"
    #: Owns pages and is computed by this server.
    LOCAL = "in local prefill"
    #: All KV of its text is here, on all ranks; it waits for a slot of the running batch.
    COMMITTED = "committed"
    RUNNING = "running"
    #: Has its KV on the CPU and waits for memory again.
    RETRACTED = "retracted"
    #: The client was answered, or the request starts over without prefill; prefill may still write.
    DEFERRED = "deferred release"
    #: Owns nothing, and the client was answered.
    ENDED = "ended"


#: All transitions. A client may leave at any stage; in transfer, that defers the release.
#:
#:     HANDSHAKE <-> IN_LINE -> TRANSFER -> COMMITTED -> RUNNING -> ENDED
#:                      |  ^        |  |      ^  ^          |
#:                      |  +- fails +  |      |  |          v
#:                      +---> LOCAL ----------+  +----- RETRACTED
#:                                     v
#:                                  DEFERRED -> ENDED
NEXT: dict[Stage, set[Stage]] = {
    Stage.HANDSHAKE: {Stage.IN_LINE, Stage.ENDED},
    # Back to HANDSHAKE: too long for local prefill while its prefill server is still being queried.
    # IN_LINE again: its prefill server is lost, and it waits to be computed locally.
    Stage.IN_LINE: {Stage.IN_LINE, Stage.HANDSHAKE, Stage.TRANSFER, Stage.LOCAL, Stage.ENDED},
    # Back to IN_LINE: its pages stay with a stand-in (``remains``), which is deferred.
    Stage.TRANSFER: {Stage.COMMITTED, Stage.IN_LINE, Stage.DEFERRED, Stage.ENDED},
    Stage.LOCAL: {Stage.COMMITTED, Stage.ENDED},
    Stage.COMMITTED: {Stage.RUNNING, Stage.ENDED},
    Stage.RUNNING: {Stage.RETRACTED, Stage.ENDED},
    Stage.RETRACTED: {Stage.COMMITTED, Stage.ENDED},
    Stage.DEFERRED: {Stage.ENDED},
    Stage.ENDED: set(),
}


class QueueState(enum.IntEnum):
    """State of a request without pages in the vote of a step; the smallest of the ranks counts."""

    FAILED = 0
    #: Has waited for memory longer than ``SGLANG_DISAGGREGATION_DECODE_ADMISSION_TIMEOUT``.
    EXPIRED = 1
    WAITING = 2


class Refusal(NamedTuple):
    """Why a request was not admitted."""

    #: A key of ``metrics.REFUSALS``.
    reason: str
    #: Tokens that it needs, if tokens were counted.
    cost: int | None = None


@dataclass(slots=True)
class Wait:
    """One wait for decode memory, after the handshake or after a retraction.

    Read by timeouts, log lines and the metrics of refusals. Times are seconds of the queue's clock.
    """

    #: When it began; None while the request is not queued.
    since: float | None = None
    #: Why the last admission was refused; None if none was attempted.
    refusal: Refusal | None = None
    #: True once a warning about the wait was logged.
    logged: bool = False


#: Stage -> name of the time that a request spent in it. SGLang's spans have the other stages.
WAITS = {
    Stage.HANDSHAKE: "handshake",
    Stage.IN_LINE: "memory",
    Stage.TRANSFER: "transfer",
    Stage.LOCAL: "local_prefill",
    Stage.COMMITTED: "start",
    Stage.RETRACTED: "retracted",
}


@dataclass(slots=True)
class Explanation:
    """Why a request was computed where it was, what it hit and moved, and how long it waited.

    It leaves as numbers and texts in ``cached_tokens_details``, a part of an answer's ``meta_info``
    (SGLang 0.5.23 accepts no other types there), in the event log, and on spans.
    """

    #: SGLang's times of the request, which have its trace; None in a test.
    time_stats: Any = None
    #: Side that computes the new tokens ("local", "remote"); empty until the request is admitted.
    where: str = ""
    #: Why that side; empty on a server without local turns.
    reason: str = ""
    prompt_tokens: int = 0
    #: Tokens of the prompt that were in the tree at admission.
    hit_tokens: int = 0
    #: Bytes of KV and state that this rank requested from prefill.
    requested_bytes: int = 0
    #: Reasons of refused admissions. Each is counted once in the metric.
    refused_for: set[str] = field(default_factory=set)
    #: When the request entered its stage, on SGLang's clock of spans.
    since: float = field(default_factory=lambda: Explanation.clock())
    #: Seconds in the stages that it has left, by the names in ``WAITS``.
    seconds: dict[str, float] = field(default_factory=dict)

    clock: ClassVar[Callable[[], float]] = time.perf_counter

    def placed(self, prompt_tokens: int, hit_tokens: int, decision: Decision | None) -> None:
        """Note the admission. ``decision``: None on a server without local turns."""
        self.prompt_tokens, self.hit_tokens, self.requested_bytes = prompt_tokens, hit_tokens, 0
        self.where, self.reason = "remote", ""
        if decision is not None:
            self.where, self.reason = decision.where, decision.reason

    def left(self, stage: Stage) -> None:
        """Note the end of a stage, and add a span if SGLang traces the request."""
        now, since = Explanation.clock(), self.since
        self.since = now
        if (wait := WAITS.get(stage)) is None:
            return
        self.seconds[wait] = self.seconds.get(wait, 0.0) + now - since
        if self.time_stats is not None and self.time_stats.trace_ctx.tracing_enable:
            from sglang.srt.observability.req_time_stats import RequestStageConfig

            span = RequestStageConfig(f"disagg_{wait}", level=1)
            self.time_stats.trace_slice(span, since, now, self._choice())

    def values(self) -> dict[str, int | str]:
        """Return the explanation as it is now."""
        waits = {f"{wait}_ms": round(1e3 * spent) for wait, spent in self.seconds.items()}
        return {**self._choice(), **waits}

    def _choice(self) -> dict[str, int | str]:
        values: dict[str, int | str] = {}
        if self.where:
            new_tokens = self.prompt_tokens - self.hit_tokens
            local_tokens = new_tokens if self.where == "local" else 0
            values = {
                "turn": self.where,
                "decode_hit_tokens": self.hit_tokens,
                "local_tokens": local_tokens,
                "requested_tokens": new_tokens - local_tokens,
                "requested_bytes": self.requested_bytes,
            }
        if self.reason:
            values["turn_reason"] = self.reason
        if self.refused_for:
            values["refused_for"] = ",".join(sorted(self.refused_for))
        return values


@dataclass(slots=True)
class Record:
    """``req.delta``, in the order of a request's life."""

    stage: Stage = Stage.HANDSHAKE
    #: ``DecodeRadixTree.generation`` when it arrived.
    generation: int = 0
    #: True if token ids identify the content of its images; None until computed.
    content_in_ids: bool | None = None
    #: When its handshake was first advanced, and the answer of prefill that is missing.
    handshake_since: float | None = None
    handshake_lacks: str = "its server info"
    #: True if this rank could not reach its prefill server.
    unreachable: bool = False
    #: True once it was attempted without the unreachable server.
    tried_here: bool = False
    #: True once it has no prefill server: it is computed locally or fails.
    is_alone: bool = False
    wait: Wait = field(default_factory=Wait)
    #: Where it was computed and why, its hit, and its waits.
    explanation: Explanation = field(default_factory=Explanation)
    #: True if KV and metadata are here: prefill has nothing left to write on this rank.
    arrived: bool = False
    #: When its KV was here without its metadata (``time.monotonic``).
    without_metadata_since: float | None = None
    #: Why its transfer failed, if decode found that out.
    failure: str | None = None
    #: Keys of its text that the tree may lack, with a draft model (``tree.key_pairs``).
    pairs: list[tuple[int, int]] = field(default_factory=list)
    #: While it is retracted, the draft model's KV in the form of ``Req.kv_cache_cpu``.
    draft_copy: Any = None
    #: While it is retracted, its index or recurrent state in the form of ``pages.copy_state``.
    state_copy: list[torch.Tensor] | None = None
    #: Private slots at its last release (1-D int64), including speculative slots beyond its text.
    slots_at_end: torch.Tensor | None = None
    #: Names it in log lines.
    rid: str = ""

    def enter(self, stage: Stage) -> None:
        """Set the stage. A transition that ``NEXT`` lacks is a bug: it is logged and does not end
        the scheduler."""
        if stage not in NEXT[self.stage]:
            logger.error(
                "request %s: invalid stage transition %s -> %s (bug; please report)",
                self.rid,
                self.stage,
                stage,
            )
        self.explanation.left(self.stage)
        self.stage = stage

    def drop_copies(self) -> None:
        """Drop the copies on the CPU, once the request is not retracted any more."""
        self.draft_copy = self.state_copy = None


def record_of(req: Req) -> Record:
    """Return the record of ``req``, which is made on the first call."""
    try:
        return req.delta  # the most frequent line of a step: no getattr
    except AttributeError:
        record = req.delta = Record(rid=str(getattr(req, "rid", "")))
        record.explanation.time_stats = getattr(req, "time_stats", None)
        return record


# ---- which requests may share ----


def is_fake(req: Req) -> bool:
    """True for a warm-up or health request: no KV ever arrives, and its slots hold garbage.

    Their token ids collide with those of real prompts: warm-up uses 10 to 13, health uses 0.
    """
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    return bool(req.bootstrap_host == FAKE_BOOTSTRAP_HOST or req.bootstrap_host is None)


def may_match(req: Req) -> bool:
    """True if token ids (with ``extra_key``) identify the KV of the prompt.

    The ids of embeddings are placeholders. Those of images, audio and video are hashes of their
    content, which SGLang sets before a request is queued.
    """
    if is_fake(req) or req.input_embeds is not None:
        return False
    record = record_of(req)
    if record.content_in_ids is None:
        # A model may leave placeholders as they are, so check that each hash stands where its image
        # does. Decided on the first call, because SGLang drops the images of an ended request.
        items = req.multimodal_inputs.mm_items if req.multimodal_inputs is not None else ()
        record.content_in_ids = all(_is_padded(req.origin_input_ids, item) for item in items)
    return record.content_in_ids


def _is_padded(token_ids: Sequence[int], item: MultimodalDataItem) -> bool:
    if not item.offsets:  # some models only give the number of tokens of an image
        return item.pad_value in token_ids
    return all(list(token_ids[start : start + 1]) == [item.pad_value] for start, _ in item.offsets)


def bootstrap_addr(req: Req) -> str:
    """Return the prefill server of a request, as "host:port"."""
    return _address(req.bootstrap_host or "", req.bootstrap_port)


@lru_cache(maxsize=1024)  # parsing costs more than the rest of an admission step
def _address(host: str, port: int) -> str:
    from sglang.srt.utils.network import NetworkAddress

    return NetworkAddress(host, port).to_host_port_str()


# ---- the copy of a retracted request's KV on the CPU ----


def restore_private(
    req: Req,
    slots: torch.Tensor,
    allocator: BaseTokenToKVPoolAllocator,
    rows: ReqToTokenPool,
    draft_pool: KVCache | None = None,
) -> None:
    """Copy the private part of the request's CPU copy to ``slots`` and drop the copy; with a draft
    model also its KV, which has the same slots, and for a model with state also the state.

    Shared pages are never written, because other requests read them; their content is the same.
    """
    pool, record, shared = allocator.get_kvcache(), record_of(req), req.cache_protected_len
    load_private(
        req.kv_cache_cpu, pool.cpu_offloading_chunk_size, shared, slots, allocator.load_cpu_copy
    )
    del req.kv_cache_cpu
    if draft_pool is not None:
        chunk = draft_pool.cpu_offloading_chunk_size
        load_private(record.draft_copy, chunk, shared, slots, draft_pool.load_cpu_copy)
    if record.state_copy is not None:
        load_state(pool, rows, req, record.state_copy, slots, shared)
    record.drop_copies()


# ---- a failed transfer, whose request is computed locally (``answers.NoPrefill``) ----


def remains(req: Any) -> Req:
    """Return a stand-in that owns what ``req`` owned for its transfer: row, pages and lock.

    ``req`` owns nothing afterwards, as if it was never admitted. The stand-in counts as ended and
    answered.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    stand_in: Req = copy.copy(req)
    record = record_of(req)
    stand_in.output_ids, stand_in.finished_reason = [], FINISH_ABORT()
    stand_in.delta = Record(Stage.TRANSFER, record.generation, rid=record.rid)
    stained, count = req.retracted_stain, req.retraction_count
    req.reset_for_retract()  # not a retraction, and releases nothing
    req.is_retracted, req.retracted_stain, req.retraction_count = False, stained, count
    req.req_pool_idx, req.cache_protected_len = None, 0
    record.without_metadata_since = record.failure = None
    record.arrived = False
    return stand_in
