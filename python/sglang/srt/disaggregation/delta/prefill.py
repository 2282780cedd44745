"""The prefill scheduler's chunk sender, with a cursor that starts at the decode prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from sglang.srt.disaggregation.delta.pages import chunk_end
from sglang.srt.disaggregation.delta.stats import STATS

if TYPE_CHECKING:
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
else:
    SchedulerDisaggregationPrefillMixin = object


class DeltaPrefill(SchedulerDisaggregationPrefillMixin):
    """Sends what decode lacks, in order, once; and always the metadata."""

    @override
    def send_kv_chunk(self, req: Any, last_chunk: bool = False, end_idx: int | None = None) -> None:
        sender = req.disagg_kv_sender
        prefix: int = getattr(sender, "decode_prefix_len", 0)
        if prefix:
            req.start_send_idx = max(req.start_send_idx, prefix)
            computed = (
                min(len(req.fill_ids), len(req.origin_input_ids)) if end_idx is None else end_idx
            )
            end = chunk_end(computed, self.token_to_kv_pool_allocator.page_size, last_chunk)
            if end <= req.start_send_idx:
                # Decode holds all of this chunk. The cursor stays: moving it back to ``end`` would
                # send prefix pages into the delta's destinations.
                if last_chunk:
                    self._send_metadata_only(req)
                    STATS.add("kv_transfer_skipped_tokens", prefix)
                return
        super().send_kv_chunk(req, last_chunk, end_idx)
        if last_chunk:
            STATS.add("kv_transfer_skipped_tokens", prefix)

    @override
    def process_disagg_prefill_inflight_queue(self, rids_to_check: list[str] | None = None) -> Any:
        settle = getattr(self.disagg_prefill_bootstrap_queue.kv_manager, "settle", None)
        if settle is not None:
            settle()
        return super().process_disagg_prefill_inflight_queue(rids_to_check)

    def _send_metadata_only(self, req: Any) -> None:
        """A full prefix hit moves no KV, but decode still needs the first token."""
        self.disagg_metadata_buffers.set_buf(req)
        req.disagg_kv_sender.send(np.empty(0, dtype=np.int32), None)
