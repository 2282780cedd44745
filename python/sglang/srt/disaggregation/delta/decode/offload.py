"""A decode server writes the KV that only it has computed (answers, local turns) to the store.

Prefill servers write what they compute (``mem_cache/buffer_only``), and find the rest of a
conversation in the store under the same keys. Decode reads nothing from the store. The flag is
SGLang's, ``--disaggregation-decode-enable-offload-kvcache``. SGLang's own manager frees a request's
pages as it writes them, so it is not created.

Contract: the scheduler's thread, between decode steps. Each rank writes its own part of the pages
without agreement, because the trees of the ranks may differ: one may learn of a failure first.
Writes therefore do not affect what a tree holds.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: arguments that overrides pass through

from typing_extensions import override

from sglang.srt.disaggregation.delta.decode.tree import Retired
from sglang.srt.disaggregation.delta.rank_agreement import unchanged
from sglang.srt.mem_cache.buffer_only.host_pool import chosen_pages, staging_buffer
from sglang.srt.mem_cache.buffer_only.settings import BufferSettings, Share
from sglang.srt.mem_cache.buffer_only.staging import Copier, StagingPool
from sglang.srt.mem_cache.buffer_only.stored_tree import StoredTree
from sglang.srt.patchset import status
from sglang.srt.patchset.flags import OFFLOAD

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sglang.srt.disaggregation.delta.decode.scheduler import DisaggScheduler as Scheduler

    # The classes that these mixins are combined with.
    from sglang.srt.disaggregation.delta.decode.tree import DecodeRadixTree
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
    from sglang.srt.observability.metrics_collector import StorageMetricsCollector
    from sglang.srt.server_args import ServerArgs
else:
    DecodeRadixTree = Scheduler = object

#: The class that ``OffloadTree`` is mixed into.
TREE = "sglang.srt.managers.scheduler:RadixCache"
#: Steps between two rounds of the pipelines while requests run: copies of several steps share one
#: launch.
ROUND_INTERVAL_STEPS = 4


class OffloadTree(StoredTree, DecodeRadixTree):
    """Queues new nodes to be written, except those that prefill has computed.

    A copy locks no node. The eviction of a node that is being copied waits for the copy.
    """

    #: True while KV that prefill sent is being inserted.
    _delivered: bool = False

    @cached_property
    def _copied(self) -> set[TreeNode]:
        """Nodes that may be copied now."""
        return set()

    def write_to_store(self, args: ServerArgs, group: ProcessGroup) -> None:
        """Create the staging buffer and the pipelines; ``group``: the ranks of this server."""
        from sglang.srt.mem_cache import hiradix_cache as stock

        device = self.token_to_kv_pool_allocator.get_kvcache()
        pages = chosen_pages(device, self.page_size, args)
        # Pass None for ``self``, because the method does not use it.
        parse: Any = stock.HiRadixCache._parse_storage_backend_extra_config
        config, threshold, *_, pass_prefix_keys = parse(
            None, args.hicache_storage_backend_extra_config
        )
        with staging_buffer(pages, 0 if pages else args.hicache_size):
            host = _host_class(device)(
                device,
                args.hicache_ratio,
                args.hicache_size,
                self.page_size,
                args.hicache_mem_layout,
                allocator_type=args.hicache_storage_backend,
            )
            controller = stock.HiCacheController(
                self.token_to_kv_pool_allocator,
                host,
                self.page_size,
                group,
                load_cache_event=threading.Event(),
                io_backend=args.hicache_io_backend,
                storage_backend=args.hicache_storage_backend,
                prefetch_threshold=threshold,
                model_name=args.served_model_name,
                storage_backend_extra_config=config,
                enable_storage_metrics=args.enable_metrics,
            )
        pages = pages or host.page_num
        self.drive(
            controller,
            StagingPool(pages, Share(pages, pages), Share(0, 0)),
            BufferSettings(self.page_size, threshold, pass_prefix_keys=pass_prefix_keys),
            Copier(controller, lambda: self.forward_stream),
            unchanged,
            _collector(controller, args) if args.enable_metrics else None,
        )
        atexit.register(self.buffer.close)

    @override
    def adopt(self, req: Req) -> None:
        self._delivered = True
        try:
            super().adopt(req)
        finally:
            self._delivered = False

    @override
    def _inc_hit_count(self, node: TreeNode, chunked: bool = False) -> None:
        # Repeat SGLang's line, because the call would cost as much as this whole method.
        node.hit_count += not chunked
        if node.stored >= len(node.key):
            return
        if not self._delivered:
            self.buffer.backups.request(node)
        elif node.hit_count == 1:  # a new node: prefill writes it
            node.stored = node.launched = len(node.key)

    def hold(self, node: TreeNode) -> None:
        """Note that ``node`` is being copied. Unlike ``StoredTree``, do not lock it."""
        self._copied.add(node)

    def unhold(self, node: TreeNode) -> None:
        """Forget the noted nodes when no copy is under way."""
        if not self.buffer.backups.copies.launches:
            self._copied.clear()

    def finish_copies(self) -> None:
        """Wait for the copies to the staging buffer that are under way."""
        backups = self.buffer.backups
        backups.copied(len(backups.copies.launches))

    @override
    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> Any:
        front = super()._split_node(key, child, split_len)
        if child in self._copied:
            self._copied.add(front)
        return front

    @override
    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        if node in self._copied:
            self.finish_copies()  # before its slots, now free, are allocated again

    @override
    def retire(self) -> None:
        self.buffer.reset()
        super().retire()

    @property
    def serves_kv(self) -> bool:
        """True if any node is from after the last flush; no request hits retired nodes."""
        tops = self.root_node.children.values()
        return any(not isinstance(node.key.extra_key, Retired) for node in tops)


def _host_class(device: KVCache) -> type[HostKVCache]:
    """Return the host pool class for ``device``, as SGLang selects it."""
    from sglang.srt.mem_cache import hiradix_cache as stock

    for kind, host in (
        (stock.NSATokenToKVPool, stock.NSATokenToKVPoolHost),
        (stock.MLATokenToKVPool, stock.MLATokenToKVPoolHost),
        (stock.MHATokenToKVPool, stock.MHATokenToKVPoolHost),
    ):
        if isinstance(device, kind):
            return host
    raise ValueError(
        f"{OFFLOAD} does not support a KV pool of type {type(device).__name__}. Remove the flag."
    )


def _collector(controller: HiCacheController, args: ServerArgs) -> StorageMetricsCollector:
    """Return SGLang's collector of storage metrics, with the labels that its own cache uses."""
    from sglang.srt.observability.metrics_collector import StorageMetricsCollector

    names = ("tp_rank", "dp_rank", "pp_rank", "pp_size")
    labels = {name: getattr(controller, name) for name in names}
    labels["storage_backend"] = args.hicache_storage_backend
    return StorageMetricsCollector(labels=labels | (args.extra_metric_labels or {}))


