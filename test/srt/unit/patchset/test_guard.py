"""The base guard: differences between an override and SGLang's method that count as drift."""

from __future__ import annotations

import dataclasses

import pytest
from typing_extensions import override

from sglang.srt.patchset.combine import mismatches


class Base:
    """Stands for an upstream class."""

    def plain(self, a, b=1, *, c=None):
        """A method with every kind of parameter."""

    @staticmethod
    def static(x):
        """A static method."""

    @classmethod
    def made(cls, x: int) -> Base:
        """A class method."""

    @property
    def value(self):
        """A property."""

    async def later(self):
        """A coroutine."""

    limit = 3


class Fits:
    """A mixin without a mistake."""

    @override
    def plain(self, a: str, b: int = 1, *, c: object = None) -> None:
        """Annotations may differ."""

    @staticmethod
    @override
    def static(x):
        """As in the base."""

    @override
    @classmethod
    def made(cls, x):
        """The mark may also stand outside."""

    @property
    @override
    def value(self):
        """As in the base."""

    @override
    async def later(self):
        """As in the base."""

    def brand_new(self):
        """Not in the base, not marked."""


def test_a_fitting_mixin_passes():
    """Guards against a guard that refuses correct rows."""
    assert mismatches(Base, Fits) == []


def _override(name, function):
    return type("Mixin", (), {name: override(function)})


@pytest.mark.parametrize(
    "mixin",
    [
        _override("plain", lambda self, a, b=1: None),
        _override("plain", lambda self, a, b=2, *, c=None: None),
        _override("plain", lambda self, a, c, b=1: None),
        _override("plain", lambda self, a, b=1, c=None: None),
        _override("plain", lambda self, *args, **kwargs: None),
        _override("renamed", lambda self: None),
        _override("static", lambda x: None),
        _override("value", lambda self: None),
        _override("later", lambda self: None),
        _override("limit", lambda self: None),
    ],
    ids=str,
)
def test_drifted_overrides_are_named(mixin):
    """Each way in which an override can miss its method, or break its callers, is reported."""
    (problem,) = mismatches(Base, mixin)
    (name,) = (n for n in vars(mixin) if not n.startswith("__"))
    assert f"Base.{name}" in problem


def test_an_unmarked_override_is_refused():
    """A new method of the mixin would otherwise replace a method that a later release adds."""
    mixin = type("Mixin", (), {"plain": lambda self, a, b=1, *, c=None: None})
    assert mismatches(Base, mixin) == ["plain exists in Base but is not marked as an override"]


def test_inherited_parts_of_a_mixin_are_checked():
    """A mixin may be composed of others; they attach as well."""
    part = type("Part", (), {"plain": lambda self: None})
    assert len(mismatches(Base, type("Mixin", (part,), {}))) == 1


def test_fields_of_a_dataclass_mixin():
    """A field that upstream already has, or a base without fields, would change its constructor."""
    stock = dataclasses.make_dataclass("Stock", [("size", int, 1)])
    same = dataclasses.make_dataclass("Same", [("size", int, 2)])
    new = dataclasses.make_dataclass("New", [("colour", str, "red")])
    assert mismatches(stock, new) == []
    assert mismatches(stock, same) == ["field size already exists in Stock"]
    assert mismatches(Base, new) == ["Base is not a dataclass, its mixin is"]
