"""Binds the table's classes into SGLang's modules as the import hook sees these execute.

All rows of a group are bound, or none. Targets are imported at different times, so that a row that
does not fit may be found after other rows of its group are bound and in use. Then the group is
*reverted*: each bound class drops its mixin from its bases and becomes an empty subclass of the
stock class, for every holder of the class.

Names that no row can reach are exchanged for a short time (``exchanged``): SGLang creates its NIXL
agent in the middle of a method, from classes that it looks up there.

Contract: one ``Attachment`` per process, used on the importing thread under the module's import
lock; no other lock.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any  # Any: loaders; objects found by name; arguments of a server

from sglang.srt.patchset import environment, status
from sglang.srt.patchset.combine import combine, mismatches, separate
from sglang.srt.patchset.status import GroupState, GroupStatus, RowState, RowStatus
from sglang.srt.patchset.table import BASE, CURRENT_VERSION, GROUPS, Group, Replacement

_REPORTED = "SGLANG_PATCHSET_REPORTED"


def activate() -> Attachment:
    """Create this process's attachment, at the first import below ``sglang.srt``, and return it."""
    if status.attachment is None:
        found = status.installed_version()
        off = environment.sglang_names(status.DISABLE)  # a server refuses unknown names
        status.attachment = Attachment(GROUPS, found=found, inert=status.why_inert(found), off=off)
        status.attachment.start()
    return status.attachment


class Attachment:
    """The groups and their bound classes in one process."""

    def __init__(
        self, groups: Iterable[Group], *, found: str, inert: str = "", off: Iterable[str] = ()
    ) -> None:
        """``off``: names of groups that the user switched off."""
        self.found = found
        self.inert = inert
        self._groups = {group.name: group for group in groups}
        self._off = tuple(off)
        self._rows = {row: group for group in self._groups.values() for row in group.rows}
        self._modules: dict[str, list[Replacement]] = {}
        for row in self._rows:
            self._modules.setdefault(row.module, []).append(row)
        #: Bound row -> (base, bound class), innermost first.
        self.bound: dict[Replacement, tuple[type, type]] = {}
        #: Row with a ``when`` -> its mixin, if it fits.
        self.optional: dict[Replacement, type] = {}
        self._stock: dict[str, tuple[GroupStatus, str]] = {}
        self._failed: dict[Replacement, str] = {}
        self._examined: set[str] = set()

    def start(self) -> None:
        """Report if inert; else bind the targets that were imported before the hook ran."""
        if self.inert:
            if environment.is_active() and self.found != CURRENT_VERSION:
                _report("inert", f"inert, SGLang runs unpatched: {self.inert}")
            return
        for name in self._off:
            if name in self._groups and name != BASE:
                self._leave_stock(self._groups[name], f"{status.DISABLE} names it", GroupStatus.OFF)
        for name, rows in self._modules.items():
            if sys.modules.get(name) is None:
                continue
            self.rebind(sys.modules[name])
            for row in rows:
                base, _ = self.bound.get(row, (None, None))
                # Only if ``name`` defines the class: a row that names a consumer leaves the class
                # stock elsewhere on purpose.
                holders = _holders(base) if base is not None and base.__module__ == name else ""
                if holders:
                    self._fail(row, f"imported before the hook, stock class held by {holders}")

    def group_states(self) -> tuple[GroupState, ...]:
        """Return every group and its state."""
        states = []
        for group in self._groups.values():
            group_status, reason = self._stock.get(group.name, (None, ""))
            rows = []
            for row in group.rows:
                row_status = RowStatus.PENDING if group_status is None else RowStatus.STOCK
                if row in self._failed:
                    row_status = RowStatus.FAILED
                elif row in self.bound or row in self.optional:
                    row_status = RowStatus.BOUND
                rows.append(RowState(row, row_status, self._failed.get(row, "")))
            if group_status is None:
                is_complete = all(row.status is RowStatus.BOUND for row in rows)
                group_status = GroupStatus.ATTACHED if is_complete else GroupStatus.PENDING
            states.append(GroupState(group, group_status, reason, tuple(rows)))
        return tuple(states)

    def examine(self, name: str) -> bool:
        """Check the needed groups and the obstacle of the group ``name``, once. Return True if
        nothing known so far keeps its rows from being bound."""
        group = self._groups[name]
        if name not in self._examined:
            self._examined.add(name)
            needs_hold = all(self.examine(needed) for needed in self._needs(group))
            if needs_hold and name not in self._stock and group.obstacle:
                try:
                    reason = str(_named(group.obstacle)())
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                if reason:
                    self._leave_stock(group, reason)
        return name not in self._stock

    def has_rows(self, module: str) -> bool:
        """Return True if the hook has to watch ``module``."""
        return not self.inert and module in self._modules

    def watch(self, spec: ModuleSpec) -> None:
        """Have ``rebind`` called as soon as the module of ``spec`` has executed.

        One loader may serve many modules (for example, of a zip file): it is watched once, and
        modules without rows are ignored.
        """
        loader: Any = spec.loader
        if getattr(loader, "_watched_by", None) is self:
            return
        loader._watched_by = self
        execute: Callable[[ModuleType], None] = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self.has_rows(module.__name__):
                self.rebind(module)

        loader.exec_module = exec_module

    def rebind(self, module: ModuleType) -> None:
        """Bind the rows of ``module``; never raises."""
        for row in self._modules[module.__name__]:
            group = self._rows[row].name
            try:
                if not self.examine(group):
                    continue
                mixin, base = _named(row.mixin), getattr(module, row.name)
                problems = mismatches(base, mixin)
                if problems:
                    self._fail(row, "; ".join(problems))
                elif group in self._stock:
                    pass  # importing the mixin has met a row that does not fit
                elif row.when:
                    self.optional[row] = mixin
                else:
                    bound = combine(base, mixin)
                    setattr(module, row.name, bound)
                    self.bound[row] = (base, bound)
            except Exception as error:
                self._fail(row, f"{type(error).__name__}: {error}")

    def equip(self, target: str, made: object, server_args: Any) -> None:
        """Add the mixins that a server with these arguments needs to ``made``, an object of the
        class ``target`` ("module:Name") under construction."""
        for row, mixin in self.optional.items():
            is_new = row.target == target and not isinstance(made, mixin)
            if is_new and _named(row.when)(server_args):
                made.__class__ = combine(type(made), mixin)

    # ---- groups ----

    def _needs(self, group: Group) -> tuple[str, ...]:
        """Return the names of the groups without which ``group`` is stock."""
        if group.name == BASE:
            return ()
        return tuple(name for name in (BASE, *group.needs) if name in self._groups)

    def _fail(self, row: Replacement, reason: str) -> None:
        self._failed[row] = reason
        self._leave_stock(self._rows[row], f"{row.target} does not fit: {reason}")

    def _leave_stock(
        self, group: Group, reason: str, group_status: GroupStatus = GroupStatus.STOCK
    ) -> None:
        """Revert the bound rows of ``group`` and of the groups that need it, and report it once."""
        if group.name in self._stock:
            return
        self._stock[group.name] = group_status, reason
        dependents: list[str] = []
        for other in self._groups.values():
            missing = next((n for n in self._needs(other) if n in self._stock), None)
            if missing is not None and other.name not in self._stock:
                dependents.append(other.name)
                why = f"it needs {missing}, which is not attached: {reason}"
                self._stock[other.name] = group_status, why
        for row in reversed(list(self.bound)):
            if self._rows[row].name in self._stock:
                separate(*self.bound.pop(row))
        for row in [row for row in self.optional if self._rows[row].name in self._stock]:
            del self.optional[row]
        also = f" So do {', '.join(dependents)}, which need it." if dependents else ""
        if group_status is GroupStatus.STOCK or dependents:
            _report(group.name, f"feature group {group.name} stays stock: {reason}.{also}")


