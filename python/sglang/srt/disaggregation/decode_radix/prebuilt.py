"""The prebuilt batch: what a decode server runs in the place of a prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
