"""What the patch set has done in this process, for the command line, validation and tests: which
release of SGLang it found, which groups the user switched off, and what became of the others."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any  # Any: attach makes it, and reads this module

from sglang.srt.patchset import environment
from sglang.srt.patchset.table import (
    BASE,
    BASE_VERSION,
    CURRENT_VERSION,
    GROUPS,
    Group,
    Replacement,
)

#: The variable that names feature groups which are to stay stock.
DISABLE = environment.DISABLED_GROUPS.name
#: ``attach.Attachment``, which ``attach.activate`` sets once for a process.
attachment: Any = None


class PatchsetError(RuntimeError):
    """A flag of the patch set was used where what it needs is not wholly attached."""


class RowStatus(enum.Enum):
    """How far a row of the table has come in this process."""

    PENDING = "pending"  # the target module is not imported yet
    BOUND = "bound"  # with a ``when``: it fits, and is put on the objects of servers that need it
    FAILED = "failed"  # it does not fit, or stock copies of the class are about
    STOCK = "stock"  # its group is not attached


class GroupStatus(enum.Enum):
    """How far a group has come in this process."""

    PENDING = "pending"  # nothing speaks against it, and not all targets are imported yet
    ATTACHED = "attached"
    OFF = "off"  # switched off by the user, or in need of such a group
    STOCK = "stock"  # it cannot be attached


@dataclass(frozen=True)
class RowState:
    """One row of the table and what became of it."""

    row: Replacement
    status: RowStatus
    reason: str = ""


@dataclass(frozen=True)
class GroupState:
    """One group and what became of it; ``reason`` says why it is off or stock."""

    group: Group
    status: GroupStatus
    reason: str
    rows: tuple[RowState, ...]


@dataclass(frozen=True)
class State:
    """The patch set in this process; ``inert`` says why it is that, and is empty if active."""

    expected: str
    found: str
    inert: str
    groups: tuple[GroupState, ...]


def installed_version() -> str:
    """Version of the installed SGLang, from its metadata; "none" where there is no metadata."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "none"


def why_inert(found: str) -> str:
    """Why the table stays out of SGLang ``found``; empty if it may attach."""
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
        return f"on SGLang {found} there is the group lead alone, which SGLang loads as a plugin"
    return "" if found == BASE_VERSION else f"{made_for}, found {found}"


def state() -> State:
    """Report without importing anything of SGLang."""
    if attachment is not None:
        groups = attachment.group_states()
        return State(BASE_VERSION, attachment.found, attachment.inert, groups)
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
    return State(BASE_VERSION, installed_version(), inert, pending)


def examine(names: Iterable[str] | None = None) -> State:
    """Report, with what can be found out about the groups ``names`` (about all) before their
    targets are imported."""
    if attachment is not None and not attachment.inert:
        for group in GROUPS:
            if names is None or group.name in names:
                attachment.examine(group.name)
    return state()


def load_all(names: Iterable[str] | None = None) -> State:
    """Import every target of the groups ``names`` (of all), so that none stays pending; report."""
    for group in GROUPS:
        if names is None or group.name in names:
            for row in group.rows:
                importlib.import_module(row.module)
    return state()


def closure(names: Iterable[str]) -> tuple[str, ...]:
    """The groups ``names`` and all that they need, in the order of the table."""
    wanted = {BASE, *names}
    for group in reversed(GROUPS):  # what is needed stands before what needs it
        if group.name in wanted:
            wanted.update(group.needs)
    return tuple(group.name for group in GROUPS if group.name in wanted)


def require_active(flag: str, *groups: str, load: bool = False) -> None:
    """Raise :class:`PatchsetError` unless ``flag`` can rely on ``groups`` and what they need.

    ``load`` imports the targets of these groups first, and accepts none that is pending after that;
    a scheduler can afford that, argument parsing leaves them pending.
    """
    now = state()
    if now.inert:
        raise PatchsetError(f"{flag} needs sglang-disagg-patchset, which is inert: {now.inert}")
    needed = closure(groups)
    now = load_all(needed) if load else examine(needed)
    accepted = (GroupStatus.ATTACHED,) if load else (GroupStatus.ATTACHED, GroupStatus.PENDING)
    for group in now.groups:
        if group.group.name in needed and group.status not in accepted:
            waiting = [r.row.target for r in group.rows if r.status is RowStatus.PENDING]
            raise PatchsetError(
                f"{flag} needs the feature group {group.group.name} of sglang-disagg-patchset, "
                f"which is not attached: {group.reason or 'not bound: ' + ', '.join(waiting)}"
            )
