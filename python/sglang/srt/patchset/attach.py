"""Binds the table's classes into SGLang's modules, as the import hook sees them execute.

All rows of a group are bound, or none: targets are imported at different times, so a row that does
not fit may be met when others of its group are bound and their classes are in use. Then the group
is *taken back*: each bound class drops its mixin from its bases, and so becomes an empty subclass
of the stock class, for everybody who holds it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any  # Any: loaders; what a name stands for; arguments of a server

from sglang.srt.patchset import environment, status, switches
from sglang.srt.patchset.base_version import installed_version, why_inert
from sglang.srt.patchset.combine import combine, separate
from sglang.srt.patchset.guard import mismatches
from sglang.srt.patchset.status import GroupState, GroupStatus, RowState, RowStatus
from sglang.srt.patchset.table import CURRENT_VERSION, GROUPS, Group, Replacement

_REPORTED = "SGLANG_PATCHSET_REPORTED"


def activate() -> Attachment:
    """Called by the import hook at the first import below ``sglang.srt``."""
    if status.attachment is None:
        found = installed_version()
        attachment = Attachment(
            GROUPS, found=found, inert=why_inert(found), off=environment.DISABLED_GROUPS.read()
        )
        status.attachment = attachment
        attachment.start()
    return status.attachment


class Attachment:
    """The groups at work in one process."""

    def __init__(
        self, groups: Iterable[Group], *, found: str, inert: str = "", off: Iterable[str] = ()
    ) -> None:
        """``off``: names of groups that the user switched off."""
        self.found = found
        self.inert = inert
        self._groups = {group.name: group for group in groups}
        self._off = tuple(off)
        #: What is wrong with the switches; servers refuse to start then.
        self.problem = switches.problem(self._groups.values(), self._off)
        self._rows = {row: group for group in self._groups.values() for row in group.rows}
        self._modules: dict[str, list[Replacement]] = {}
        for row in self._rows:
            self._modules.setdefault(row.module, []).append(row)
        #: (base, bound class) of every row that is bound, innermost first.
        self.bound: dict[Replacement, tuple[type, type]] = {}
        #: The mixins of rows with a ``when``, if they fit.
        self.optional: dict[Replacement, type] = {}
        self._stock: dict[str, tuple[GroupStatus, str]] = {}
        self._failed: dict[Replacement, str] = {}
        self._examined: set[str] = set()

    def start(self) -> None:
        """Report if inert; else catch up with targets that were imported before the hook ran."""
        if self.inert:
            if environment.ACTIVE.read() and self.found != CURRENT_VERSION:
                _report("inert", f"inert, SGLang runs unpatched: {self.inert}")
            return
        if self.problem:
            _report("switches", self.problem)
        for name in self._off:
            if name in self._groups and name != switches.BASE:
                self._leave_stock(self._groups[name], f"{switches.ENV} names it", GroupStatus.OFF)
        for name in self._modules:
            module = sys.modules.get(name)
            if module is not None:
                self._rebind_late(module)

    def group_states(self) -> tuple[GroupState, ...]:
        """Every group and what became of it."""
        return tuple(self._state_of(group) for group in self._groups.values())

    def examine(self, name: str) -> None:
        """Find out now what keeps the group ``name`` from being attached, apart from its rows."""
        self._is_wanted(self._groups[name])

    def has_rows(self, module: str) -> bool:
        """Whether the hook has to watch ``module``."""
        return not self.inert and module in self._modules

    def watch(self, spec: ModuleSpec) -> None:
        """Rebind as soon as the module of ``spec`` has executed, before its importer goes on.

        One loader may serve many modules, as that of a zip file does: it is watched once, and the
        modules without rows are left alone.
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
            try:
                if self._is_wanted(self._rows[row]):
                    self._bind(row, module)
            except Exception as error:
                self._fail(row, f"{type(error).__name__}: {error}")

    def _bind(self, row: Replacement, module: ModuleType) -> None:
        mixin = _named(row.mixin)
        base = getattr(module, row.name)
        problems = mismatches(base, mixin)
        if problems:
            self._fail(row, "; ".join(problems))
            return
        if self._rows[row].name in self._stock:
            return  # importing the mixin led to a row that does not fit
        if row.when:
            self.optional[row] = mixin
            return
        bound = combine(base, mixin)
        setattr(module, row.name, bound)
        self.bound[row] = (base, bound)

    def equip(self, target: str, made: object, server_args: Any) -> None:
        """Put on ``made``, an object of the class ``target`` ("module:Name") that is just being
        made, the mixins that a server with these arguments needs."""
        for row, mixin in self.optional.items():
            is_new = row.target == target and not isinstance(made, mixin)
            if is_new and _named(row.when)(server_args):
                made.__class__ = combine(type(made), mixin)

    def _rebind_late(self, module: ModuleType) -> None:
        self.rebind(module)
        for row in self._modules[module.__name__]:
            base, _ = self.bound.get(row, (None, None))
            # A row that names a consumer leaves the class stock everywhere else on purpose.
            if base is not None and base.__module__ == module.__name__:
                holders = _holders(base)
                if holders:
                    self._fail(row, f"imported before the hook, stock class held by {holders}")

    # ---- groups ----

    def _is_wanted(self, group: Group) -> bool:
        """Whether rows of ``group`` are to be bound, as far as is known by now."""
        if group.name not in self._examined:
            self._examined.add(group.name)
            needed = all(self._is_wanted(self._groups[name]) for name in self._needs(group))
            if needed and group.name not in self._stock and group.obstacle:
                reason = _ask(group.obstacle)
                if reason:
                    self._leave_stock(group, reason)
        return group.name not in self._stock

    def _needs(self, group: Group) -> tuple[str, ...]:
        """Names of the groups without which ``group`` is stock."""
        if group.name == switches.BASE:
            return ()
        return tuple(name for name in (switches.BASE, *group.needs) if name in self._groups)

    def _fail(self, row: Replacement, reason: str) -> None:
        self._failed[row] = reason
        self._leave_stock(self._rows[row], f"{row.target} does not fit: {reason}")

    def _leave_stock(self, group: Group, reason: str, how: GroupStatus = GroupStatus.STOCK) -> None:
        """Take back what is bound of ``group``, and of the groups that need it; say so once."""
        if group.name in self._stock:
            return
        self._stock[group.name] = how, reason
        dependents: list[str] = []
        for other in self._groups.values():
            lacking = next((n for n in self._needs(other) if n in self._stock), None)
            if lacking is not None and other.name not in self._stock:
                dependents.append(other.name)
                why = f"it needs {lacking}, which is not attached: {reason}"
                self._stock[other.name] = how, why
        for row in reversed(list(self.bound)):
            if self._rows[row].name in self._stock:
                separate(*self.bound.pop(row))
        for row in [row for row in self.optional if self._rows[row].name in self._stock]:
            del self.optional[row]
        also = f" So do {', '.join(dependents)}, which need it." if dependents else ""
        if how is GroupStatus.STOCK or dependents:
            _report(group.name, f"feature group {group.name} stays stock: {reason}.{also}")

    def _state_of(self, group: Group) -> GroupState:
        how, reason = self._stock.get(group.name, (None, ""))
        rows = tuple(self._row_state(row, how is not None) for row in group.rows)
        if how is None:
            is_whole = all(row.status is RowStatus.BOUND for row in rows)
            how = GroupStatus.ATTACHED if is_whole else GroupStatus.PENDING
        return GroupState(group, how, reason, rows)

    def _row_state(self, row: Replacement, is_stock: bool) -> RowState:
        if row in self._failed:
            return RowState(row, RowStatus.FAILED, self._failed[row])
        if row in self.bound or row in self.optional:
            return RowState(row, RowStatus.BOUND)
        return RowState(row, RowStatus.STOCK if is_stock else RowStatus.PENDING)


def _named(path: str) -> Any:
    """What "package.module:name" stands for."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _ask(obstacle: str) -> str:
    try:
        return str(_named(obstacle)())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _holders(base: type) -> str:
    """Names in SGLang's modules that are bound to ``base``."""
    return ", ".join(
        f"{name}.{key}"
        for name, module in list(sys.modules.items())
        if name.startswith("sglang.") and module is not None
        for key, value in list(vars(module).items())
        if value is base
    )


def _report(subject: str, message: str) -> None:
    """Say it once for a tree of processes: children inherit the mark."""
    seen = os.environ.get(_REPORTED, "").split(",")
    if subject not in seen:
        os.environ[_REPORTED] = ",".join([*filter(None, seen), subject])
        sys.stderr.write(f"sglang-disagg-patchset: {message}\n")
