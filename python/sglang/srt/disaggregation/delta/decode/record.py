"""What a decode server notes of one request: its stage, why it waits, and who may share its KV.

SGLang's queues hold a ``DecodeRequest`` until a request runs, and then the bare ``Req``. The record
hangs on the ``Req`` (``req.delta``), which lives as long as the request; nothing else is set on
SGLang's objects.
"""

from __future__ import annotations

import copy
import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: a chunk of KV, a tensor or a pair; a Req

import torch

from sglang.srt.disaggregation.delta.pages import load_state

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import MultimodalDataItem, Req
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool

logger = logging.getLogger(__name__)
#: Why a request is refused, as text.
REASONS = {
    "no_tokens": "not enough free KV tokens",
    "cannot_finish": "its admission could leave a running request without memory for its output",
    "no_request_row": "no free request row",
    "no_state_slot": "no free slot for its recurrent state (--max-mamba-cache-size)",
    "no_metadata_slot": "no free metadata slot",
}


class Stage(enum.Enum):
    """How far a request is on a decode server. ``NEXT`` has every step between them."""

    #: Its prefill server is being queried.
    HANDSHAKE = "handshake"
    #: It waits for memory, and owns nothing.
    IN_LINE = "in line"
    #: It owns pages and was announced: prefill may write to them.
    TRANSFER = "in transfer"
    #: It owns pages, and this server computes it.
    LOCAL = "in local prefill"
    #: All KV of its text is here, on all ranks; it waits for a slot of the running batch.
    COMMITTED = "committed"
    RUNNING = "running"
    #: Its KV is on the CPU, and it waits for memory once more.
    RETRACTED = "retracted"
    #: Its client was answered, or it starts over without prefill; prefill may still write.
    DEFERRED = "deferred release"
    #: It owns nothing, and its client was answered.
    ENDED = "ended"


#: Every step that there is. A client may leave at any stage: in transfer that defers the release.
#:
#:     HANDSHAKE <-> IN_LINE -> TRANSFER -> COMMITTED -> RUNNING -> ENDED
#:                      |  ^        |  |      ^  ^          |
#:                      |  +- fails +  |      |  |          v
#:                      +---> LOCAL ----------+  +----- RETRACTED
#:                                     v
#:                                  DEFERRED -> ENDED
NEXT: dict[Stage, set[Stage]] = {
    Stage.HANDSHAKE: {Stage.IN_LINE, Stage.ENDED},
    # Back: it is too long to be computed locally, and its prefill server is still being queried.
    # In line still: its prefill server is lost, and it waits to be computed locally.
    Stage.IN_LINE: {Stage.IN_LINE, Stage.HANDSHAKE, Stage.TRANSFER, Stage.LOCAL, Stage.ENDED},
    # Back: what it owned stays with a stand-in (``remains``), which is deferred.
    Stage.TRANSFER: {Stage.COMMITTED, Stage.IN_LINE, Stage.DEFERRED, Stage.ENDED},
    Stage.LOCAL: {Stage.COMMITTED, Stage.ENDED},
    Stage.COMMITTED: {Stage.RUNNING, Stage.ENDED},
    Stage.RUNNING: {Stage.RETRACTED, Stage.ENDED},
    Stage.RETRACTED: {Stage.COMMITTED, Stage.ENDED},
    Stage.DEFERRED: {Stage.ENDED},
    Stage.ENDED: set(),
}


class Refusal(NamedTuple):
    """Why a request was not admitted: one of ``REASONS``."""

    reason: str
    #: Tokens that it needs, where tokens were counted.
    cost: int | None = None


@dataclass(slots=True)
class Wait:
    """One wait for decode memory, after the handshake or after a retraction.

    It begins when the handshake is done (``Handshakes``) or with the retraction; why it lasts is
    written by the prealloc queue alone. Timeouts, log lines and the metrics of refusals read it.
    Times are seconds of the queue's clock.
    """

    #: None while the request is not in line.
    since: float | None = None
    #: Why it was not admitted when it was last attempted; None if it never was.
    refusal: Refusal | None = None
    #: The log said that it waits.
    logged: bool = False


@dataclass(slots=True)
class Record:
    """``req.delta``, in the order of a request's life."""

    stage: Stage = Stage.HANDSHAKE
    #: ``DecodeRadixTree.generation`` when it arrived.
    generation: int = 0
    #: Whether token ids say all about its images; None until somebody asked.
    content_in_ids: bool | None = None
    #: When its handshake was first advanced, and what prefill has not answered yet.
    handshake_since: float | None = None
    handshake_lacks: str = "its server info"
    #: This rank could not reach its prefill server; and whether it was attempted here because of
    #: that.
    unreachable: bool = False
    tried_here: bool = False
    #: It has no prefill server any more, and is computed locally or nowhere.
    is_alone: bool = False
    wait: Wait = field(default_factory=Wait)
    #: The reasons that it was counted for in the metric of refusals.
    refused_for: set[str] = field(default_factory=set)
    #: Tokens of the prefix that the tree held when it was admitted.
    hit_tokens: int = 0
    #: KV and metadata are here: on this rank prefill has nothing left to write.
    arrived: bool = False
    #: When its KV was here without its metadata (``time.monotonic``).
    without_metadata_since: float | None = None
    #: Why its transfer failed, where decode itself found that out.
    failure: str | None = None
    #: With a draft model, keys of its text that the tree may lack (``prefix_tree.key_pairs``).
    pairs: list[tuple[int, int]] = field(default_factory=list)
    #: While it is retracted: the draft model's KV, in the form of ``Req.kv_cache_cpu``.
    draft_copy: Any = None
    #: Likewise its index or recurrent state, in the form of ``pages.copy_state``.
    state_copy: list[torch.Tensor] | None = None
    #: Slots that were its own when it last gave them back (1-D int64), those ahead of its text too.
    slots_at_end: torch.Tensor | None = None

    def enter(self, stage: Stage) -> None:
        """The request is at ``stage`` from now on. A step that ``NEXT`` does not have is a bug:
        it is logged, and does not end the scheduler."""
        if stage not in NEXT[self.stage]:
            logger.error("a request went from %s to %s, which is not a step", self.stage, stage)
        self.stage = stage

    def drop_copies(self) -> None:
        """It is not retracted any more."""
        self.draft_copy = self.state_copy = None


