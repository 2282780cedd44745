"""Feature groups on a miniature SGLang: all rows or none, switches, needs, obstacles."""

from __future__ import annotations

import pytest

from sglang.srt.patchset import GROUPS
from sglang.srt.patchset.status import closure

pytestmark = pytest.mark.slow

DISABLE = "SGLANG_PATCHSET_DISABLE"
#: What an engine, an object made before the second target is imported, and the options do.
REPORT = """
from sglang.srt.consumer import Engine, Options
early, options = Engine(), Options()
from sglang.srt.motor import Motor
class Turbo(Motor): pass
print(early.run(), Engine().run(), Turbo().run(), Turbo().start(), Options().checked)
"""
STATES = """
from sglang.srt.patchset import state
print({g.group.name: (g.status.value, [r.status.value for r in g.rows]) for g in state().groups})
"""
LATE = {"feature": (("Engine", "Loud"), ("Options", "MoreOptions"), ("motor.Motor", "Eager"))}
MISFIT = {"feature": (*LATE["feature"][:2], ("motor.Motor", "Loud"), ("motor.Motor", "Drifted"))}


@pytest.mark.parametrize(
    ("groups", "run", "start", "checked", "states"),
    [
        # The control of what follows: targets of one group that are imported one after the other.
        (
            LATE, ["stock", "loud"], "eager", ["stock", "mixin"],
            ("attached", ["bound", "bound", "bound"]),
        ),
        (MISFIT, ["stock"], "stock", ["stock"], ("stock", ["stock", "stock", "stock", "failed"])),
    ],
    ids=["fits", "misfit"],
)  # fmt: skip
def test_a_misfit_found_late_takes_the_group_back(fake_sglang, groups, run, start, checked, states):
    """Half a feature is worse than none: who holds a bound class by then has to be stock as well,
    be it a subclass, an instance or a dataclass."""
    fake_sglang.set_groups(groups)
    result = fake_sglang.run(REPORT + STATES)
    assert result.stdout.splitlines() == [
        f"{run} {run} {run} {start} {checked}",
        str({"feature": states}),
    ]
    said = result.stderr.splitlines()
    assert len(said) == (groups is MISFIT)
    for line in said:
        assert "feature group feature stays stock" in line and "motor:Motor does not fit" in line


def test_a_taken_back_class_is_the_stock_one_in_everything(fake_sglang):
    """Constructor, fields, equality and pickle of a dataclass must be upstream's again."""
    fake_sglang.set_groups(MISFIT)
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


def test_other_groups_on_the_same_class_stay(fake_sglang):
    """Groups stack on one class; taking one back must not touch those above and below it."""
    fake_sglang.set_groups(
        {
            "below": (("Engine", "Loud"),),
            "feature": (("Engine", "Louder"), ("motor.Motor", "Drifted")),
            "above": (("Engine", "Loudest"),),
        }
    )
    fake_sglang.write(
        "sglang/srt/mixins.py",
        (fake_sglang.folder / "sglang/srt/mixins.py").read_text()
        + "\nclass Loudest:\n    @override\n    def run(self, steps=1):\n"
        '        return super().run(steps) + ["loudest"]\n',
    )
    code = "from sglang.srt.consumer import Engine; print(Engine().run())\n"
    result = fake_sglang.run(f"{code}import sglang.srt.motor; print(Engine().run())")
    assert result.stdout.splitlines() == [
        "['stock', 'loud', 'louder', 'loudest']",
        "['stock', 'loud', 'loudest']",
    ]


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
"""


@pytest.mark.parametrize(
    ("late", "on", "states"),
    [
        ("Eager", ", 'louder'", "('attached', ['bound', 'bound'])"),
        ("Drifted", "", "('stock', ['stock', 'failed'])"),
    ],
)
def test_an_optional_mixin_is_put_on_who_needs_it(fake_sglang, late, on, states):
    """A feature that is off must be on nobody's path; one that is taken back neither."""
    fake_sglang.write("sglang/srt/flags.py", "def loud(args):\n    return args\n")
    rows = (("Engine", "Louder", "sglang.srt.flags:loud"), ("motor.Motor", late))
    fake_sglang.set_groups({"plain": (("Engine", "Loud"),), "feature": rows})
    result = fake_sglang.run(EQUIP + STATES)
    plain = "['stock', 'loud']"
    loud, turbo = f"['stock', 'loud'{on}]", f"['stock', 'loud', 'turbo'{on}]"
    ours, state = result.stdout.splitlines()
    assert ours == f"{plain} {loud} {turbo} {plain} True"
    assert state == f"{{'plain': ('attached', ['bound']), 'feature': {states}}}"


FEATURES = {
    "base": (("Options", "MoreOptions"),),
    "wire": (("Engine", "Loud"),),
    "cache": (("motor.Motor", "Eager"),),
    "other": (("Engine", "Louder"),),
}
NEEDS = {"cache": ("wire",)}


