"""Resume of a retracted request with the prefix that the tree still holds.

Stock allocates the request's whole text again, although other requests may hold the same prefix,
and admits no request while it waits. Here the prompt is matched and locked first, like a new
request's, and only the part after the match is allocated and copied back from the CPU. Shared pages
are not written, because running requests read them.

Contract: scheduler thread; all ranks resume the same request in the same step. A ``ResumeLease``
holds a tree lock within one call of SGLang's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: SGLang's objects

from sglang.srt.disaggregation.delta.decode.request import load_private

if TYPE_CHECKING:
    from sglang.srt.disaggregation.lead.attach import Function


class ResumeLease:
    """The lock on the prefix of one retracted request that may resume in this call of SGLang's
    (``RemainingAdmission.step``)."""

    def __init__(self, queue: Any, req: Any) -> None:
        before = queue.tree_cache.evictable_size()
        self.req, self._tree = req, queue.tree_cache
        self.prefix = queue._match_prefix_and_lock(req).prefix_indices
        #: Tokens that need no allocation: the prefix without the part that counted as free before.
        self.saved: int = len(self.prefix) - (before - self._tree.evictable_size())

    def release(self) -> None:
        """Undo the match, because the request does not resume now."""
        self._tree.unlock(self.req.lock)
        self.req.lock = self.req.last_node = None
        self.req.prefix_len = 0


def load_kv_cache(stock: Function, self: Any, rows: Any, allocator: Any) -> None:
    """Copy back only the KV after the shared prefix (wraps ``Req.load_kv_cache``)."""
    shared = self.kv.cache_protected_len
    if not shared:
        stock(rows, allocator)
        return
    slots = rows.req_to_token[self.kv.req_pool_idx, shared : self.seqlen - 1]
    backup, self.kv.retraction_backup = self.kv.retraction_backup, None
    chunk = allocator.get_kvcache().cpu_offloading_chunk_size
    load_private(backup.cpu_tensors, chunk, shared, slots, allocator.load_cpu_copy)
