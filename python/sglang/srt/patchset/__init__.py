"""Attaches the patch set to the installed SGLang. Only this package knows the replaced classes.

``python -m sglang.srt.patchset`` shows what is replaced and whether it is active.
"""

from sglang.srt.patchset.status import (
    GroupState,
    GroupStatus,
    PatchsetError,
    PatchsetState,
    RowState,
    RowStatus,
    require_active,
    state,
)
from sglang.srt.patchset.table import BASE_VERSION, GROUPS, TABLE, Group, Replacement

__version__ = "0.1.0"
#: What decode and prefill servers tell each other about prefixes. It rises when the meaning of a
#: field changes (``delta/wire.py``).
PROTOCOL_VERSION = 1

__all__ = [
    "BASE_VERSION",
    "GROUPS",
    "TABLE",
    "Group",
    "GroupState",
    "GroupStatus",
    "PatchsetError",
    "Replacement",
    "RowState",
    "RowStatus",
    "PatchsetState",
    "require_active",
    "state",
]