@pytest.mark.parametrize(
    ("disabled", "run", "start", "off"),
    [
        ("", "['stock', 'loud', 'louder']", "eager", []),
        ("other", "['stock', 'loud']", "eager", ["other"]),
        (" cache , other ", "['stock', 'loud']", "stock", ["cache", "other"]),
        ("wire", "['stock', 'louder']", "stock", ["wire", "cache"]),
    ],
)
def test_groups_are_switched_off_by_name(fake_sglang, disabled, run, start, off):
    """The way back to stock for one feature; what needs it goes with it, and says so."""
    fake_sglang.set_groups(FEATURES, NEEDS)
    result = fake_sglang.run(
        """
        from sglang.srt.consumer import Engine
        from sglang.srt.motor import Motor
        from sglang.srt.patchset import state
        print(Engine().run(), Motor().start())
        print([g.group.name for g in state().groups if g.status.value == "off"])
        """,
        **{DISABLE: disabled},
    )
    assert result.stdout.splitlines() == [f"{run} {start}", str(off)]
    expected = 1 if disabled == "wire" else 0  # that one has consequences
    assert result.stderr.count("So do cache, which need it") == expected
    assert len(result.stderr.splitlines()) == expected


@pytest.mark.parametrize("disabled", ["other,wires", "base"])
def test_unknown_names_are_refused(fake_sglang, disabled):
    """A misspelt name would leave on what the user wants off; a server must not start so."""
    fake_sglang.set_groups(FEATURES, NEEDS)
    result = fake_sglang.run(
        """
        import sglang.srt.consumer
        from sglang.srt.patchset.status import require_switches
        require_switches()
        """,
        check=False,
        **{DISABLE: disabled},
    )
    wrong = disabled.split(",")[-1]
    assert f"PatchsetError: {DISABLE} names '{wrong}', but the feature groups" in result.stderr
    assert "wire, cache, other" in result.stderr
    report = fake_sglang.run(
        "import runpy; runpy.run_module('sglang.srt.patchset', run_name='__main__')",
        check=False,
        **{DISABLE: disabled},
    )
    assert report.returncode == 2 and f"names '{wrong}'" in report.stdout


@pytest.mark.parametrize(
    ("disabled", "message"),
    [
        ("cache", "the feature group cache of sglang-disagg-patchset, which is not attached: "),
        ("wire", "the feature group wire of sglang-disagg-patchset, which is not attached: "),
        ("other", None),
    ],
)
@pytest.mark.parametrize("load", [False, True])
def test_a_flag_names_what_it_lacks(fake_sglang, disabled, message, load):
    """Flag, group and reason; also where the group is off because of another one."""
    fake_sglang.set_groups(FEATURES, NEEDS)
    result = fake_sglang.run(
        f"""
        import sglang.srt.consumer
        from sglang.srt.patchset import require_active
        require_active("--flag", "cache", load={load})
        """,
        check=False,
        **{DISABLE: disabled},
    )
    assert (result.returncode == 0) == (message is None)
    if message:
        last = result.stderr.splitlines()[-1]
        assert f"--flag needs {message}{DISABLE} names it" in last


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 'the library is too old'", "the library is too old"),
        ("raise OSError('no such library')", "OSError: no such library"),
        ("return ''", None),
    ],
)
def test_an_obstacle_keeps_a_group_stock(fake_sglang, body, reason):
    """What is not a question of classes (a library's version) is asked once, before a row is bound,
    costs one line, and reaches whoever gives the flag."""
    fake_sglang.write("sglang/srt/machine.py", f"def obstacle():\n    {body}\n")
    fake_sglang.set_groups(FEATURES, NEEDS, {"wire": "sglang.srt.machine:obstacle"})
    result = fake_sglang.run(
        """
        from sglang.srt.consumer import Engine
        from sglang.srt.motor import Motor
        print(Engine().run(), Motor().start())
        from sglang.srt.patchset import require_active
        require_active("--other", "other")
        require_active("--flag", "cache")
        """,
        check=False,
    )
    if reason is None:
        assert (result.returncode, result.stderr) == (0, "")
        return
    assert result.stdout == "['stock', 'louder'] stock\n"
    first, *_, last = result.stderr.splitlines()
    assert f"feature group wire stays stock: {reason}. So do cache" in first
    assert "--flag needs the feature group wire of sglang-disagg-patchset" in last
    assert last.endswith(reason)
    assert result.stderr.count("stays stock") == 1


def test_without_the_base_nothing_is_attached(fake_sglang):
    """The base holds the checks: without them a feature could be half there, unseen."""
    fake_sglang.set_groups(FEATURES | {"base": (("Options", "Drifted"),)}, NEEDS)
    result = fake_sglang.run(REPORT)
    assert result.stdout == "['stock'] ['stock'] ['stock'] stock ['stock']\n"
    (line,) = result.stderr.splitlines()
    assert "feature group base stays stock" in line and "wire, cache, other" in line


def test_the_groups_of_the_table():
    """Names are the switches; needs name groups that stand before, so that one pass finds all."""
    names = [group.name for group in GROUPS]
    assert names[0] == "base" and len(set(names)) == len(names)
    for at, group in enumerate(GROUPS):
        assert set(group.needs) <= set(names[:at]) and group.rows and group.what
    assert closure(["decode_radix", "nixl_async"]) == (
        "base",
        "delta",
        "nixl_async",
        "decode_radix",
    )
