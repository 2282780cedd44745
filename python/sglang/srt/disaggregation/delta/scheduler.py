"""The scheduler of a server whose backend moves deltas: what its rooms need beside their queues."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sglang.srt.disaggregation.delta.stats import PREFILL_COUNTERS, STATS

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
else:
    Scheduler = object


class DeltaScheduler(Scheduler):
    """Stock on a server that is no prefill server."""

    @property
    def _prefill_manager(self) -> Any | None:
        """The manager of a prefill server whose rooms are ours."""
        queue = getattr(self, "disagg_prefill_bootstrap_queue", None)
        manager = getattr(queue, "kv_manager", None)
        return manager if getattr(manager, "rooms", None) is not None else None

    @override
    def abort_request(self, recv_req: Any) -> None:
        queued = list(self.waiting_queue)
        super().abort_request(recv_req)
        if self._prefill_manager is not None:
            close_rooms(queued, self.waiting_queue)

    @override
    def init_disaggregation(self) -> None:
        super().init_disaggregation()
        manager = self._prefill_manager
        if manager is not None and self.current_scheduler_metrics_enabled:
            STATS.bind(PREFILL_COUNTERS, self.metrics_collector.labels)
            if hasattr(manager, "transfer_stats"):
                manager.transfer_stats.bind(self.metrics_collector.labels)

    @override
    def maybe_sleep_on_idle(self) -> None:
        # What ends a handshake reaches a thread of ours and does not wake SGLang's sleeper, which
        # knows of requests and commands only: it would wait for up to a second.
        is_ours = self.idle_sleeper is not None and self._prefill_manager is not None
        if not is_ours or self.is_fully_idle():
            super().maybe_sleep_on_idle()


def close_rooms(before: Iterable[Any], after: Iterable[Any]) -> None:
    """Prefill: end the rooms of requests that an abort took out of the waiting queue.

    SGLang drops such a request and forgets its sender: its room would stay in every table, and
    decode would wait for it until its deadline.
    """
    left = {id(req) for req in after}
    for req in before:
        sender = req.disagg_kv_sender
        if id(req) in left or not hasattr(sender, "abort"):
            continue
        sender.abort()
        if hasattr(sender, "clear"):
            sender.clear()
