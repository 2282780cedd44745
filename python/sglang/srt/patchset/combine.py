"""Builds the class that stands in for an upstream class."""

from __future__ import annotations

import dataclasses
from typing import Any


def combine(base: type, mixin: type) -> type:
    """Return ``class base.__name__(mixin, base)`` under the upstream identity.

    Module, name and qualified name stay upstream's, so that pickling by reference finds the class
    that is bound under that name (also in a process without the hook), and log lines and metric
    labels keep their text.
    """
    identity: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    combined = type(base)(base.__name__, (mixin, base), identity)
    if dataclasses.is_dataclass(base):
        combined = _as_dataclass(combined, base)
    return combined


def _as_dataclass(combined: type, base: type) -> type:
    """Decorate as upstream did: the generated ``__init__`` then knows the fields of both."""
    params: Any = base.__dataclass_params__  # type: ignore[attr-defined]
    options = ("init", "repr", "eq", "order", "unsafe_hash", "frozen")
    decorate = dataclasses.dataclass(**{name: getattr(params, name) for name in options})
    return decorate(combined)
