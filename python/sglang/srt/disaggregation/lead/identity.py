"""Reports the package and its settings in ``/server_info`` and as ``sglang:disagg_patchset_info``,
as on SGLang 0.5.10.post1 (``sglang.srt.patchset.start_check``).

It is always on and changes nothing else of a server.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any  # Any: SGLang's objects

from sglang.srt.patchset import __version__, environment
from sglang.srt.patchset.metric import INFO, KEY
from sglang.srt.patchset.table import LEAD

if TYPE_CHECKING:
    from sglang.srt.disaggregation.lead.attach import Function, Wraps

SCHEDULER = "sglang.srt.managers.scheduler"


def identity() -> dict[str, str]:
    """Return the labels of ``sglang:disagg_patchset_info``. ``protocol``: prefixes are announced by
    SGLang itself; ``flags``: the variables that are set."""
    given = " ".join(environment.given(LEAD, *environment.ALSO_LEAD))
    return {"version": __version__, "groups": LEAD, "protocol": "sglang", "flags": given}


def install(wrap: Wraps) -> None:
    """See ``attach``. Do nothing in a process without a scheduler, so that it is not imported."""
    module: Any = sys.modules.get(SCHEDULER)
    if module is None:
        return

    @wrap(module.Scheduler, "init_disaggregation", "(self)")
    def init_disaggregation(stock: Function, self: Any) -> None:
        stock()
        if self.metrics_reporter.current_scheduler_metrics_enabled:
            INFO.child(self.metrics_collector.labels, **identity()).set(1)

    @wrap(module.Scheduler, "get_internal_state", "(self, recv_req)")
    def get_internal_state(stock: Function, self: Any, recv_req: Any) -> Any:
        answer = stock(recv_req)
        answer.internal_state[KEY] = identity()
        return answer
