"""Pipeline stages of a prefill server.

Contract: on the scheduler's thread. All ranks of a stage call each method in the same turn of the
loop; a stage gets the ids that the stage before it has passed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: ids as SGLang has them

from typing_extensions import override

from sglang.srt.disaggregation.delta.prefill.scheduler import (
    DeltaSender,
    ended_uncomputed,
    leave_uncomputed,
    prefill_manager,
)
from sglang.srt.disaggregation.delta.rank_agreement import ended

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
else:
    SchedulerPPMixin = object


class PrefillStages(SchedulerPPMixin):
    """Has all pipeline stages accept the same requests, and end them together.

    Each stage runs the batches of its own scheduler. An event that one stage alone has seen (decode
    has withdrawn the room, the stage's writes have failed) must not change which requests it runs.
    """

    @override
    def process_bootstrapped_queue(self, bootstrapped_rids: list[list[str]] | None) -> Any:
        # Keep the decision of the first stage, because SGLang polls the rooms again on each stage,
        # one turn of the loop later. After a failure in between, the later stages would run batches
        # without a request that the earlier ones run.
        if bootstrapped_rids is not None and prefill_manager(self) is not None:
            good, bad = map(set, bootstrapped_rids)
            if self.pp_group.is_first_rank:
                # Only the first stage votes, because later stages process the same queue after it.
                bad.update(ended_uncomputed(self))
            leave_uncomputed(self, bad)
            bootstrapped_rids = [list(good), list(bad)]
            for req in self.disagg_prefill_bootstrap_queue.queue:
                if not isinstance(req.disagg_kv_sender, DeltaSender):
                    continue  # a warm-up request
                if req.rid in bad:
                    req.disagg_kv_sender.fail_with_others()
                elif req.rid in good and not self.pp_group.is_first_rank:
                    req.disagg_kv_sender.is_taken_in = True
        return super().process_bootstrapped_queue(bootstrapped_rids)

    @override
    def get_rids(
        self, req_queue: list[Req], is_send: bool, *poll_statuses_group: list[int]
    ) -> Any:  # a list of ids, or two of them, as SGLang's
        is_ours = is_send and req_queue is self.disagg_prefill_inflight_queue
        if is_ours and prefill_manager(self) is not None:
            return ended(req_queue, (self.attn_tp_cpu_group, self.attn_cp_cpu_group))
        return super().get_rids(req_queue, is_send, *poll_statuses_group)
