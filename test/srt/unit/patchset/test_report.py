"""State, ``require_active`` and the command line."""

from __future__ import annotations

import pytest

from sglang.srt.patchset import GROUPS, TABLE, Replacement
from sglang.srt.patchset.__main__ import render
from sglang.srt.patchset.status import GroupState, GroupStatus, RowState, RowStatus, State

pytestmark = pytest.mark.slow

MAIN = "import runpy; runpy.run_module('sglang.srt.patchset', run_name='__main__', alter_sys=True)"
CHECK = "import sys; sys.argv.append('--check'); " + MAIN


def test_the_table_names_what_exists():
    """A misspelt row would stay pending for ever, and no one would notice."""
    assert all(isinstance(row, Replacement) and row.why for row in TABLE)
    assert len({(row.target, row.mixin) for row in TABLE}) == len(TABLE)
    assert all(row.mixin.count(":") == 1 and row.module.startswith("sglang.srt.") for row in TABLE)


def test_active(fake_sglang):
    """The plain call is quick and imports no target; --check imports and binds them all."""
    result = fake_sglang.run(MAIN)
    assert "patchset active" in result.stdout and result.stdout.count("pending ") == 2
    assert "group feature: pending" in result.stdout
    checked = fake_sglang.run(CHECK).stdout
    assert checked.count("bound ") == 2 and "group feature: attached" in checked


@pytest.mark.parametrize("code", [MAIN, CHECK])
def test_inert_is_an_error(fake_sglang, code):
    """A deployment can check its image by the exit status."""
    result = fake_sglang.run(code, check=False, SGLANG_PATCHSET="0")
    assert result.returncode == 1
    assert "inert: turned off" in result.stdout and result.stdout.count("stock ") == 2
    fake_sglang.set_version("0.5.99")
    result = fake_sglang.run(code, check=False)
    assert result.returncode == 1
    assert "found 0.5.99, expected 0.5.10.post1" in result.stdout


def test_a_failed_row_is_an_error(fake_sglang):
    """Half attached is worse than not attached: the check has to say so."""
    fake_sglang.set_table((("Engine", "Drifted"),))
    result = fake_sglang.run(CHECK, check=False)
    assert result.returncode == 2 and "failed   sglang.srt.engine:Engine" in result.stdout
    assert "group feature: stock" in result.stdout


@pytest.mark.parametrize("code", [MAIN, CHECK])
def test_a_group_that_is_switched_off_is_no_error(fake_sglang, code):
    """A deployment that wants it so must still be able to check its image."""
    result = fake_sglang.run(code, SGLANG_PATCHSET_DISABLE="feature")
    assert "group feature: off" in result.stdout
    assert (
        result.stdout.count("stock ") == 2 and "SGLANG_PATCHSET_DISABLE names it" in result.stdout
    )


def test_without_the_hook_the_report_says_so(fake_sglang):
    """An installation whose .pth was lost looks complete otherwise."""
    result = fake_sglang.run(f"import sys; sys.meta_path.pop(0); {MAIN}", check=False)
    assert result.returncode == 1 and "hook did not run" in result.stdout


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("require_active('--flag', 'feature')", ""),
        ("require_active('--flag', 'feature', load=True)", "bound"),
    ],
)
def test_require_active_on_a_healthy_process(fake_sglang, before, after):
    """Arguments are parsed before most targets are imported; a scheduler can insist on all."""
    result = fake_sglang.run(
        f"""
        import sglang.srt.settings
        from sglang.srt.patchset import require_active, state
        {before}
        print(*{{item.status.value for item in state().rows}})
        """
    )
    assert result.stdout.strip() == (after or "pending")


def test_require_active_when_inert(fake_sglang):
    """A flag of ours on an unpatched SGLang would be accepted and do nothing."""
    result = fake_sglang.run(
        "from sglang.srt.patchset import require_active; require_active('--flag')",
        check=False,
        SGLANG_PATCHSET="0",
    )
    assert "--flag needs sglang-disagg-patchset, which is inert: turned off" in result.stderr


def test_render_shows_the_reason():
    """What the guard found has to reach whoever runs the command; and on whom a mixin is put."""
    optional = next(row for row in TABLE if row.when)
    row = RowState(optional, RowStatus.FAILED, "drifted")
    group = GroupState(GROUPS[0], GroupStatus.STOCK, "it is old", (row,))
    text = render(State("1", "1", "", (group,)))
    assert "failed" in text and "drifted" in text and f"when {optional.when}" in text
    assert f"group {GROUPS[0].name}: stock" in text and "it is old" in text
