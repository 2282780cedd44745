"""Modules that answer to every name, for imports of kernels that a CPU never calls."""

from __future__ import annotations

from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn  # Any: arguments of kernels that are not there


class MissingKernel:
    """Stands for one kernel, or for a table of them; to call it is an error that names it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> MissingKernel:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return MissingKernel(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._name} has no CPU form in the stand-in; see the flags in "
            "docs/advanced_features/cpu_standin.md"
        )

    def __repr__(self) -> str:
        return f"<missing kernel {self._name}>"


class NamesModule(ModuleType):
    """A module each of whose public names is a ``MissingKernel``."""

    def __getattr__(self, name: str) -> MissingKernel:
        if name.startswith("__"):  # what the import system and inspect look for is really absent
            raise AttributeError(name)
        return MissingKernel(f"{self.__name__}.{name}")


class NamesLoader(Loader):
    """Makes a ``NamesModule`` of any spec."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return NamesModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""