def _named(path: str) -> Any:
    """Import and return "package.module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _holders(base: type) -> str:
    """Return the names in SGLang's modules that are bound to ``base``."""
    return ", ".join(
        f"{name}.{key}"
        for name, module in list(sys.modules.items())
        if name.startswith("sglang.") and module is not None
        for key, value in list(vars(module).items())
        if value is base
    )


@contextmanager
def exchanged(group: str, module: str, names: Mapping[str, Any]) -> Iterator[None]:
    """Replace ``names`` (dotted) of ``module`` by the given values inside, for every thread. Do
    nothing if ``group`` is not attached.

    Raises:
        LookupError: the table does not list a name of the module for that group.
    """
    state = next(each for each in status.state().groups if each.group.name == group)
    for name in names:
        if not any(row.module == module and name in row.names for row in state.group.exchanges):
            raise LookupError(f"{module}:{name} is not an exchange of the group {group}")
    if state.status in (GroupStatus.OFF, GroupStatus.STOCK):
        names = {}
    with replaced(module, names):
        yield


@contextmanager
def replaced(module: str, names: Mapping[str, Any]) -> Iterator[None]:
    """Replace ``names`` (dotted) of ``module`` by the given values inside, for every thread."""
    with ExitStack() as stack:
        for name, value in names.items():
            path, _, last = name.rpartition(".")
            holder: Any = importlib.import_module(module)
            for part in filter(None, path.split(".")):
                holder = getattr(holder, part)
            stack.callback(setattr, holder, last, getattr(holder, last))
            setattr(holder, last, value)
        yield


def _report(subject: str, message: str) -> None:
    """Write ``message`` once per tree of processes; children inherit the mark."""
    seen = os.environ.get(_REPORTED, "").split(",")
    if subject not in seen:
        os.environ[_REPORTED] = ",".join([*filter(None, seen), subject])
        sys.stderr.write(f"sglang-disagg-patchset: {message}\n")
