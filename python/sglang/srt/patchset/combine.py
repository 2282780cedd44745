"""Combines an upstream class with a mixin, and checks that the mixin fits.

An override of an upstream method that was renamed or changed its arguments would have no effect or
crash at the first request. ``mismatches`` finds both, so that the row stays stock with a reason.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any  # Any: classes and their members

_ABSENT: Any = object()
#: Members that ``dataclass`` adds to a class.
_GENERATED = frozenset(
    ("__dataclass_fields__", "__dataclass_params__", "__init__", "__repr__", "__eq__", "__hash__")
    + ("__lt__", "__le__", "__gt__", "__ge__", "__setattr__", "__delattr__", "__match_args__")
    + ("__replace__",)
)


class _Nothing:
    """Placeholder base of a removed mixin."""


def combine(base: Any, mixin: type) -> type:
    """Return ``class base.__name__(mixin, base)`` with the upstream identity.

    Module, name and qualified name stay upstream's, so that pickling by reference finds the class
    bound under that name (also in a process without the hook), and log lines and metric labels keep
    their text.

    Raises:
        TypeError: the classes could not be separated again.
    """
    # An empty subclass of the mixin, because its only base can be replaced later. The bases of the
    # combined class cannot: their memory layouts differ if SGLang's class is abstract.
    identity = {"__module__": mixin.__module__, "__qualname__": mixin.__qualname__}
    removable = type(mixin)(mixin.__name__, (mixin,), identity)
    removable.__bases__ = (_Nothing,)
    removable.__bases__ = (mixin,)
    identity = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    combined: type = type(base)(base.__name__, (removable, base), identity)
    if dataclasses.is_dataclass(base):
        # Decorate like upstream, so that the generated ``__init__`` has the fields of both.
        options = ("init", "repr", "eq", "order", "unsafe_hash", "frozen")
        params: Any = vars(base)["__dataclass_params__"]
        decorate = dataclasses.dataclass(**{name: getattr(params, name) for name in options})
        combined = decorate(combined)
    return combined


def separate(base: type, combined: type) -> None:
    """Remove the mixin from a combined class, which then behaves like ``base``, also for holders of
    the class, a subclass or an instance."""
    for name in _GENERATED.intersection(vars(combined)):
        delattr(combined, name)
    combined.__bases__[0].__bases__ = (_Nothing,)


def mismatches(base: type, mixin: type) -> list[str]:
    """Return all reasons why ``mixin`` does not fit ``base``; empty if it fits."""
    problems: list[str] = []
    for name, member in [item for cls in mixin.__mro__[:-1] for item in vars(cls).items()]:
        stock, function = inspect.getattr_static(base, name, _ABSENT), _function(member)
        if function is None:
            continue
        if any(getattr(part, "__override__", False) for part in (member, function)):
            problems.extend(_differences(base, name, stock, member))
        elif stock is not _ABSENT and not (name.startswith("__") and name.endswith("__")):
            problems.append(f"{name} exists in {base.__name__} but is not marked as an override")
    if dataclasses.is_dataclass(mixin):
        if not dataclasses.is_dataclass(base):
            return [*problems, f"{base.__name__} is not a dataclass, its mixin is"]
        fields = {field.name for field in dataclasses.fields(base)}
        for field in dataclasses.fields(mixin):
            if field.name in fields:
                problems.append(f"field {field.name} already exists in {base.__name__}")
    return problems


def _differences(base: type, name: str, stock: Any, member: Any) -> Iterator[str]:
    """Yield the differences in kind and signature of the override ``member`` from ``stock``."""
    label = f"{base.__name__}.{name}"
    if stock is _ABSENT:
        yield f"{label} does not exist"
    elif _function(stock) is None or _kind(stock) != _kind(member):
        yield f"{label} is a {_kind(stock)}, the override a {_kind(member)}"
    else:
        actual, expected = (inspect.signature(_function(side)) for side in (stock, member))
        # Defaults are compared by ``repr``, because ``==`` of a tensor has no truth value.
        shapes = [
            [(p.name, p.kind, repr(p.default)) for p in signature.parameters.values()]
            for signature in (actual, expected)
        ]
        if shapes[0] != shapes[1]:
            yield f"{label}{_bare(actual)} was expected to be {_bare(expected)}"


def _function(member: Any) -> Any:
    """Return the function of a method, static method, class method or property, or None."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    return member if inspect.isfunction(member) else None


def _kind(member: Any) -> str:
    function = _function(member)
    if function is None:
        return type(member).__name__
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    prefix += "generator " if inspect.isgeneratorfunction(function) else ""
    return prefix + type(member).__name__


def _bare(signature: inspect.Signature) -> str:
    """Return the signature without annotations, which may differ."""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))
