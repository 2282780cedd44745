"""Classes combined from an upstream class and a mixin."""

from __future__ import annotations

import abc
import dataclasses

import pytest

from sglang.srt.patchset.combine import combine


@dataclasses.dataclass
class Message:
    """Upstream's dataclass."""

    room: int
    pages: tuple[int, ...] = ()

    @classmethod
    def parse(cls, frames):
        """Upstream's constructor from the wire."""
        return cls(room=int(frames[0]))

    def __post_init__(self):
        self.order = ["base"]


@dataclasses.dataclass
class Prefix:
    """A mixin with a field."""

    prefix: int = 0

    @classmethod
    def parse(cls, frames):
        """Read one frame more."""
        message = super().parse(frames)
        message.prefix = int(frames[1])
        return message

    def __post_init__(self):
        super().__post_init__()
        self.order.append("mixin")


def test_dataclass_fields_join_after_the_bases():
    """Positional construction upstream must keep its meaning, and the mixin's field must be a real
    one."""
    combined = combine(Message, Prefix)
    assert [f.name for f in dataclasses.fields(combined)] == ["room", "pages", "prefix"]
    message = combined(7, (1, 2), prefix=16)
    assert (message.room, message.pages, message.prefix) == (7, (1, 2), 16)
    assert message.order == ["base", "mixin"]
    assert dataclasses.replace(message, prefix=32).prefix == 32
    assert message != combined(7, (1, 2), prefix=32)


def test_class_methods_build_the_combined_class():
    """Upstream parses messages through class methods, which must return the mixin's fields."""
    combined = combine(Message, Prefix)
    parsed = combined.parse([b"7", b"48"])
    assert type(parsed) is combined and parsed.prefix == 48


def test_options_of_the_upstream_dataclass_stay():
    """A frozen or ordered message must stay frozen or ordered."""
    frozen = dataclasses.make_dataclass("Frozen", [("a", int)], frozen=True, order=True)
    mixin = dataclasses.make_dataclass("Mixin", [("b", int, 0)], frozen=True)
    combined = combine(frozen, mixin)
    assert combined(1, 2) < combined(1, 3) and hash(combined(1)) == hash(combined(1, 0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        combined(1).a = 2


def test_metaclasses_stay():
    """Upstream's abstract classes have a metaclass, which the combined class must keep."""
    base = abc.ABCMeta("Abstract", (), {"go": abc.abstractmethod(lambda self: 1)})
    combined = combine(base, type("Mixin", (), {"go": lambda self: 2}))
    assert type(combined) is abc.ABCMeta and combined().go() == 2
