"""What a running server says of this package: a start-up line, a metric, ``/server_info``."""

from __future__ import annotations

import dataclasses
from typing import Any  # Any: what has the attributes of ServerArgs

from sglang.srt.disaggregation.delta.wire import VERSION
from sglang.srt.patchset import __version__, compat
from sglang.srt.patchset.args import DisaggArgs
from sglang.srt.patchset.status import GroupStatus, State

#: The key in each of the ``internal_states`` of ``/server_info``.
KEY = "disagg_patchset"
#: Flags that are not named as their fields.
_WRITTEN = {
    "disaggregation_decode_local_tokens_when_lost": compat.LOCAL_WHEN_LOST,
    "disaggregation_decode_local_share": compat.LOCAL_SHARE,
}


def identity(args: Any, now: State) -> dict[str, str]:
    """The labels of ``sglang:disagg_patchset_info``.

    ``groups``: the feature groups that are neither switched off nor stock, also those that this
    server has no use for; ``protocol``: of the prefixes between prefill and decode; ``flags``: ours
    whose value is not the default.
    """
    left_out = (GroupStatus.OFF, GroupStatus.STOCK)
    flags = [
        _written(field.name, value)
        for field in dataclasses.fields(DisaggArgs)
        if (value := getattr(args, field.name)) != field.default
    ]
    return {
        "version": __version__,
        "groups": ",".join(g.group.name for g in now.groups if g.status not in left_out),
        "protocol": str(VERSION),
        "flags": " ".join(flags),
    }


def line(about: dict[str, str]) -> str:
    """The identity as a server logs it when it starts."""
    return (
        f"sglang-disagg-patchset {about['version']}: feature groups {about['groups']}; "
        f"delta protocol {about['protocol']}; flags {about['flags'] or 'none'}"
    )


def _written(name: str, value: object) -> str:
    flag = _WRITTEN.get(name, f"--{name.replace('_', '-')}")
    return flag if value is True else f"{flag}={value}"
