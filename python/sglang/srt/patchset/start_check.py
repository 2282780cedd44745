"""Where a scheduler starts: whatever its flags need is wholly attached, and is put on it; then the
server says what it is, in its log, in a metric and in ``/server_info``.

This has a row of its own, in a group that is always attached, so that a row which does not fit
cannot take the check along with it.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from typing import TYPE_CHECKING, Any  # Any: SGLang's arguments, handed on

from typing_extensions import override

from sglang.srt.patchset import PROTOCOL_VERSION, __version__, flags, status
from sglang.srt.patchset.args import DisaggArgs
from sglang.srt.patchset.metric import INFO
from sglang.srt.patchset.status import GroupStatus, State

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs
else:
    Scheduler = object

logger = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
#: The key in each of the ``internal_states`` of ``/server_info``.
KEY = "disagg_patchset"


def identity(args: Any, now: State) -> dict[str, str]:
    """The labels of ``sglang:disagg_patchset_info``.

    ``groups``: the feature groups that are neither switched off nor stock, also those that this
    server has no use for; ``protocol``: of the prefixes between prefill and decode; ``flags``: ours
    whose value is not the default.
    """
    left_out = (GroupStatus.OFF, GroupStatus.STOCK)
    given = [
        flag if value is True else f"{flag}={value}"
        for field in dataclasses.fields(DisaggArgs)
        if (value := getattr(args, field.name)) != field.default
        for flag in [f"--{field.name.replace('_', '-')}"]
    ]
    return {
        "version": __version__,
        "groups": ",".join(g.group.name for g in now.groups if g.status not in left_out),
        "protocol": str(PROTOCOL_VERSION),
        "flags": " ".join(given),
    }


def line(about: dict[str, str]) -> str:
    """The identity as a server logs it when it starts."""
    return (
        f"sglang-disagg-patchset {about['version']}: feature groups {about['groups']}; "
        f"delta protocol {about['protocol']}; flags {about['flags'] or 'none'}"
    )


def equip(scheduler: Scheduler, server_args: ServerArgs) -> None:
    """Add the mixins that these arguments need to a scheduler that is being made."""
    if status.attachment is not None:
        status.attachment.equip(SCHEDULER, scheduler, server_args)


class CheckedScheduler(Scheduler):
    """Refuses a flag whose groups are not attached in this process before anything is built, and is
    equipped for its flags. Whatever the arguments are, they are passed on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
        for flag, groups in flags.needed_groups(given["server_args"]).items():
            status.require_active(flag, *groups, load=True)
        equip(self, given["server_args"])
        super().__init__(*args, **kwargs)
        about = identity(self.server_args, status.state())
        if (self.tp_rank, self.pp_rank, self.dp_rank or 0) == (0, 0, 0):
            logger.info("%s", line(about))
        if self.current_scheduler_metrics_enabled:
            INFO.child(self.metrics_collector.labels, **about).set(1)

    @override
    def get_internal_state(self, recv_req: GetInternalStateReq) -> GetInternalStateReqOutput:
        answer = super().get_internal_state(recv_req)
        # A dict of its own: SGLang answers with that of its arguments.
        about = {KEY: identity(self.server_args, status.state())}
        answer.internal_state = {**answer.internal_state, **about}
        return answer
