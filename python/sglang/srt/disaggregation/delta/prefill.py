"""The prefill scheduler's chunk sender, with a cursor that starts at the decode prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from sglang.srt.disaggregation.delta.pages import chunk_end
from sglang.srt.disaggregation.delta.prefill_ends import ended
from sglang.srt.disaggregation.delta.ranks import alone
from sglang.srt.disaggregation.delta.stats import STATS

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.prefill_rooms import PrefillRooms
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
else:
    SchedulerDisaggregationPrefillMixin = object


class DeltaPrefill(SchedulerDisaggregationPrefillMixin):
    """Sends what decode lacks, in order, once; and always the metadata. A request ends on all ranks
    in one step."""

    @override
    def send_kv_chunk(self, req: Any, last_chunk: bool = False, end_idx: int | None = None) -> None:
        sender = req.disagg_kv_sender
        prefix: int | None = getattr(sender, "decode_prefix_len", None)
        if prefix is None or (last_chunk and self._has_state):
            # The backend is SGLang's own; or the model has state, of which SGLang says what goes
            # along. Such models never have a prefix on decode.
            super().send_kv_chunk(req, last_chunk, end_idx)
            return
        page: int = self.token_to_kv_pool_allocator.page_size
        computed = min(len(req.fill_ids), len(req.origin_input_ids)) if end_idx is None else end_idx
        start, end = max(req.start_send_idx, prefix), chunk_end(computed, page, last_chunk)
        if last_chunk:
            self.disagg_metadata_buffers.set_buf(req)
            if prefix:
                STATS.add("kv_transfer_skipped_tokens", prefix)
        elif end <= start:
            # Decode holds all of this chunk, or it fills no page. The cursor never moves back: that
            # would send prefix pages into the delta's destinations.
            return
        req.start_send_idx = max(start, end)
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        sender.send(page_indices(row, start, end, page), None)

    @property
    def _rooms(self) -> PrefillRooms | None:
        """This rank's rooms; None on a backend of SGLang's that knows no delta."""
        rooms: PrefillRooms | None = getattr(
            self.disagg_prefill_bootstrap_queue.kv_manager, "rooms", None
        )
        return rooms

    @override
    def process_prefill_chunk(self) -> None:
        # Each of SGLang's loops comes here once a turn, when it has taken the requests that came.
        rooms = self._rooms
        if rooms is not None:
            rooms.scheduler_time.turn()
        super().process_prefill_chunk()

    @override
    def process_disagg_prefill_inflight_queue(
        self, rids_to_check: list[str] | None = None
    ) -> list[Any]:
        queue: list[Any] = self.disagg_prefill_inflight_queue
        groups = self.attn_tp_cpu_group, self.attn_cp_cpu_group
        if (
            rids_to_check is None  # a pipeline stage has asked its ranks already
            and queue
            and self._rooms is not None
            and not all(alone(group) for group in groups)
        ):
            rids_to_check = ended(queue, groups)
            if not rids_to_check:
                return []  # nothing to do for SGLang's, which would reduce once more
        done: list[Any] = super().process_disagg_prefill_inflight_queue(rids_to_check)
        return done

    @property
    def _has_state(self) -> bool:
        """Whether this model has state beside its KV that goes with the last chunk."""
        return hasattr(self.token_to_kv_pool_allocator.get_kvcache(), "get_state_buf_infos")


def page_indices(row: Any, start: int, end: int, page: int) -> npt.NDArray[np.int32]:
    """The pages of tokens ``start`` to ``end``, from a request's row of token slots (a tensor).

    ``start`` is at the beginning of a page. The slots are copied as they lie, so that the device's
    copy engine does it alone, and the host picks the first of each page: a step or a division on
    the device would be kernels on the scheduler's stream, behind all that is queued there.
    """
    slots: npt.NDArray[np.integer] = row[start:end].cpu().numpy()
    taken: npt.NDArray[np.int32] = (slots[::page] // page).astype(np.int32)
    return taken
