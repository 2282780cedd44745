"""What a decode server notes of one request: one record, ``req.delta``, and who may share its KV.

SGLang's queues hold a ``DecodeRequest`` until a request runs, and then the bare ``Req``. The record
hangs on the ``Req``, which lives as long as the request; nothing else is set on SGLang's objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: a chunk of KV, a tensor or a pair

if TYPE_CHECKING:
    import torch

    from sglang.srt.disaggregation.delta.decode.turn_choice import Placed
    from sglang.srt.managers.schedule_batch import MultimodalDataItem, Req

#: Of a prefix in front of arriving KV, about so many tokens are compared.
SAMPLED = 1024


@dataclass(frozen=True, eq=False)
class ArrivingPrefix:
    """KV that is on its way to this server: ``window`` tokens of ``token_ids`` behind ``start``."""

    #: The prefill server; a local turn's too.
    prefill: str
    extra_key: str | None
    token_ids: Sequence[int]
    start: int
    window: int

    def is_shared_by(self, prefill: str, req: Req) -> bool:
        """Whether the tree will have these tokens of ``req``, as far as a sample of them says.

        A whole comparison of 100,000 tokens costs more than a millisecond for each request. A wrong
        answer costs a wait until this KV has arrived, and no correctness: the request is matched
        before it is admitted.
        """
        start, end = self.start, self.start + self.window
        own, other = self.token_ids, req.origin_input_ids
        if len(other) < end or other[start] != own[start] or other[end - 1] != own[end - 1]:
            return False
        if (prefill, req.extra_key) != (self.prefill, self.extra_key):
            return False
        stride = max(start // SAMPLED, 1)
        return own[start:end] == other[start:end] and own[:start:stride] == other[:start:stride]


#: In the order in which the requests that bring them were admitted, as on every rank.
ArrivingPrefixes = dict[ArrivingPrefix, None]


class Refusal(NamedTuple):
    """Why a request was not admitted: one of ``waiting.REASONS``."""

    reason: str
    #: Tokens that it needs, where tokens were counted.
    cost: int | None = None
    #: The KV that it waits for, where that is arriving for another request.
    prefix: ArrivingPrefix | None = None


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
    #: When it first had to wait for another request's prefix.
    prefix_since: float | None = None
    #: It has waited for prefixes as long as it may, on some rank.
    prefix_timed_out: bool = False
    #: The log said that it waits.
    logged: bool = False

    @property
    def is_blocked(self) -> bool:
        """Whether memory was short for it when it was last attempted: nobody behind it is
        admitted."""
        return self.refusal is not None and self.refusal.prefix is None


@dataclass(slots=True)
class DecodeRecord:
    """``req.delta``, in the order of a request's life."""

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
    #: It has no prefill server any more, and is computed locally or nowhere (``without_prefill``).
    is_alone: bool = False
    wait: Wait = field(default_factory=Wait)
    #: The reasons that it was counted for in the metric of refusals.
    refused_for: set[str] = field(default_factory=set)
    #: The KV that its transfer, or its turn here, brings, where others wait for it.
    arriving: ArrivingPrefix | None = None
    #: Tokens of the prefix that the tree held when it was admitted.
    hit_tokens: int = 0
    #: Where its new tokens are computed, until its first one is there.
    turn: Placed | None = None
    #: KV and metadata are here: on this rank prefill has nothing left to write.
    arrived: bool = False
    #: When its KV was here without its metadata (``time.monotonic``).
    without_metadata_since: float | None = None
    #: Why its transfer failed, where decode itself found that out.
    failure: str | None = None
    #: All KV of the prompt arrived, on all ranks.
    committed: bool = False
    #: With a draft model, keys of its text that the tree may lack (``speculation.key_pairs``).
    pairs: list[tuple[int, int]] = field(default_factory=list)
    #: While it is retracted: the draft model's KV, in the form of ``Req.kv_cache_cpu``.
    draft_copy: Any = None
    #: Likewise the index of sparse attention, in the form of ``sparse_index.copy_index``.
    index_copy: list[torch.Tensor] | None = None
    #: Slots that were its own when it last gave them back (1-D int64), those ahead of its text too.
    slots_at_end: torch.Tensor | None = None

    def drop_copies(self) -> None:
        """It is not retracted any more."""
        self.draft_copy = self.index_copy = None


def record_of(req: Req) -> DecodeRecord:
    """The record of ``req``; made when it is first asked for."""
    record: DecodeRecord
    try:
        record = req.delta  # the most frequent line of a step: no getattr
    except AttributeError:
        record = req.delta = DecodeRecord()
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


def may_insert(req: Req) -> bool:
    """Whether the request's KV may enter the tree: opt-in, only after a committed transfer."""
    return may_match(req) and record_of(req).committed
