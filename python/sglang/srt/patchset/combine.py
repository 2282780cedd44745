"""Builds the class that stands in for an upstream class."""

from __future__ import annotations

import dataclasses
from typing import Any  # Any: attributes of a class, whatever they are


def combine(base: type, mixin: type) -> type:
    """Return ``class base.__name__(mixin, base)`` under the upstream identity.

    Module, name and qualified name stay upstream's, so that pickling by reference finds the class
    that is bound under that name (also in a process without the hook), and log lines and metric
    labels keep their text.

    Raises:
        TypeError: the classes could not be separated again.
    """
    identity: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    combined = type(base)(base.__name__, (_removable(mixin), base), identity)
    if dataclasses.is_dataclass(base):
        combined = _as_dataclass(combined, base)
    return combined


def separate(base: type, combined: type) -> None:
    """Take the mixin out of a combined class: what is left is ``base`` under another name, also for
    who holds the class, a subclass or an instance."""
    for name in _GENERATED.intersection(vars(combined)):
        delattr(combined, name)
    combined.__bases__[0].__bases__ = (_Nothing,)


class _Nothing:
    """What stands where a mixin was."""


def _removable(mixin: type) -> type:
    """An empty subclass that can lose its only base. The combined class cannot: its own bases are
    laid out differently in memory where SGLang's is an abstract class."""
    identity = {"__module__": mixin.__module__, "__qualname__": mixin.__qualname__}
    holder = type(mixin)(mixin.__name__, (mixin,), identity)
    holder.__bases__ = (_Nothing,)
    holder.__bases__ = (mixin,)
    return holder


#: What the decorator for dataclasses puts into a class.
_GENERATED = frozenset(
    ("__dataclass_fields__", "__dataclass_params__", "__init__", "__repr__", "__eq__", "__hash__")
    + ("__lt__", "__le__", "__gt__", "__ge__", "__setattr__", "__delattr__", "__match_args__")
    + ("__replace__",)
)


def _as_dataclass(combined: type, base: type) -> type:
    """Decorate as upstream did: the generated ``__init__`` then knows the fields of both."""
    params: Any = base.__dataclass_params__  # type: ignore[attr-defined]
    options = ("init", "repr", "eq", "order", "unsafe_hash", "frozen")
    decorate = dataclasses.dataclass(**{name: getattr(params, name) for name in options})
    return decorate(combined)
