"""What the patch set has done in this process, for the command line, validation and tests."""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.patchset.base_version import installed_version
from sglang.srt.patchset.table import BASE_VERSION, TABLE, Replacement

if TYPE_CHECKING:
    from sglang.srt.patchset.attach import Attachment

#: Set by :func:`sglang.srt.patchset.attach.activate`, once for a process.
attachment: Attachment | None = None


class PatchsetError(RuntimeError):
    """A flag of the patch set was used where the patch set is not wholly attached."""


class RowStatus(enum.Enum):
    """How far a row of the table has come in this process."""

    PENDING = "pending"  # the target module is not imported yet
    BOUND = "bound"
    FAILED = "failed"  # the class is the stock one, or stock copies of it are about


@dataclass(frozen=True)
class RowState:
    """One row of the table and what became of it."""

    row: Replacement
    status: RowStatus
    reason: str = ""


@dataclass(frozen=True)
class State:
    """The patch set in this process; ``inert`` says why it is that, and is empty if active."""

    expected: str
    found: str
    inert: str
    rows: tuple[RowState, ...]

    @property
    def active(self) -> bool:
        """Whether the hook replaces classes here; single rows may still have failed."""
        return not self.inert

    @property
    def failed(self) -> tuple[RowState, ...]:
        """The rows that could not be bound."""
        return tuple(row for row in self.rows if row.status is RowStatus.FAILED)


def state() -> State:
    """Report without importing anything of SGLang."""
    if attachment is not None:
        return State(BASE_VERSION, attachment.found, attachment.inert, attachment.row_states())
    pending = tuple(RowState(row, RowStatus.PENDING) for row in TABLE)
    inert = "the import hook did not run in this interpreter (is the .pth file installed?)"
    return State(BASE_VERSION, installed_version(), inert, pending)


def load_all() -> State:
    """Import every target module, so that no row stays pending, and report."""
    for row in TABLE:
        importlib.import_module(row.module)
    return state()


def require_active(flag: str, *, load: bool = False) -> None:
    """Raise :class:`PatchsetError` unless ``flag`` can rely on the patch set.

    ``load`` imports the modules of pending rows first; a scheduler, which needs them all, can
    afford that, argument parsing leaves them pending.
    """
    now = load_all() if load else state()
    if now.inert:
        raise PatchsetError(f"{flag} needs sglang-disagg-patchset, which is inert: {now.inert}")
    if now.failed:
        details = "; ".join(f"{item.row.target}: {item.reason}" for item in now.failed)
        raise PatchsetError(f"{flag} cannot be used, SGLang was not patched as expected: {details}")