class OffloadScheduler(Scheduler):
    """Runs rounds of the tree's pipelines between decode steps."""

    name_keys: Callable[[], None]  # of ``StoreScheduler``
    #: Each rank ends a flush with a timeout by its own clock. Updates with a flush name the keys.
    names_keys_at_flush: bool = False
    _steps: int = 0

    @override
    def init_cache_with_memory_pool(self) -> None:
        # Clear the field, because SGLang would create its manager and call it for each request in
        # each step.
        self.server_args.disaggregation_decode_enable_offload_kvcache = False
        super().init_cache_with_memory_pool()
        self.write_to_store()

    def write_to_store(self) -> None:
        """Add the mixin to the tree, create the pipelines and name the keys."""
        args = self.server_args
        # Clear the field, because SGLang would call a method of its HiCache tree at each abort.
        self.enable_hicache_storage = False
        status.attachment.equip(TREE, self.tree_cache, args)
        group = self.attn_tp_cpu_group if args.enable_dp_attention else self.tp_cpu_group
        self.tree_cache.write_to_store(args, group)
        self.name_keys()

    @override
    def process_decode_queue(self) -> None:
        self._steps += 1
        if self._steps % ROUND_INTERVAL_STEPS == 0 or self.running_batch.is_empty():
            self.tree_cache.advance()
        if self._waiting_release is not None:
            self.tree_cache.finish_copies()
        super().process_decode_queue()

    @override
    def release_memory_occupation(self, recv_req: Any) -> Any:
        self.tree_cache.finish_copies()  # before the memory is taken away
        return super().release_memory_occupation(recv_req)
