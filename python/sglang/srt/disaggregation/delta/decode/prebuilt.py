"""The prebuilt batch: what a decode server runs in the place of a prefill.

Bringing a retracted request's KV back: what the tree still shares is not copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_schedule_batch_mixin import (
        ScheduleBatchDisaggregationDecodeMixin,
    )
else:
    ScheduleBatchDisaggregationDecodeMixin = object


class RadixPrebuiltBatch(ScheduleBatchDisaggregationDecodeMixin):
    """Continues after the prefix that each request shares."""

    @override
    def prepare_for_prebuilt(self) -> None:
        if not getattr(self.tree_cache, "serves_decode", False):
            super().prepare_for_prebuilt()
            return
        for req in self.reqs:
            # The round input was just rebuilt with the first generated token, which has no KV yet.
            req.fill_ids = req.fill_ids[: req.kv_committed_len]
            req.set_extend_input_len(len(req.fill_ids) - len(req.prefix_indices))
            # Clients see the cached tokens that prefill reported; stock would add our prefix.
            req.already_computed = len(req.prefix_indices)
        super().prepare_for_prebuilt()
        for req in self.reqs:
            self.tree_cache.claims.started(req)
        # Stock copies each row from its start, which would list shared slots as outputs.
        rows = self.req_to_token_pool.req_to_token
        owned = [
            rows[req.req_pool_idx, len(req.prefix_indices) : req.kv_committed_len]
            for req in self.reqs
        ]
        self.out_cache_loc = torch.cat(owned).to(torch.int64)


def without_leading(
    copy: list[list[Any]], chunk: int, skip: int
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Split a CPU copy of KV at ``skip`` tokens.

    SGLang keeps the copy as one list a layer of chunks of ``chunk`` tokens; a chunk is a tensor
    (MLA) or a [key, value] pair (MHA), tokens first. Returns the rest of the chunk that ``skip``
    falls into, and the whole chunks after it, each in the same form.
    """
    whole, part = divmod(skip, chunk)
    if part == 0:
        return [[] for _ in copy], [layer[whole:] for layer in copy]
    head = [[_tail(layer[whole], part)] if whole < len(layer) else [] for layer in copy]
    return head, [layer[whole + 1 :] for layer in copy]


def _tail(chunk: Any, start: int) -> Any:
    if isinstance(chunk, torch.Tensor):
        return chunk[start:]
    return [part[start:] for part in chunk]


def restore_private(req: Any, slots: torch.Tensor, allocator: Any) -> None:
    """Copy what is not shared from the request's CPU copy to ``slots``, and drop the copy.

    Shared pages are never written: other requests read them, and their content is the same.
    """
    chunk = allocator.get_kvcache().cpu_offloading_chunk_size
    head, rest = without_leading(req.kv_cache_cpu, chunk, req.cache_protected_len)
    at = min(len(slots), -req.cache_protected_len % chunk)
    if at:
        allocator.load_cpu_copy(head, slots[:at])
    if at < len(slots):
        allocator.load_cpu_copy(rest, slots[at:])
    del req.kv_cache_cpu
