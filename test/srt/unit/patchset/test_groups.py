"""Feature groups on a miniature SGLang: all rows or none, switches, needs, obstacles."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from sglang.srt.patchset import GROUPS, TABLE
from sglang.srt.patchset.status import closure

from .conftest import FakeSglang, Rows

pytestmark = pytest.mark.slow

DISABLE = "SGLANG_PATCHSET_DISABLE"
FEATURES: dict[str, Rows] = {
    "base": (("Options", "MoreOptions"),),
    "wire": (("Engine", "Loud"),),
    "cache": (("motor.Motor", "Eager"),),
    "other": (("Engine", "Louder"),),
}
NEEDS = {"cache": ("wire",)}

#: Prints the attached classes, and for each group the error of a flag that needs it.
REPORT = """
from sglang.srt.consumer import Engine, Options
from sglang.srt.motor import Motor
from sglang.srt.patchset import require_active, state
print(Engine().run(), Motor().start(), Options().checked)
for each in state().groups:
    try:
        require_active("--flag", each.group.name)
        print(each.status.value)
    except Exception as error:
        print(each.status.value, error)
"""

Change = Callable[[FakeSglang], dict[str, str]]
"""Changes the installation for one case; returns variables."""


def disabled(names: str) -> Change:
    return lambda fake: {DISABLE: names}


def wire_is(row: tuple[str, str]) -> Change:
    """Give the group ``wire`` another row."""

    def change(fake: FakeSglang) -> dict[str, str]:
        fake.set_groups(FEATURES | {"wire": (row,)}, NEEDS)
        return {}

    return change


def obstacle(body: str) -> Change:
    """Add an obstacle, which is about the machine and not about classes, such as a library's
    version."""

    def change(fake: FakeSglang) -> dict[str, str]:
        fake.write("sglang/srt/machine.py", f"def obstacle():\n    {body}\n")
        fake.set_groups(FEATURES, NEEDS, {"wire": "sglang.srt.machine:obstacle"})
        return {}

    return change


def without_the_base(fake: FakeSglang) -> dict[str, str]:
    fake.set_groups(FEATURES | {"base": (("Options", "Drifted"),)}, NEEDS)
    return {}


ALL = "['stock', 'loud', 'louder'] eager ['stock', 'mixin']"
NONE = "['stock'] stock ['stock']"
NO_WIRE = "['stock', 'louder'] stock ['stock', 'mixin']"
AND_CACHE = {"wire": "stock", "cache": "stock"}


@pytest.mark.parametrize(
    ("change", "runs", "lost", "reason", "lines"),
    [
        # A switched-off group is not logged, but groups that need it are.
        (disabled(""), ALL, {}, "", 0),
        (disabled("other"), ALL.replace(", 'louder'", ""), {"other": "off"}, "names it", 0),
        (disabled(" cache , wire "), NO_WIRE, {"wire": "off", "cache": "off"}, "names it", 0),
        (disabled("wire"), NO_WIRE, {"wire": "off", "cache": "off"}, "names it", 1),
        (wire_is(("Engine", "Drifted")), NO_WIRE, AND_CACHE, "Engine.run(self, steps=1)", 1),
        (wire_is(("Engine", "Absent")), NO_WIRE, AND_CACHE, "Absent", 1),
        (wire_is(("Motor", "Loud")), NO_WIRE, AND_CACHE, "engine:Motor does not fit", 1),
        (obstacle("return ''"), ALL, {}, "", 0),
        (obstacle("return 'an old library'"), NO_WIRE, AND_CACHE, "an old library", 1),
        (obstacle("raise OSError('no such file')"), NO_WIRE, AND_CACHE, "OSError: no such file", 1),
        # The base group holds the checks: without them half a feature could be attached unnoticed.
        (without_the_base, NONE, dict.fromkeys(FEATURES, "stock"), "Options does not fit", 1),
    ],
    ids=[
        *("nothing", "a group is off", "two are off", "a needed group is off"),
        *(
            "drifted",
            "no mixin",
            "no target",
            "no obstacle",
            "an obstacle",
            "a failing obstacle",
            "no base",
        ),
    ],
)
def test_why_a_group_is_not_attached(
    fake_sglang: FakeSglang,
    change: Change,
    runs: str,
    lost: dict[str, str],
    reason: str,
    lines: int,
) -> None:
    """Drift and a missing library must not crash the import. Groups that need the group are
    detached too, the others stay; one line says so, and a flag is refused with group and reason."""
    fake_sglang.set_groups(FEATURES, NEEDS)
    result = fake_sglang.run(REPORT, **change(fake_sglang))
    output, *statuses = result.stdout.splitlines()
    assert output == runs
    first, *others = lost or [""]
    for group, status_line in zip(FEATURES, statuses, strict=True):
        status, _, error = status_line.partition(" ")
        assert status == lost.get(group, "attached")
        assert error.startswith(f"--flag needs the feature group {first} of") == (group in lost)
        assert reason in error or group not in lost
    assert len(result.stderr.splitlines()) == lines
    for line in result.stderr.splitlines():
        assert reason in line and f"So do {', '.join(others)}, which need it" in line


@pytest.mark.parametrize("names", ["other,wires", "base"])
def test_unknown_names_are_refused(fake_sglang: FakeSglang, names: str) -> None:
    """A misspelt name would leave a feature on that the user wants off, so the server must not
    start."""
    fake_sglang.set_groups(FEATURES, NEEDS)
    report = "import runpy; runpy.run_module('sglang.srt.patchset', run_name='__main__')"
    result = fake_sglang.run(report, check=False, **{DISABLE: names})
    known = "wire, cache, other, lead"
    message = f"does not start: {DISABLE} must be comma-separated names of {known}, not {names!r}"
    assert result.returncode == 2 and message in result.stdout


#: Holders of a class of the group at the time when its last row is found not to fit.
LATE = """
from sglang.srt.consumer import Engine, Options
early, options = Engine(), Options()
from sglang.srt.motor import Motor
class Turbo(Motor): pass
print(early.run(), Engine().run(), Turbo().run(), Turbo().start(), Options().checked)
"""


@pytest.mark.parametrize(
    ("late", "run", "start", "checked"),
    [
        # The control: targets of one group that are imported one after the other.
        ("Eager", ["stock", "loud", "louder", "loudest"], "eager", ["stock", "mixin"]),
        ("Drifted", ["stock", "loud", "loudest"], "stock", ["stock"]),
    ],
    ids=["fits", "misfit"],
)
def test_a_misfit_found_late_reverts_the_group(
    fake_sglang: FakeSglang, late: str, run: list[str], start: str, checked: list[str]
) -> None:
    """Guards against half a feature: a subclass, an instance or a dataclass that holds a bound
    class by then must become stock as well. Groups above and below it on a class stay."""
    rows = (("Engine", "Louder"), ("Options", "MoreOptions"), ("motor.Motor", late))
    others: dict[str, Rows] = {"below": (("Engine", "Loud"),), "above": (("Engine", "Loudest"),)}
    fake_sglang.set_groups({"below": others["below"], "feature": rows, "above": others["above"]})
    result = fake_sglang.run(LATE)
    assert result.stdout == f"{run} {run} {run} {start} {checked}\n"
    lines = result.stderr.splitlines()
    assert len(lines) == (late == "Drifted")
    assert all(
        "group feature stays stock" in line and "Motor does not fit" in line for line in lines
    )


def test_a_reverted_class_equals_the_stock_class(fake_sglang: FakeSglang) -> None:
    """Constructor, fields, equality and pickle of a dataclass must be upstream's again."""
    rows = (("Options", "MoreOptions"), ("motor.Motor", "Drifted"))
    fake_sglang.set_groups({"feature": rows})
    result = fake_sglang.run(
        """
        import dataclasses, pickle
        from sglang.srt.consumer import Options
        before = Options(colour="blue")
        import sglang.srt.motor
        from sglang.srt.mixins import MoreOptions
        print([f.name for f in dataclasses.fields(Options)], repr(Options(3)))
        assert Options(3) == Options(3) and not issubclass(Options, MoreOptions)
        assert pickle.loads(pickle.dumps(Options(4))).size == 4
        assert dataclasses.replace(before, size=5).size == 5
        try:
            Options(colour="blue")
        except TypeError:
            print("refused")
        """
    )
    assert result.stdout == "['size'] Options(size=3)\nrefused\n"


