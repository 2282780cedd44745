"""What this package uses of SGLang's classes, for the type checker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol  # Any: SGLang's, handed on; tokens or pairs

if TYPE_CHECKING:
    import torch

    from sglang.srt.managers.cache_controller import CacheOperation, HiCacheAck
    from sglang.srt.mem_cache.buffer_only.backup_queue import PendingBackup


class Key(Protocol):
    """``RadixKey``: tokens and their namespace."""

    token_ids: list[Any]  # integers, or pairs of them for a tree of bigrams
    extra_key: str | None

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice) -> Key: ...


class Node(Protocol):
    """``TreeNode``, with what ``backup_queue.StoredNode`` adds; only the root has no ``parent``."""

    parent: Node | None
    children: dict[Any, Node]
    key: Key
    value: torch.Tensor
    hash_value: list[str] | None
    priority: int
    hit_count: int
    last_access_time: float
    stored: int
    launched: int
    pending: PendingBackup | None
    touch_after_ms: int

    def __init__(self, *, priority: int = 0) -> None: ...

    @property
    def storage_ready(self) -> bool: ...


class Allocator(Protocol):
    """Of the device pool; sizes in tokens."""

    def available_size(self) -> int: ...

    def alloc(self, need_size: int) -> torch.Tensor | None: ...


class Tree(Protocol):
    """``HiRadixCache``."""

    root_node: Node
    evictable_size_: int
    #: Of ``tree.BufferOnlyTree``, as is ``room``.
    inserts: int
    token_to_kv_pool_allocator: Allocator
    prefetch_loaded_tokens_by_reqid: dict[str, int]
    get_child_key_fn: Callable[[Key], Any]

    def match_prefix(self, params: Any) -> Any: ...  # MatchPrefixParams, MatchResult

    def evict(self, params: Any) -> Any: ...  # EvictParams, EvictResult

    def inc_lock_ref(self, node: Node) -> Any: ...

    def dec_lock_ref(self, node: Node) -> Any: ...

    def room(self) -> int: ...

    def _match_prefix_helper(self, node: Node, key: Key) -> tuple[list[torch.Tensor], Node]: ...

    def _update_leaf_status(self, node: Node) -> None: ...

    def _record_store_event(self, node: Node) -> None: ...


class DevicePool(Protocol):
    """``KVCache``; ``size`` in tokens."""

    size: int
    layer_num: int
    dtype: torch.dtype

    def get_kv_size_bytes(self) -> int | tuple[int, int]: ...


class HostPool(Protocol):
    """``HostKVCache``; ``size`` in tokens, ``kv_buffer`` as its layout has it."""

    device_pool: DevicePool
    layout: str
    page_size: int
    page_num: int
    layer_num: int
    head_num: int
    size: int
    size_per_token: int
    kv_buffer: torch.Tensor
    #: Set by ``host_pool``, and by the tree.
    is_stage: bool
    used_pages: Callable[[], int] | None


class Backend(Protocol):
    """``HiCacheStorage`` with the calls that move pages of the host pool."""

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int: ...

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]: ...

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]: ...

    def clear(self) -> Any: ...

    def get_stats(self) -> Any: ...


class Event(Protocol):
    """When a copy has ended."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """A device stream."""

    def wait_stream(self, stream: Stream) -> None: ...


class Controller(Protocol):
    """``HiCacheController``: queues of ``CacheOperation`` and of ``HiCacheAck``."""

    write_stream: Stream
    load_stream: Stream
    write_queue: list[CacheOperation]
    load_queue: list[CacheOperation]
    ack_write_queue: list[HiCacheAck]
    ack_load_queue: list[HiCacheAck]

    def start_writing(self) -> None: ...

    def start_loading(self) -> int: ...


class Request(Protocol):
    """``Req``."""

    rid: str
    prefix_indices: torch.Tensor
    last_node: Node
    origin_input_ids: list[int]
    output_ids: list[int]
    extra_key: str | None
    multimodal_inputs: Any  # MultimodalInputs, or None
    lora_id: str | None
    return_logprob: bool
    logprob_start_len: int
    retracted_stain: bool
    host_hit_length: int
    cached_tokens_device: int
    cached_tokens_storage: int
