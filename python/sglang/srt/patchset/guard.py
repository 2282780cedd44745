"""The base guard: does a mixin still fit the upstream class it was written against?

An override whose upstream method was renamed, or takes other arguments, would be silently dead or
crash at the first request. The guard turns both into a row that stays stock, with a reason.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any  # Any: members of classes, whatever they are

_ABSENT: Any = object()


def mismatches(base: type, mixin: type) -> list[str]:
    """Everything in which ``mixin`` does not fit ``base``; empty if it fits."""
    found: list[str] = []
    for name, member in _own_members(mixin):
        stock = inspect.getattr_static(base, name, _ABSENT)
        if _function(member) is None:
            continue
        if _is_override(member):
            found.extend(_compare(base, name, stock, member))
        elif stock is not _ABSENT and not _is_dunder(name):
            found.append(f"{name} exists in {base.__name__} but is not marked as an override")
    found.extend(_compare_fields(base, mixin))
    return found


def _own_members(mixin: type) -> Iterator[tuple[str, Any]]:
    for cls in mixin.__mro__[:-1]:
        yield from vars(cls).items()


def _compare(base: type, name: str, stock: Any, member: Any) -> Iterator[str]:
    label = f"{base.__name__}.{name}"
    stock_function, function = _function(stock), _function(member)
    if stock is _ABSENT:
        yield f"{label} does not exist"
    elif stock_function is None or _kind(stock) != _kind(member):
        yield f"{label} is a {_kind(stock)}, the override a {_kind(member)}"
    elif _shape(stock_function) != _shape(function):
        expected, actual = inspect.signature(function), inspect.signature(stock_function)
        yield f"{label}{_bare(actual)} was expected to be {_bare(expected)}"


def _compare_fields(base: type, mixin: type) -> Iterator[str]:
    if not dataclasses.is_dataclass(mixin):
        return
    if not dataclasses.is_dataclass(base):
        yield f"{base.__name__} is not a dataclass, its mixin is"
        return
    stock = {field.name for field in dataclasses.fields(base)}
    for field in dataclasses.fields(mixin):
        if field.name in stock:
            yield f"field {field.name} already exists in {base.__name__}"


def _function(member: Any) -> Any:
    """The plain function in a method, static method, class method or property; else None."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    return member if inspect.isfunction(member) else None


def _is_override(member: Any) -> bool:
    return any(getattr(part, "__override__", False) for part in (member, _function(member)))


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _kind(member: Any) -> str:
    function = _function(member)
    if function is None:
        return type(member).__name__
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    prefix += "generator " if inspect.isgeneratorfunction(function) else ""
    return prefix + type(member).__name__


def _shape(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults; annotations are free to differ."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, _Default(p.default)) for p in parameters]


class _Default:
    """Compares defaults also where ``==`` does not give a plain truth value (tensors)."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Default):
            return NotImplemented
        return self.value is other.value or repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


def _bare(signature: inspect.Signature) -> str:
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))
