"""Where a scheduler starts: whatever its flags need is wholly attached, and is put on it; then the
server says what it is.

This has a row of its own, in a group that is always attached, so that a row which does not fit
cannot take the check along with it.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any  # Any: SGLang's arguments, handed on

from typing_extensions import override

from sglang.srt.disaggregation.delta.metrics import METRICS
from sglang.srt.patchset import compat, compat_buffer_only, status
from sglang.srt.patchset.identity import KEY, identity, line
from sglang.srt.patchset.status import require_active

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs
else:
    Scheduler = object

logger = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"


def check(server_args: ServerArgs) -> None:
    """Raise :class:`PatchsetError` for a flag whose groups are not attached in this process."""
    if compat.wanted(server_args):
        require_active(compat.FLAG, *compat.groups(server_args), load=True)
    if compat_buffer_only.wanted(server_args):
        require_active(compat_buffer_only.ON, compat_buffer_only.GROUP, load=True)


def equip(scheduler: Scheduler, server_args: ServerArgs) -> None:
    """Add the mixins that these arguments need to a scheduler that is being made."""
    if status.attachment is not None:
        status.attachment.equip(SCHEDULER, scheduler, server_args)


class CheckedScheduler(Scheduler):
    """Checks before anything is built, and is equipped for its flags. Whatever the arguments are,
    they are passed on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
        check(given["server_args"])
        equip(self, given["server_args"])
        super().__init__(*args, **kwargs)
        about = identity(self.server_args, status.state())
        if (self.tp_rank, self.pp_rank, self.dp_rank or 0) == (0, 0, 0):
            logger.info("%s", line(about))
        if self.current_scheduler_metrics_enabled:
            METRICS["disagg_patchset_info"].child(self.metrics_collector.labels, **about).set(1)

    @override
    def get_internal_state(self, recv_req: GetInternalStateReq) -> GetInternalStateReqOutput:
        answer = super().get_internal_state(recv_req)
        # A dict of its own: SGLang answers with that of its arguments.
        about = {KEY: identity(self.server_args, status.state())}
        answer.internal_state = {**answer.internal_state, **about}
        return answer
