"""Status of the patch set in this process, for the command line, validation and tests: the release
of SGLang, the groups that the user switched off, and the state of the other groups."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any  # Any: an Attachment, because ``attach`` imports this module

from sglang.srt.patchset import environment
from sglang.srt.patchset.table import (
    BASE,
    BASE_VERSION,
    CURRENT_VERSION,
    GROUPS,
    Group,
    Replacement,
)

#: Variable that names the feature groups to leave stock.
DISABLE = environment.DISABLED_GROUPS.name
#: The process's ``attach.Attachment``, set once by ``attach.activate``.
attachment: Any = None


class PatchsetError(RuntimeError):
    """Raised if a flag of the patch set is used while a group that it needs is not attached."""


class RowStatus(enum.Enum):
    """Status of a row of the table in this process."""

    PENDING = "pending"  # the target module is not imported yet
    BOUND = "bound"  # with a ``when``: fits, and is added to the objects of servers that need it
    FAILED = "failed"  # does not fit, or a module holds the stock class
    STOCK = "stock"  # its group is not attached


class GroupStatus(enum.Enum):
    """Status of a group in this process."""

    PENDING = "pending"  # no row has failed, and some targets are not imported yet
    ATTACHED = "attached"
    OFF = "off"  # switched off by the user, or needs such a group
    STOCK = "stock"  # cannot be attached


@dataclass(frozen=True)
class RowState:
    """One row of the table and its status."""

    row: Replacement
    status: RowStatus
    reason: str = ""


@dataclass(frozen=True)
class GroupState:
    """One group and its status; ``reason``: why it is off or stock."""

    group: Group
    status: GroupStatus
    reason: str
    rows: tuple[RowState, ...]


@dataclass(frozen=True)
class PatchsetState:
    """State of the patch set in this process; ``inert``: why it is inert, empty if active."""

    expected: str
    found: str
    inert: str
    groups: tuple[GroupState, ...]


def installed_version() -> str:
    """Return the version of the installed SGLang from its metadata, or "none"."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "none"


def why_inert(found: str) -> str:
    """Return why the table does not attach to SGLang ``found``; empty if it may."""
    if not environment.is_active():
        return "turned off by SGLANG_PATCHSET=0"
    made_for = f"made for SGLang {BASE_VERSION} and {CURRENT_VERSION}"
    if found == "none":
        return (
            f"{made_for}, and no package `sglang` is installed. If `import "
            "sglang` still works, it may find only this package's files (`pip uninstall "
            "sglang-disagg-patchset` removes them)"
        )
    if found == CURRENT_VERSION:
        return f"on SGLang {found} there is only the group lead, which SGLang loads as a plugin"
    return "" if found == BASE_VERSION else f"{made_for}, found {found}"


def state() -> PatchsetState:
    """Return the current state, without importing SGLang."""
    if attachment is not None:
        groups = attachment.group_states()
        return PatchsetState(BASE_VERSION, attachment.found, attachment.inert, groups)
    pending = tuple(
        GroupState(
            group,
            GroupStatus.PENDING,
            "",
            tuple(RowState(row, RowStatus.PENDING) for row in group.rows),
        )
        for group in GROUPS
    )
    inert = "the import hook did not run in this interpreter (is the .pth file installed?)"
    return PatchsetState(BASE_VERSION, installed_version(), inert, pending)


def examine(names: Iterable[str] | None = None) -> PatchsetState:
    """Return the state after examining the groups ``names`` (default: all), without importing their
    targets."""
    if attachment is not None and not attachment.inert:
        for group in GROUPS:
            if names is None or group.name in names:
                attachment.examine(group.name)
    return state()


def load_all(names: Iterable[str] | None = None) -> PatchsetState:
    """Import every target of the groups ``names`` (default: all), so that none stays pending.
    Return the state."""
    for group in GROUPS:
        if names is None or group.name in names:
            for row in group.rows:
                importlib.import_module(row.module)
    return state()


def closure(names: Iterable[str]) -> tuple[str, ...]:
    """Return the groups ``names`` and all that they need, in the order of the table."""
    needed = {BASE, *names}
    for group in reversed(GROUPS):  # because a group is listed after the groups that it needs
        if group.name in needed:
            needed.update(group.needs)
    return tuple(group.name for group in GROUPS if group.name in needed)


def require_active(flag: str, *groups: str, load: bool = False) -> None:
    """Raise :class:`PatchsetError` unless ``groups`` and the groups that they need are attached.

    ``load``: import the targets first and accept no pending group. A scheduler does this; argument
    parsing does not, because it would import too much.
    """
    now = state()
    if now.inert:
        raise PatchsetError(f"{flag} needs sglang-disagg-patchset, which is inert: {now.inert}")
    needed = closure(groups)
    now = load_all(needed) if load else examine(needed)
    accepted = (GroupStatus.ATTACHED,) if load else (GroupStatus.ATTACHED, GroupStatus.PENDING)
    for group in now.groups:
        if group.group.name in needed and group.status not in accepted:
            waiting = [row.row.target for row in group.rows if row.status is RowStatus.PENDING]
            raise PatchsetError(
                f"{flag} needs the feature group {group.group.name} of sglang-disagg-patchset, "
                f"which is not attached: {group.reason or 'not bound: ' + ', '.join(waiting)}"
            )
