"""A retracted request comes back with what the tree still holds of its prompt.

Stock allocates its whole text anew, although other requests may hold the same prefix, and admits
nobody while it waits. Here its prompt is matched and locked first, as a new request's is, and only
what lies behind the match is allocated and copied back from the CPU. Shared pages are never
written: others read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: SGLang's objects

from sglang.srt.disaggregation.delta.decode.request import load_private

if TYPE_CHECKING:
    from sglang.srt.disaggregation.lead.attach import Function


class Lease:
    """The lock on the prefix of one retracted request that may resume now. Only as long as one
    call of SGLang's (``Admission.step``)."""

    def __init__(self, queue: Any, req: Any) -> None:
        before = queue.tree_cache.evictable_size()
        self.req, self._tree = req, queue.tree_cache
        self.prefix = queue._match_prefix_and_lock(req).prefix_indices
        #: Tokens that it need not allocate: the prefix, but for what counted as free before.
        self.saved: int = len(self.prefix) - (before - self._tree.evictable_size())

    def release(self) -> None:
        """It does not resume now: it holds nothing again."""
        self._tree.unlock(self.req.lock)
        self.req.lock = self.req.last_node = None
        self.req.prefix_len = 0


def load_kv_cache(stock: Function, self: Any, rows: Any, allocator: Any) -> None:
    """``Req.load_kv_cache``: copies back what lies behind the prefix that the request shares."""
    shared = self.kv.cache_protected_len
    if not shared:
        stock(rows, allocator)
        return
    slots = rows.req_to_token[self.kv.req_pool_idx, shared : self.seqlen - 1]
    backup, self.kv.retraction_backup = self.kv.retraction_backup, None
    chunk = allocator.get_kvcache().cpu_offloading_chunk_size
    load_private(backup.cpu_tensors, chunk, shared, slots, allocator.load_cpu_copy)
