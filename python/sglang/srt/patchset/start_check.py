"""Start of a scheduler: checks that all groups of its flags are attached, adds their mixins, and
reports the server's identity in the log, a metric and ``/server_info``.

The row of this module is in the group that is always attached, so that a row that does not fit
cannot disable the check.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from typing import TYPE_CHECKING, Any  # Any: SGLang's arguments, passed through

from typing_extensions import override

from sglang.srt.patchset import PROTOCOL_VERSION, __version__, flags, status
from sglang.srt.patchset.args import DisaggArgs
from sglang.srt.patchset.metric import INFO, KEY
from sglang.srt.patchset.status import GroupStatus, PatchsetState

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs
else:
    Scheduler = object

logger = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"


def identity(args: Any, now: PatchsetState) -> dict[str, str]:
    """Return the labels of ``sglang:disagg_patchset_info``.

    ``groups``: feature groups that are neither switched off nor stock, also unused ones;
    ``protocol``: version of the prefix protocol between prefill and decode; ``flags``: our flags
    with a non-default value.
    """
    omitted = (GroupStatus.OFF, GroupStatus.STOCK)
    given = [
        flag if value is True else f"{flag}={value}"
        for field in dataclasses.fields(DisaggArgs)
        if (value := getattr(args, field.name)) != field.default
        for flag in [f"--{field.name.replace('_', '-')}"]
    ]
    return {
        "version": __version__,
        "groups": ",".join(state.group.name for state in now.groups if state.status not in omitted),
        "protocol": str(PROTOCOL_VERSION),
        "flags": " ".join(given),
    }


def line(about: dict[str, str]) -> str:
    """Return the identity as a log line."""
    return (
        f"sglang-disagg-patchset {about['version']}: feature groups {about['groups']}; "
        f"delta protocol {about['protocol']}; flags {about['flags'] or 'none'}"
    )


def equip(scheduler: Scheduler, server_args: ServerArgs) -> None:
    """Add the mixins that these arguments need to a scheduler under construction."""
    if status.attachment is not None:
        status.attachment.equip(SCHEDULER, scheduler, server_args)


class CheckedScheduler(Scheduler):
    """Refuses a flag whose groups are not attached in this process, before anything is built, and
    adds the mixins of its flags. Passes all arguments through."""

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
        # A copy, because SGLang returns the dict of its own arguments.
        about = {KEY: identity(self.server_args, status.state())}
        answer.internal_state = {**answer.internal_state, **about}
        return answer
