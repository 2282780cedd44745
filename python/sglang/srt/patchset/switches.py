"""``SGLANG_PATCHSET_DISABLE``: feature groups that are to stay stock, by their names."""

from __future__ import annotations

from collections.abc import Iterable

from sglang.srt.patchset import environment
from sglang.srt.patchset.table import Group

ENV = environment.DISABLED_GROUPS.name
#: Flags and start-up check: what tells the user that something is off cannot be off itself.
BASE = "base"


def problem(groups: Iterable[Group], names: Iterable[str]) -> str:
    """What is wrong with ``names``; empty if all of them can be switched off."""
    known = [group.name for group in groups if group.name != BASE]
    unknown = [name for name in names if name not in known]
    if not unknown:
        return ""
    return (
        f"{ENV} names {', '.join(map(repr, unknown))}, but the feature groups that can be switched "
        f"off are {', '.join(known)} (SGLANG_PATCHSET=0 turns all of them off)"
    )