EQUIP = """
from sglang.srt.consumer import Engine
from sglang.srt.patchset import state, status
class Turbo(Engine):
    def run(self, steps=1): return super().run(steps) + ["turbo"]
plain, loud, turbo = Engine(), Engine(), Turbo()
import sglang.srt.motor
for made in (plain, loud, turbo):
    status.attachment.equip("sglang.srt.engine:Engine", made, made is not plain)
    status.attachment.equip("sglang.srt.motor:Motor", made, True)
print(plain.run(), loud.run(), turbo.run(), Engine().run(), isinstance(turbo, Turbo))
print(*[each.status.value for each in state().groups[1].rows])
"""


@pytest.mark.parametrize(
    ("late", "suffix", "rows"),
    [("Eager", ", 'louder'", "bound bound"), ("Drifted", "", "stock failed")],
)
def test_an_optional_mixin_is_put_on_objects_that_need_it(
    fake_sglang: FakeSglang, late: str, suffix: str, rows: str
) -> None:
    """Guards against a feature that is off, or reverted, but still on an object's path."""
    fake_sglang.write("sglang/srt/flags.py", "def loud(args):\n    return args\n")
    feature = (("Engine", "Louder", "sglang.srt.flags:loud"), ("motor.Motor", late))
    fake_sglang.set_groups({"plain": (("Engine", "Loud"),), "feature": feature})
    plain = "['stock', 'loud']"
    loud, turbo = f"['stock', 'loud'{suffix}]", f"['stock', 'loud', 'turbo'{suffix}]"
    result = fake_sglang.run(EQUIP)
    assert result.stdout.splitlines() == [f"{plain} {loud} {turbo} {plain} True", rows]


def test_the_groups_of_the_table() -> None:
    """Group names are the switches; a group's needs come before it, so that one pass resolves
    all."""
    names = [group.name for group in GROUPS]
    assert names[0] == "base" and len(set(names)) == len(names)
    for index, group in enumerate(GROUPS):
        assert set(group.needs) <= set(names[:index]) and group.rows and group.what
    needed = ("base", "delta", "nixl_async", "decode_radix")
    assert closure(["decode_radix", "nixl_async"]) == needed


@pytest.mark.parametrize("when", sorted({row.when for row in TABLE if row.when}))
def test_the_condition_of_a_row_is_callable(when: str) -> None:
    """Guards against a moved function: schedulers would fail at start."""
    module, _, function = when.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
