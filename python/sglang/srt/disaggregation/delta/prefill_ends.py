"""When a request in flight ends on a prefill server of several ranks.

SGLang reduces what the ranks' senders say by MIN, and Failed is the lowest: one rank's failure ends
the request on all of them, and frees pages and a metadata slot that another rank's writes still
read. Here a request ends in the step in which it has ended on every rank; until then its pages stay
where they are on all of them. The wait is bounded by each rank's own deadline for its transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sglang.srt.disaggregation.delta.ranks import minimum

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
else:
    SchedulerPPMixin = object


def ended(requests: Sequence[Any], groups: Sequence[Any]) -> list[str]:
    """The ids of those ``requests`` that have ended on all ranks of ``groups``: one collective a
    group, the same answer on each rank.

    A rank whose part is still open where another's has failed sends nothing more of it.
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    polls = [int(request.disagg_kv_sender.poll()) for request in requests]
    over = [poll in (KVPoll.Success, KVPoll.Failed) for poll in polls]
    votes = [*polls, *map(int, over)]
    for group in groups:
        votes = minimum(votes, group)
    count, found = len(polls), []
    for request, is_over, worst, all_over in zip(
        requests, over, votes[:count], votes[count:], strict=True
    ):
        if all_over:
            found.append(request.rid)
        elif worst == KVPoll.Failed and not is_over:
            request.disagg_kv_sender.fail_with_others()
    return found


class PrefillStages(SchedulerPPMixin):
    """Pipeline stages tell each other which requests have ended; each asks all of its ranks."""

    @override
    def get_rids(self, req_queue: list[Any], is_send: bool, *poll_statuses_group: Any) -> Any:
        if is_send and req_queue is self.disagg_prefill_inflight_queue:
            manager = self.disagg_prefill_bootstrap_queue.kv_manager
            if getattr(manager, "rooms", None) is not None:
                return ended(req_queue, (self.attn_tp_cpu_group, self.attn_cp_cpu_group))
        return super().get_rids(req_queue, is_send, *poll_statuses_group)
