"""Binds the table's classes into SGLang's modules, as the import hook sees them execute."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from sglang.srt.patchset import status
from sglang.srt.patchset.base_version import installed_version, turned_off, why_inert
from sglang.srt.patchset.combine import combine
from sglang.srt.patchset.guard import mismatches
from sglang.srt.patchset.status import RowState, RowStatus
from sglang.srt.patchset.table import TABLE, Replacement

_REPORTED = "SGLANG_PATCHSET_REPORTED"


def activate() -> Attachment:
    """Called by the import hook at the first import below ``sglang.srt``."""
    if status.attachment is None:
        found = installed_version()
        attachment = Attachment(TABLE, found=found, inert=why_inert(found))
        status.attachment = attachment
        attachment.start()
    return status.attachment


class Attachment:
    """The table at work in one process. A row that does not fit leaves its class stock."""

    def __init__(self, table: Iterable[Replacement], *, found: str, inert: str = "") -> None:
        self.found = found
        self.inert = inert
        self._states = {row: RowState(row, RowStatus.PENDING) for row in table}
        self._modules: dict[str, list[Replacement]] = {}
        for row in self._states:
            self._modules.setdefault(row.module, []).append(row)
        #: (base, bound class) of every row that is bound, innermost first.
        self.bound: dict[Replacement, tuple[type, type]] = {}

    def start(self) -> None:
        """Report if inert; else catch up with targets that were imported before the hook ran."""
        if self.inert:
            if not turned_off():
                _report("inert", f"inert, SGLang runs unpatched: {self.inert}")
            return
        for name in self._modules:
            module = sys.modules.get(name)
            if module is not None:
                self._rebind_late(module)

    def row_states(self) -> tuple[RowState, ...]:
        """Every row and what became of it."""
        return tuple(self._states.values())

    def has_rows(self, module: str) -> bool:
        """Whether the hook has to watch ``module``."""
        return not self.inert and module in self._modules

    def watch(self, spec: ModuleSpec) -> None:
        """Rebind as soon as the module of ``spec`` has executed, before its importer goes on."""
        loader: Any = spec.loader
        execute: Callable[[ModuleType], None] = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.rebind(module)

        loader.exec_module = exec_module

    def rebind(self, module: ModuleType) -> None:
        """Bind the rows of ``module``; never raises."""
        for row in self._modules[module.__name__]:
            try:
                self._bind(row, module)
            except Exception as error:
                self._fail(row, f"{type(error).__name__}: {error}")

    def _bind(self, row: Replacement, module: ModuleType) -> None:
        base = getattr(module, row.name)
        mixin_module, _, mixin_name = row.mixin.partition(":")
        mixin = getattr(importlib.import_module(mixin_module), mixin_name)
        problems = mismatches(base, mixin)
        if problems:
            self._fail(row, "; ".join(problems))
            return
        bound = combine(base, mixin)
        setattr(module, row.name, bound)
        self.bound[row] = (base, bound)
        self._states[row] = RowState(row, RowStatus.BOUND)

    def _rebind_late(self, module: ModuleType) -> None:
        self.rebind(module)
        for row in self._modules[module.__name__]:
            base, _ = self.bound.get(row, (None, None))
            # A row that names a consumer leaves the class stock everywhere else on purpose.
            if base is not None and base.__module__ == module.__name__:
                holders = _holders(base)
                if holders:
                    self._fail(row, f"imported before the hook, stock class held by {holders}")

    def _fail(self, row: Replacement, reason: str) -> None:
        self._states[row] = RowState(row, RowStatus.FAILED, reason)
        _report(row.target, f"{row.target} is not patched: {reason}")


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
