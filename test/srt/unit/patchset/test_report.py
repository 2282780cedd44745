"""State, ``require_active`` and the command line."""

from __future__ import annotations

import textwrap

import pytest

from sglang.srt.patchset import GROUPS, TABLE
from sglang.srt.patchset.__main__ import render
from sglang.srt.patchset.status import GroupState, GroupStatus, PatchsetState, RowState, RowStatus
from unit.patchset.conftest import ENGINE, FakeSglang

pytestmark = pytest.mark.slow

MAIN = """
import runpy, sys
sys.argv[1:] = {options}
runpy.run_module("sglang.srt.patchset", run_name="__main__", alter_sys=True)
"""
WRONG = {"SGLANG_DISAGGREGATION_HANDSHAKE_TIMEOUT": "soon"}
OFF = {"SGLANG_PATCHSET": "0"}
GROUP_OFF = {"SGLANG_PATCHSET_DISABLE": "feature"}


@pytest.mark.parametrize(
    ("case", "options", "env", "status", "counts"),
    [
        # The plain call is quick and imports no target; --check imports and binds them all.
        ("all", [], {}, 0, {"patchset active": 1, "pending ": 2, "group feature: pending": 1}),
        ("all", ["--check"], {}, 0, {"bound ": 2, "group feature: attached": 1}),
        # A deployment can check its image by the exit status, even if it wants a group off.
        ("switched off", [], OFF, 1, {"inert: turned off": 1, "stock ": 2}),
        ("switched off", ["--check"], OFF, 1, {"inert: turned off": 1, "stock ": 2}),
        ("a version", [], {}, 1, {"found 0.5.99, expected 0.5.10.post1": 1}),
        ("a version", ["--check"], {}, 1, {"found 0.5.99, expected 0.5.10.post1": 1}),
        (
            "a group",
            [],
            GROUP_OFF,
            0,
            {"group feature: off": 1, "stock ": 2, "DISABLE names it": 1},
        ),
        ("a group", ["--check"], GROUP_OFF, 0, {"group feature: off": 1, "stock ": 2}),
        (
            "a variable",
            [],
            WRONG,
            2,
            {"does not start: SGLANG_DISAGG": 1},
        ),
        ("a misfit", ["--check"], {}, 2, {"failed   sglang.srt.engine:Engine": 1}),
        ("no hook", [], {}, 1, {"hook did not run": 1}),
        # Status 1 would mean inert.
        ("a bug", ["--check"], {}, 2, {}),
    ],
)
def test_the_command(fake_sglang, case, options, env, status, counts):
    """Guards against an installation that looks complete although it is inert, half attached or
    without its .pth."""
    code = MAIN.format(options=options)
    if case == "a version":
        fake_sglang.set_version("0.5.99")
    elif case == "a misfit":
        fake_sglang.set_table((("Engine", "Drifted"),))
    elif case == "a bug":
        fake_sglang.write("sglang/srt/engine.py", "1 / 0")
    elif case == "no hook":
        code = f"import sys; sys.meta_path.pop(0)\n{code}"
    result = fake_sglang.run(code, check=False, **env)
    assert result.returncode == status, result.stderr
    assert {text: result.stdout.count(text) for text in counts} == counts, result.stdout


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("require_active('--flag', 'feature')", ""),
        ("require_active('--flag', 'feature', load=True)", "bound"),
    ],
)
def test_require_active_on_a_healthy_process(fake_sglang, before, after):
    """Arguments are parsed before most targets are imported; a scheduler can require all."""
    result = fake_sglang.run(
        f"""
        import sglang.srt.settings
        from sglang.srt.patchset import require_active, state
        {before}
        print(*{{item.status.value for group in state().groups for item in group.rows}})
        """
    )
    assert result.stdout.strip() == (after or "pending")


def test_require_active_when_inert(fake_sglang):
    """A flag of the patch set on an unpatched SGLang would be accepted without effect."""
    result = fake_sglang.run(
        "from sglang.srt.patchset import require_active; require_active('--flag')",
        check=False,
        SGLANG_PATCHSET="0",
    )
    assert "--flag needs sglang-disagg-patchset, which is inert: turned off" in result.stderr


def test_render_shows_the_reason():
    """The report must show the guard's findings and the condition of an optional mixin."""
    optional = next(row for row in TABLE if row.when)
    row = RowState(optional, RowStatus.FAILED, "drifted")
    group = GroupState(GROUPS[0], GroupStatus.STOCK, "it is old", (row,))
    text = render(PatchsetState("1", "1", "", (group,)))
    assert "failed" in text and "drifted" in text and f"when {optional.when}" in text
    assert f"group {GROUPS[0].name}: stock" in text and "it is old" in text


#: As the loader of SGLang's kernels: it imports ``common_ops`` if its library does not load.
KERNELS = """
def load():
    try:
        raise ImportError("libcuda.so.1: cannot open shared object file")
    except ImportError:
        import common_ops
        assert common_ops.__file__
        return common_ops

common_ops = load()
"""
DRIVER = "import ctypes; ctypes.CDLL = lambda name: None"
NO_DRIVER = """
import ctypes
def missing(name):
    raise OSError(name)
ctypes.CDLL = missing
"""


@pytest.mark.parametrize(
    ("machine", "options", "status", "noted"),
    [
        (NO_DRIVER, ["--check"], 0, 1),
        (NO_DRIVER, [], 0, 0),
        # With a driver, a library that does not load keeps a server from starting.
        (DRIVER, ["--check"], 2, 0),
    ],
)
def test_the_check_needs_no_driver(
    fake_sglang: FakeSglang, machine: str, options: list[str], status: int, noted: int
) -> None:
    """Guards against a check that fails in the build of an image, and one that hides a broken
    library on a machine with a GPU."""
    fake_sglang.write("sgl_kernel/__init__.py", KERNELS)
    fake_sglang.write("sglang/srt/engine.py", f"import sgl_kernel\n{textwrap.dedent(ENGINE)}")
    result = fake_sglang.run(machine + MAIN.format(options=options), check=False)
    assert result.returncode == status, result.stderr
    assert result.stdout.count("without a GPU driver") == noted, result.stdout
