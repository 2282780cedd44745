"""The group for SGLang 0.5.23: replaced methods, and errors that prevent a server's start."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from sglang.srt.disaggregation.lead import attach
from sglang.srt.disaggregation.lead.attach import LeadPart, Wraps
from sglang.srt.patchset.table import CURRENT_VERSION


class Queue:
    """Stands for a class of SGLang."""

    def take(self, count: int, *, keep: bool = False) -> list[int]:
        """Return some of the queue."""
        return list(range(count))


class Later(Queue):
    """A class that inherits the method."""


STOCK = Queue.take


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the class, with one part switched on and no part attached yet."""
    monkeypatch.setattr(Queue, "take", STOCK)
    monkeypatch.setattr(attach, "attached", [])
    monkeypatch.setattr(attach.metadata, "version", lambda _: CURRENT_VERSION)
    monkeypatch.setattr(attach, "PARTS", (LeadPart("one", lambda: True),))


def part(monkeypatch: pytest.MonkeyPatch, signature: str) -> None:
    """Add a part whose ``take`` returns one more."""

    def install(wrap: Wraps) -> None:
        @wrap(Queue, "take", signature)
        def take(stock: Any, self: Queue, count: int, **rest: Any) -> list[int]:
            return stock(count + 1, **rest)

    module = types.SimpleNamespace(install=install)
    monkeypatch.setitem(sys.modules, f"{attach.__package__}.one", module)


def test_a_part_that_is_on_wraps_a_method_wherever_it_is_inherited(monkeypatch: Any) -> None:
    """Guards against classes that were imported elsewhere and stay stock."""
    part(monkeypatch, "(self, count, *, keep=False)")
    attach.activate()
    assert Queue().take(2) == Later().take(2, keep=True) == [0, 1, 2]
    assert attach.attached == ["one"]
    attach.activate()
    assert Queue().take(2) == [0, 1, 2], "wrapped once"


def test_two_parts_wrap_one_method(monkeypatch: Any) -> None:
    """Guards against a second part that mistakes the first one's function for another release's."""
    part(monkeypatch, "(self, count, *, keep=False)")
    both = LeadPart("one", lambda: True), LeadPart("one", lambda: True)
    monkeypatch.setattr(attach, "PARTS", both)
    attach.activate()
    assert Queue().take(2) == [0, 1, 2, 3]


@pytest.mark.parametrize("signature", ["(self, count)", "(self, count, *, keep=True)"])
def test_another_signature_ends_the_start_by_name(monkeypatch: Any, signature: str) -> None:
    """Guards against a method that a later release changed, and against attaching half of a
    group."""
    part(monkeypatch, signature)
    with pytest.raises(SystemExit, match=r"Queue.take is \(self, count, \*, keep=False\), not"):
        attach.activate()
    assert Queue.take is STOCK and not attach.attached


def test_a_missing_method_ends_the_start_by_name(monkeypatch: Any) -> None:
    """Guards against an AttributeError, which the plugin loader would only log."""

    def install(wrap: Wraps) -> None:
        wrap(Queue, "gone", "(self)")(lambda stock, self: None)

    module = types.SimpleNamespace(install=install)
    monkeypatch.setitem(sys.modules, f"{attach.__package__}.one", module)
    with pytest.raises(SystemExit, match="Queue.gone is nothing"):
        attach.activate()


@pytest.mark.parametrize(
    ("name", "value"), [("SGLANG_PATCHSET", "0"), ("SGLANG_PATCHSET_DISABLE", "lead")]
)
def test_a_switch_leaves_everything_stock(monkeypatch: Any, name: str, value: str) -> None:
    """Guards against a group that cannot be switched off."""
    part(monkeypatch, "(self, count, *, keep=False)")
    monkeypatch.setenv(name, value)
    attach.activate()
    assert Queue.take is STOCK


def test_another_release_stays_stock_and_says_so(monkeypatch: Any, caplog: Any) -> None:
    """Guards against methods of another release that only look the same."""
    part(monkeypatch, "(self, count, *, keep=False)")
    monkeypatch.setattr(attach.metadata, "version", lambda _: "0.5.24")
    attach.activate()
    assert Queue.take is STOCK
    assert len(caplog.records) == 1 and "found 0.5.24" in caplog.text


@pytest.mark.parametrize("value", ["0", "soon"])
def test_a_wrong_variable_ends_the_start(monkeypatch: Any, value: str) -> None:
    """Guards against an invalid value that ends a thread later, and against one that is found on
    decode but not on prefill, where no part reads it."""

    name = "SGLANG_DISAGGREGATION_HANDSHAKE_TIMEOUT"
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(attach, "PARTS", ())
    with pytest.raises(SystemExit, match=f"{name} must be a number of seconds from 0.1"):
        attach.activate()


def test_nothing_is_on_by_default(monkeypatch: Any) -> None:
    """Guards against an installation that changes a server without the flags, and against a server
    that does not report the package."""
    monkeypatch.undo()
    for release, names in ((CURRENT_VERSION, ["flags", "identity"]), ("0.5.24", [])):
        monkeypatch.setattr(attach.metadata, "version", lambda _, found=release: found)
        assert [each.name for each in attach.parts_on()] == names
