"""A retracted request comes back with what the tree still holds of its prompt.

Stock allocates its whole text anew, although other requests may hold the same prefix, and admits
nobody while it waits. Here its prompt is matched and locked first, as a new request's is, and only
what lies behind the match is allocated and copied back from the CPU. Shared pages are never
written: others read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: SGLang's objects

from sglang.srt.disaggregation.delta.decode.retraction import load_private

if TYPE_CHECKING:
    from sglang.srt.disaggregation.lead.attach import Function, Wraps


class Lease:
    """The lock on the prefix of one retracted request that may resume now. Only as long as one
    call of SGLang's (``queue.lead_leases``)."""

    def __init__(self, queue: Any, req: Any) -> None:
        before = queue.tree_cache.evictable_size()
        self.req, self._tree = req, queue.tree_cache
        self.prefix = queue._match_prefix_and_lock(req).prefix_indices
        #: What counted as free before it was locked.
        self.evictable: int = before - self._tree.evictable_size()

    def release(self) -> None:
        """It does not resume now: it holds nothing again."""
        self._tree.unlock(self.req.lock)
        self.req.lock = self.req.last_node = None
        self.req.prefix_len = 0


def install(wrap: Wraps) -> None:
    """See ``attach``."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.managers.schedule_batch import Req

    @wrap(DecodePreallocQueue, "resume_retracted_reqs", "(self, rids_to_check=None)")
    def resume_retracted_reqs(stock: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.retracted_queue:
            return stock(*args, **kwargs)
        self.lead_leases = {}
        try:
            return stock(*args, **kwargs)
        finally:
            for lease in self.__dict__.pop("lead_leases").values():
                lease.release()

    @wrap(DecodePreallocQueue, "_prealloc_required_tokens", "(self, req)")
    def _prealloc_required_tokens(stock: Function, self: Any, req: Any) -> tuple[int, int]:
        leases = getattr(self, "lead_leases", None)
        if leases is None:
            found: tuple[int, int] = stock(req)
            return found
        lease = leases[req.rid] = Lease(self, req)
        less = len(lease.prefix) - lease.evictable
        full, swa = stock(req)
        return full - less, swa - less

    @wrap(
        DecodePreallocQueue,
        "_pre_alloc",
        "(self, req, prefix_indices=None, prefix_len=None, total_prefix_len=None)",
    )
    def _pre_alloc(stock: Function, self: Any, req: Any, *prefix: Any, **more: Any) -> Any:
        lease = getattr(self, "lead_leases", {}).pop(req.rid, None)
        if lease is None:
            return stock(req, *prefix, **more)
        slots = stock(req, lease.prefix, len(lease.prefix))
        req.kv.cache_protected_len = len(lease.prefix)
        return slots

    @wrap(Req, "load_kv_cache", "(self, req_to_token_pool, token_to_kv_pool_allocator)")
    def load_kv_cache(stock: Function, self: Any, rows: Any, allocator: Any) -> None:
        shared = self.kv.cache_protected_len
        if not shared:
            stock(rows, allocator)
            return
        slots = rows.req_to_token[self.kv.req_pool_idx, shared : self.seqlen - 1]
        backup, self.kv.retraction_backup = self.kv.retraction_backup, None
        chunk = allocator.get_kvcache().cpu_offloading_chunk_size
        load_private(backup.cpu_tensors, chunk, shared, slots, allocator.load_cpu_copy)
