"""What every radix tree over a store has: marks on its nodes (``nodes.StoredNode``), and the
pipelines that it drives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: values of an identity; what overrides hand on

from typing_extensions import override

from sglang.srt.disaggregation.delta.rank_agreement import over
from sglang.srt.mem_cache.buffer_only.context import Context
from sglang.srt.mem_cache.buffer_only.metrics import BufferMetrics
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace, pool_identity
from sglang.srt.mem_cache.buffer_only.nodes import split_marks
from sglang.srt.mem_cache.buffer_only.pipelines import Pipelines
from sglang.srt.mem_cache.buffer_only.settings import Settings, call_pages
from sglang.srt.mem_cache.buffer_only.stage import Copier, Stage
from sglang.srt.mem_cache.buffer_only.store_client import PageStore, StoreClient

if TYPE_CHECKING:
    from torch import Stream
    from torch.distributed import ProcessGroup

    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.evict_policy import EvictionStrategy
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
    from sglang.srt.observability.metrics_collector import StorageMetricsCollector
else:
    RadixCache = object

MODE_FLAG = "--hicache-host-memory-mode"


class StoredTree(RadixCache):
    """A node is written to the store while it is on the device; what the store holds of it is noted
    on the node. ``drive`` is called once, as soon as the host pool and its controller are made."""

    #: Backup and prefetch; there as soon as SGLang's part is made.
    buffer: Pipelines
    cache_controller: HiCacheController
    #: The stream of the forward passes, set by the scheduler.
    forward_stream: Stream | None = None
    #: With ``--enable-metrics``; beside it SGLang's collector.
    _metrics: tuple[BufferMetrics, StorageMetricsCollector] | None = None

    def drive(
        self,
        controller: HiCacheController,
        stage: Stage,
        settings: Settings,
        copier: Copier,
        group: ProcessGroup,
        collector: StorageMetricsCollector | None,
    ) -> None:
        """Make the pipelines over the host pool of ``controller``, of which ``stage`` says what is
        in use. ``group``: the ranks of this server. ``collector``: with ``--enable-metrics``,
        SGLang's."""
        self.cache_controller, host = controller, controller.mem_pool_host
        page_bytes = host.size_per_token * self.page_size
        context = Context(
            tree=self,
            stage=stage,
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
        self.buffer = Pipelines(context, over(group))
        host.used_pages = stage.used
        if collector is not None:
            metrics = BufferMetrics(collector.labels, collector, self.page_size)
            self._metrics, context.observe = (metrics, collector), metrics.observe
        self.eviction_strategy: EvictionStrategy = PendingLast(self.eviction_strategy)

    def pool_identity(self) -> dict[str, Any]:
        """How the KV of this server lies in a page (``namespaces``)."""
        controller = self.cache_controller
        identity = pool_identity(controller.mem_pool_host, controller.tp_size)
        return {**identity, "bigrams": self.is_eagle}

    def advance(self) -> None:
        """Once in each step that all ranks take: drive the pipelines, and export what they did."""
        buffer = self.buffer
        buffer.step()
        if self._metrics is not None:
            metrics, collector = self._metrics
            metrics.update(buffer.gauges, buffer.totals)
            collector.log_storage_metrics(buffer.context.store.client.get_stats())

    @property
    def serves_kv(self) -> bool:
        """Whether a request could hit anything here."""
        return bool(self.root_node.children)

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


@dataclass
class PendingLast:
    """SGLang's eviction order, but nodes that wait to be written go last: only they would be
    lost."""

    strategy: EvictionStrategy

    def get_priority(self, node: TreeNode) -> Any:
        """The order of eviction, smallest first."""
        pending = node.pending is not None and not node.storage_backed
        return (pending, self.strategy.get_priority(node))
