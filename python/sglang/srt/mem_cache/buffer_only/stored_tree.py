"""Base of radix trees over a store: marks on nodes (``nodes.StoredNode``) and the pipelines.

Contract: scheduler thread. On a prefill server every rank performs the same tree operations in the
same step, and ``advance`` contains a collective.
"""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
)  # Any: values of an identity; arguments that are passed through

from typing_extensions import override

from sglang.srt.disaggregation.delta.rank_agreement import Reduce
from sglang.srt.mem_cache.buffer_only.context import Context
from sglang.srt.mem_cache.buffer_only.metrics import BufferMetrics
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace, pool_identity
from sglang.srt.mem_cache.buffer_only.nodes import split_marks
from sglang.srt.mem_cache.buffer_only.page_store import PageStore
from sglang.srt.mem_cache.buffer_only.pipelines import Pipelines
from sglang.srt.mem_cache.buffer_only.settings import BufferSettings, call_pages
from sglang.srt.mem_cache.buffer_only.staging import Copier, StagingPool
from sglang.srt.mem_cache.buffer_only.store_client import StoreClient

if TYPE_CHECKING:
    from torch import Stream

    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
    from sglang.srt.observability.metrics_collector import StorageMetricsCollector
else:
    RadixCache = object


class StoredTree(RadixCache):
    """A tree whose nodes are written to the store while on the device, and record how much of them
    the store has. Call ``drive`` once, when the host pool and its controller exist."""

    #: Backup and prefetch; set by ``drive``.
    buffer: Pipelines
    cache_controller: HiCacheController
    #: Stream of the forward passes, set by the scheduler.
    forward_stream: Stream | None = None
    #: Our metrics and SGLang's collector; None without ``--enable-metrics``.
    _metrics: tuple[BufferMetrics, StorageMetricsCollector] | None = None

    def drive(
        self,
        controller: HiCacheController,
        staging_pool: StagingPool,
        settings: BufferSettings,
        copier: Copier,
        reduce_min: Reduce,
        collector: StorageMetricsCollector | None,
    ) -> None:
        """Create the pipelines over the host pool of ``controller``.

        Args:
            staging_pool: lends the pages of that host pool.
            reduce_min: reduces over the ranks that must act together.
            collector: SGLang's; None without ``--enable-metrics``.
        """
        self.cache_controller, host = controller, controller.mem_pool_host
        page_bytes = host.size_per_token * self.page_size
        context = Context(
            tree=self,
            staging_pool=staging_pool,
            store=PageStore(
                StoreClient(controller.storage_backend, controller.storage_backend_type),
                self.page_size,
                call_pages(page_bytes),
                namespace=Namespace.of(self.pool_identity()),
            ),
            copier=copier,
            settings=settings,
            skip_backup=controller.backup_skip,
            page_bytes=page_bytes,
        )
        self.buffer = Pipelines(context, reduce_min)
        host.used_pages = staging_pool.used
        if collector is not None:
            metrics = BufferMetrics(collector.labels, collector, self.page_size)
            self._metrics, context.observe = (metrics, collector), metrics.observe

    def pool_identity(self) -> dict[str, Any]:
        """Return how this server's KV is laid out in a page (``namespaces``)."""
        controller = self.cache_controller
        identity = pool_identity(controller.mem_pool_host, controller.tp_size)
        return {**identity, "bigrams": self.is_eagle}

    def advance(self) -> None:
        """Run one step of the pipelines and export their metrics. A prefill server calls it in each
        scheduler step, on all ranks; a decode server in some steps."""
        buffer = self.buffer
        buffer.step()
        if self._metrics is not None:
            metrics, collector = self._metrics
            metrics.update(buffer.gauges, buffer.totals)
            collector.log_storage_metrics(buffer.context.store.client.get_stats())

    @property
    def serves_kv(self) -> bool:
        """True if a request can hit a node."""
        return bool(self.root_node.children)

    def hold(self, node: TreeNode) -> None:
        """Keep the slots of ``node`` unchanged until ``unhold``, because they are being copied."""
        self.inc_lock_ref(node)

    def unhold(self, node: TreeNode) -> None:
        """Undo one ``hold``, because a copy of ``node`` has ended."""
        self.dec_lock_ref(node)

    @override
    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> Any:
        front = super()._split_node(key, child, split_len)
        split_marks(front, child, split_len)
        return front

    @override
    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        self.buffer.backups.queue.deleted(node)

    @override
    def reset(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.reset()
        super().reset()