def record_of(req: Req) -> Record:
    """The record of ``req``; made when it is first asked for."""
    try:
        return req.delta  # the most frequent line of a step: no getattr
    except AttributeError:
        record = req.delta = Record()
        return record


# ---- who may share ----


def is_fake(req: Req) -> bool:
    """A warm-up or health request: no KV ever arrives, its slots hold garbage.

    They really collide with prompts: warm-up uses the ids 10 to 13, health uses 0.
    """
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    return bool(req.bootstrap_host == FAKE_BOOTSTRAP_HOST or req.bootstrap_host is None)


def may_match(req: Req) -> bool:
    """Whether token ids (with ``extra_key``) say all about the KV of the prompt.

    The ids of embeddings are placeholders. Those of images, audio and video are hashes of their
    content, which SGLang puts in before a request is queued.
    """
    if is_fake(req) or req.input_embeds is not None:
        return False
    record = record_of(req)
    if record.content_in_ids is None:
        # Does each image's hash stand where the image does? A model may leave placeholders as is.
        # Decided when the request is first looked at: SGLang drops the images of one that has
        # ended.
        items = req.multimodal_inputs.mm_items if req.multimodal_inputs is not None else ()
        record.content_in_ids = all(_is_padded(req.origin_input_ids, item) for item in items)
    return record.content_in_ids


def _is_padded(token_ids: Sequence[int], item: MultimodalDataItem) -> bool:
    if not item.offsets:  # some models say only how many tokens an image has
        return item.pad_value in token_ids
    return all(list(token_ids[at : at + 1]) == [item.pad_value] for at, _ in item.offsets)


def bootstrap_addr(req: Req) -> str:
    """The prefill server of a request, as "host:port"."""
    return _address(req.bootstrap_host or "", req.bootstrap_port)


@lru_cache(maxsize=1024)  # parsing costs more than the rest of an admission step
def _address(host: str, port: int) -> str:
    from sglang.srt.utils.network import NetworkAddress

    return NetworkAddress(host, port).to_host_port_str()


# ---- the copy of a retracted request's KV on the CPU ----


def without_leading(
    copy: list[list[Any]], chunk: int, skip: int
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Split a CPU copy of KV at ``skip`` tokens.

    SGLang keeps the copy as one list a layer of chunks of ``chunk`` tokens; a chunk is a tensor
    (MLA) or a [key, value] pair (MHA), tokens first. Returns the rest of the chunk that ``skip``
    falls into, and the whole chunks after it, each in the same form.
    """
    whole, part = divmod(skip, chunk)
    if part == 0:
        return [[] for _ in copy], [layer[whole:] for layer in copy]

    def tail(layer: list[Any]) -> list[Any]:
        if whole >= len(layer):
            return []
        both = layer[whole]
        return [both[part:] if isinstance(both, torch.Tensor) else [one[part:] for one in both]]

    return [tail(layer) for layer in copy], [layer[whole + 1 :] for layer in copy]


def restore_private(
    req: Req,
    slots: torch.Tensor,
    allocator: BaseTokenToKVPoolAllocator,
    rows: ReqToTokenPool,
    draft_pool: KVCache | None = None,
) -> None:
    """Copy what is not shared from the request's CPU copy to ``slots``, and drop the copy; with a
    draft model also its KV, which has the same slots, and for a model with state also the state.

    Shared pages are never written: other requests read them, and their content is the same.
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


def load_private(
    copy: list[list[Any]],
    chunk: int,
    shared: int,
    slots: torch.Tensor,
    load: Callable[[list[list[Any]], torch.Tensor], None],
) -> None:
    """Call ``load`` with what is behind ``shared`` tokens, and the slots for it."""
    head, rest = without_leading(copy, chunk, shared)
    at = min(len(slots), -shared % chunk)
    if at:
        load(head, slots[:at])
    if at < len(slots):
        load(rest, slots[at:])


# ---- a transfer that failed, whose request is computed locally (``answers.NoPrefill``) ----


def remains(req: Any) -> Req:
    """A request that owns what ``req`` has owned for its transfer: row, pages and lock.

    ``req`` owns nothing afterwards, like one that was never admitted. The stand-in has ended, and
    its client was answered.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    left: Req = copy.copy(req)
    record = record_of(req)
    left.output_ids, left.finished_reason = [], FINISH_ABORT()
    left.delta = Record(Stage.TRANSFER, record.generation)
    stained, count = req.retracted_stain, req.retraction_count
    req.reset_for_retract()  # it is no retraction, and gives nothing back
    req.is_retracted, req.retracted_stain, req.retraction_count = False, stained, count
    req.req_pool_idx, req.cache_protected_len = None, 0
    record.without_metadata_since = record.failure = None
    record.arrived = False
    return left
