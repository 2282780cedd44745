"""What the patch set has done in this process, for the command line, validation and tests."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any  # Any: attach makes it, and reads this module

from sglang.srt.patchset.base_version import installed_version
from sglang.srt.patchset.table import BASE_VERSION, GROUPS, Group, Replacement

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

    @property
    def lacks(self) -> str:
        """Why its features are not available (now, or ever); empty if it is attached."""
        if self.status is GroupStatus.ATTACHED:
            return ""
        waiting = ", ".join(r.row.target for r in self.rows if r.status is RowStatus.PENDING)
        return self.reason or f"not bound: {waiting}"


@dataclass(frozen=True)
class State:
    """The patch set in this process; ``inert`` says why it is that, and is empty if active.

    ``problem``: what is wrong with the switches.
    """

    expected: str
    found: str
    inert: str
    groups: tuple[GroupState, ...]
    problem: str = ""

    @property
    def active(self) -> bool:
        """Whether the hook replaces classes; single groups may still be stock."""
        return not self.inert

    @property
    def rows(self) -> tuple[RowState, ...]:
        """The rows of all groups."""
        return tuple(row for group in self.groups for row in group.rows)

    @property
    def stock(self) -> tuple[GroupState, ...]:
        """The groups that could not be attached, although they are not switched off."""
        return tuple(group for group in self.groups if group.status is GroupStatus.STOCK)


def state() -> State:
    """Report without importing anything of SGLang."""
    if attachment is not None:
        return State(
            BASE_VERSION,
            attachment.found,
            attachment.inert,
            attachment.group_states(),
            attachment.problem,
        )
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
    wanted = {"base", *names}
    for group in reversed(GROUPS):  # what is needed stands before what needs it
        if group.name in wanted:
            wanted.update(group.needs)
    return tuple(group.name for group in GROUPS if group.name in wanted)


def require_switches() -> None:
    """Raise :class:`PatchsetError` if the user switched off what does not exist: a misspelt name
    would leave a feature on."""
    problem = state().problem
    if problem:
        raise PatchsetError(problem)


def require_active(flag: str, *groups: str, load: bool = False) -> None:
    """Raise :class:`PatchsetError` unless ``flag`` can rely on ``groups`` and what they need.

    ``load`` imports the targets of these groups first, and accepts none that is pending after that;
    a scheduler can afford that, argument parsing leaves them pending.
    """
    now = state()
    if now.inert:
        raise PatchsetError(f"{flag} needs sglang-disagg-patchset, which is inert: {now.inert}")
    require_switches()
    needed = closure(groups)
    now = load_all(needed) if load else examine(needed)
    for group in now.groups:
        is_refused = group.status in (GroupStatus.OFF, GroupStatus.STOCK) or load
        if group.group.name in needed and group.lacks and is_refused:
            raise PatchsetError(
                f"{flag} needs the feature group {group.group.name} of sglang-disagg-patchset, "
                f"which is not attached: {group.lacks}"
            )
