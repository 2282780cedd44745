"""Mixins that turn SGLang's ``HiRadixCache`` into a tree over a staging buffer and a store.

Contract: scheduler thread; every rank performs the same operations in the same step. Tree locks of
transfers are described in ``backup`` and ``load_back``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: arguments that overrides pass through

from typing_extensions import override

from sglang.srt.disaggregation.delta.rank_agreement import over
from sglang.srt.mem_cache.buffer_only.host_pool import chosen_pages, staging_buffer
from sglang.srt.mem_cache.buffer_only.settings import BufferSettings, shares
from sglang.srt.mem_cache.buffer_only.staging import Copier, StagingPool
from sglang.srt.mem_cache.buffer_only.stored_tree import StoredTree
from sglang.srt.patchset import environment, status
from sglang.srt.patchset.flags import ON
from sglang.srt.patchset.staging_size import check_size, check_staging_pages, minimum_pages

if TYPE_CHECKING:
    import torch

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.evict_policy import EvictionStrategy
    from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
    from sglang.srt.server_args import ServerArgs
else:
    HiRadixCache = object

NO_RUNTIME_CHANGE = (
    f"{ON} keeps KV only in the store, so --hicache-storage-backend and its "
    "policies cannot be changed while the server runs. Restart it with other flags."
)


#: The class that these mixins are for.
HIRADIX_TREE = "sglang.srt.mem_cache.hiradix_cache:HiRadixCache"


class SwitchedTree(HiRadixCache):
    """Stock, but becomes a ``BufferOnlyTree`` during construction on a server with
    ``--hicache-host-memory-mode buffer_only``."""

    @override
    def __init__(self, params: CacheInitParams, server_args: ServerArgs) -> None:
        before = type(self)
        if status.attachment is not None:
            status.attachment.equip(HIRADIX_TREE, self, server_args)
        if type(self) is before:
            super().__init__(params, server_args)
        else:
            type(self).__init__(self, params, server_args)  # calls this method again


class BufferOnlyTree(StoredTree, HiRadixCache):
    """A tree that drops a node evicted from the device; the next request on its path queries the
    store. So every node has device KV, ``host_value`` is always None, and the node records how much
    of it the store has (``nodes.StoredNode``)."""

    #: Numbers of inserts and flushes. After a change, an idle server of a pair checks its
    #: invariants (``SGLANG_DISAGGREGATION_CHECK_INVARIANTS``), which cover no evicted nodes.
    inserts: int = 0
    generation: int = 0
    #: Device slots that the last launched batch writes to; None if unknown.
    written: torch.Tensor | None = None
    #: Returns the tokens that a request admitted now could take; the scheduler sets a better count.
    room: Callable[[], int]
    _closing: bool = False

    @override
    def __init__(self, params: CacheInitParams, server_args: ServerArgs) -> None:
        device_pool = params.token_to_kv_pool_allocator.get_kvcache()
        pages = chosen_pages(device_pool, params.page_size, server_args)
        gigabytes: float = server_args.hicache_size
        with staging_buffer(pages, 0 if pages else gigabytes):
            super().__init__(params, server_args)
        if pages:
            check_staging_pages(pages, self.page_size, self.prefetch_threshold)
        else:
            pages = self.token_to_kv_pool_host.page_num
            needed = minimum_pages(self.page_size, self.prefetch_threshold)
            check_size(gigabytes, pages, self.page_size, needed)
        controller, device = self.cache_controller, self.token_to_kv_pool_allocator
        self.room = lambda: int(device.available_size() + self.evictable_size())
        settings = BufferSettings(
            page_size=self.page_size,
            prefetch_threshold=controller.prefetch_threshold,
            policy=self.prefetch_stop_policy,
            prefetch_timeout_ms=int(environment.BUFFER_READ_TIMEOUT.read() * 1000),
            timeout_base_ms=self.prefetch_timeout_base * 1000,
            timeout_page_ms=self.prefetch_timeout_per_page * 1000,
            pass_prefix_keys=self.hicache_storage_pass_prefix_keys,
            always_fetch=environment.BUFFER_ALWAYS_FETCH.read(),
        )
        self.drive(
            controller,
            StagingPool(pages, *shares(pages)),
            settings,
            Copier(controller, lambda: self.forward_stream, lambda: self.written),
            over(self.tp_group),
            self.storage_metrics_collector if self.enable_storage_metrics else None,
        )
        self.eviction_strategy: EvictionStrategy = PendingLast(self.eviction_strategy)

    # ---- backup ----

    @override
    def _inc_hit_count(self, node: TreeNode, chunked: bool = False) -> None:
        if not chunked:
            node.hit_count += 1
            self.buffer.touches.used(node)
            if not node.storage_backed and node.hit_count >= self.write_through_threshold:
                self.buffer.backups.request(node)

    @override
    def insert(self, params: Any) -> Any:
        self.inserts += 1
        return super().insert(params)

    @override
    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        before = self.token_to_kv_pool_allocator.available_size()
        super().cache_unfinished_req(req, chunked=chunked)
        if self.token_to_kv_pool_allocator.available_size() > before:
            # The prefix was in the tree already, so that the request's own slots are free now while
            # the running batch still reads them.
            self.written = None

    # ---- prefetch, load back ----

    def request_prefetch(self, rid: str, key: RadixKey) -> None:
        """Prefetch the part of ``key`` that the store has and the tree has not. At least one token
        of the prompt is left to compute."""
        key, _ = self.maybe_bigram_convert(key[: len(key) - 1])
        self.buffer.prefetches.request(rid, key[: len(key) // self.page_size * self.page_size])

    @override
    def check_prefetch_progress(self, req_id: str) -> bool:
        return self.buffer.prefetches.ready(req_id)

    @override
    def match_prefix(self, params: Any) -> Any:
        match = super().match_prefix(params)
        if params.req is None:
            return match
        # The request is about to be admitted. Report staged tokens as a host hit, because SGLang
        # then reserves device memory for them, does not compute them and calls ``init_load_back``.
        key, _ = self.maybe_bigram_convert(params.key)
        tree_tokens = len(match.device_indices)
        staged = self.buffer.prefetches.loadable(params.req.rid, tree_tokens, len(key))
        return match._replace(host_hit_length=staged)

    @override
    def init_load_back(self, params: Any) -> Any:
        req: Req = params.req
        tree_tokens, tokens = len(req.prefix_indices), params.host_hit_length
        # Reset, because the scheduler reports it as a storage hit.
        req.host_hit_length = 0
        loaded = self.buffer.prefetches.load(req.rid, tree_tokens, tokens)
        return loaded or (req.prefix_indices[:0], req.last_node)

    @override
    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        # Not removed here, because a request that is not admitted asks again. The scheduler takes
        # the number when the request runs.
        return int(self.prefetch_loaded_tokens_by_reqid.get(req_id, 0))

    def take_storage_hit(self, rid: str) -> int:
        """Return the tokens loaded from the store for a request and reset the number."""
        return int(self.prefetch_loaded_tokens_by_reqid.pop(rid, 0))

    @override
    def release_aborted_request(self, rid: str) -> None:
        self.buffer.prefetches.cancel(rid)
        self.take_storage_hit(rid)

    @override
    def ready_to_load_host_cache(self) -> int:
        return self.buffer.prefetches.load_backs.launch()

    # ---- every step, and the end ----

    @override
    def check_hicache_events(self) -> None:
        self.advance()

    @override
    def flush_write_through_acks(self) -> None:
        # Nothing to do, because ``step`` processes the copies with an agreement once per step; the
        # scheduler calls this between steps, and not on every path.
        pass

    @override
    def reset(self) -> None:
        super().reset()
        self.generation += 1

    @override
    def clear_storage_backend(self) -> bool:
        return self.buffer.clear_store()

    @override
    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        return False, NO_RUNTIME_CHANGE

    @override
    def detach_storage_backend(self) -> tuple[bool, str]:
        if not self._closing:
            return False, NO_RUNTIME_CHANGE
        self.cache_controller.storage_backend = None  # already closed by the pipelines
        ok, message = super().detach_storage_backend()
        return ok, message

    @override
    def shutdown(self) -> None:
        self._closing = True
        if hasattr(self, "buffer") and not self.buffer.close():
            return  # leave the backend, because a store call still uses it; the process ends
        super().shutdown()


@dataclass
class PendingLast:
    """SGLang's eviction order, but with nodes queued for backup last, because their KV exists
    nowhere else."""

    strategy: EvictionStrategy

    def get_priority(self, node: TreeNode) -> Any:
        """Return the sort key of eviction, smallest first."""
        pending = node.pending is not None and not node.storage_backed
        return (pending, self.strategy.get_priority(node))
