"""A retracted request resumes with the prefix that the tree still holds of its prompt.

Stock allocates its whole text, although other requests may hold the same prefix, and admits no
request while it waits. Here its prompt is matched and locked first, like a new request's, and only
the tokens behind the match are allocated and copied back from the CPU. Shared pages are not
written, because other requests read them.

Contract: scheduler thread; all ranks resume the same requests in the same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: SGLang's objects

from sglang.srt.disaggregation.delta.decode.record import load_private

if TYPE_CHECKING:
    from sglang.srt.disaggregation.lead.attach import Function


class ResumeLease:
    """Lock on the prefix of a retracted request that may resume now, for one call of SGLang's
    (``RemainingAdmission.step``)."""

    def __init__(self, queue: Any, req: Any) -> None:
        before = queue.tree_cache.evictable_size()
        self.req, self._tree = req, queue.tree_cache
        self.prefix = queue._match_prefix_and_lock(req).prefix_indices
        #: Tokens that need not be allocated: the prefix, less its part that counted as free before.
        self.saved: int = len(self.prefix) - (before - self._tree.evictable_size())

    def release(self) -> None:
        """Unlock the prefix, because the request does not resume now."""
        self._tree.unlock(self.req.lock)
        self.req.lock = self.req.last_node = None
        self.req.prefix_len = 0


def load_kv_cache(stock: Function, self: Any, rows: Any, allocator: Any) -> None:
    """Copy back the tokens behind the shared prefix of a request (``Req.load_kv_cache``)."""
    shared = self.kv.cache_protected_len
    if not shared:
        stock(rows, allocator)
        return
    slots = rows.req_to_token[self.kv.req_pool_idx, shared : self.seqlen - 1]
    backup, self.kv.retraction_backup = self.kv.retraction_backup, None
    chunk = allocator.get_kvcache().cpu_offloading_chunk_size
    load_private(backup.cpu_tensors, chunk, shared, slots, allocator.load_cpu_copy)
