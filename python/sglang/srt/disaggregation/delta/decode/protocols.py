"""What the decode side uses of SGLang's objects, for the type checker and the reader.

SGLang itself is ``Any`` to mypy, and our mixins inherit what they do not name from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol  # Any: why is said at each

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import BaseFinishReason, MultimodalInputs
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
    from sglang.srt.sampling.sampling_params import SamplingParams


class TreeNode(Protocol):
    """A node of the radix tree."""

    id: int
    key: RadixKey  # token ids with their extra_key
    #: Slots of the key's tokens (1-D int64).
    value: torch.Tensor
    #: None for the root alone; of our own walks each stops there.
    parent: Any  # a TreeNode; "or None" would have to be asserted in every walk
    children: dict[Any, TreeNode]  # by the key's first page, in SGLang's form
    lock_ref: int


class Req(Protocol):
    """A request, ``managers.schedule_batch.Req``: from its arrival until its last token is sent."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int]
    extra_key: str | None
    lora_id: str | None
    bootstrap_host: str | None
    bootstrap_port: int
    bootstrap_room: int | None
    input_embeds: Any  # a tensor or nested lists; only whether there are any is asked
    multimodal_inputs: MultimodalInputs | None  # with the images that a model's own code has placed
    sampling_params: SamplingParams
    time_stats: SchedulerReqTimeStats
    #: Set when it has ended; one of SGLang's FINISH classes.
    finished_reason: BaseFinishReason | None
    return_logprob: bool
    is_retracted: bool
    #: Its row in the request-to-slot table.
    req_pool_idx: int
    fill_ids: list[int]
    #: Tokens that its row has slots for, and those of them whose KV is there.
    kv_allocated_len: int
    kv_committed_len: int
    #: Leading tokens whose slots belong to the tree, and the node that it locks for them.
    cache_protected_len: int
    last_node: TreeNode
    last_host_node: TreeNode
    prefix_indices: torch.Tensor
    #: A retracted request's KV: a list a layer of chunks.
    kv_cache_cpu: list[list[Any]]
    #: With speculation, what its first draft starts from: chosen tokens with their probabilities,
    #: and the target's hidden state.
    output_topk_p: torch.Tensor
    output_topk_index: torch.Tensor
    hidden_states_tensor: torch.Tensor
    #: ``record.DecodeRecord``; read through ``record.record_of``.
    delta: Any

    def set_extend_input_len(self, length: int) -> None:
        """How many tokens its next batch computes."""

    def pop_committed_kv_cache(self) -> int:
        """How many tokens have KV; asked once, when the request gives its slots back."""


class QueueEntry(Protocol):
    """``disaggregation.decode.DecodeRequest``: a request in the prealloc or transfer queue."""

    req: Req
    kv_receiver: Any  # a DeltaReceiver, or SGLang's of a warm-up request, which has fewer methods
    #: The handshake is done on all ranks.
    waiting_for_input: bool
    metadata_buffer_index: int


class SlotAllocator(Protocol):
    """Metadata slots."""

    def alloc(self) -> int | None:
        """A free slot, or None."""

    def free(self, index: int) -> None:
        """Give one back."""

    def available_size(self) -> int:
        """How many are free."""


class MetadataBuffers(Protocol):
    """Where prefill writes the first token, by metadata slot."""

    #: [slot, 0]: the room whose metadata these are.
    bootstrap_room: torch.Tensor


class PageAllocator(Protocol):
    """Slots of the KV pool, in whole pages."""

    page_size: int
    device: str

    def alloc(self, tokens: int) -> torch.Tensor | None:
        """So many slots (1-D int64), or None."""

    def available_size(self) -> int:
        """Free tokens."""

    def get_kvcache(self) -> KVCache:
        """The pool itself, of one of SGLang's many kinds."""

    def load_cpu_copy(self, copy: list[list[Any]], slots: torch.Tensor) -> None:
        """Copy KV back from the CPU."""


class Rows(Protocol):
    """The request-to-slot table."""

    req_to_token: torch.Tensor

    def alloc(self, reqs: Sequence[Req]) -> list[int] | None:
        """A row for each request, or None."""

    def write(self, where: Any, slots: torch.Tensor) -> None:
        """``where``: row and slice."""

    def available_size(self) -> int:
        """Free rows."""
