"""The tool that changes the package one line at a time: allowed changes, and the comparison."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[3] / "scripts/mutants.py"), run_name="mutants")
SOURCE = '''
LIMIT = 3

def serve(room: int = 5) -> bool:
    """Not ``1 + 1``."""
    logger.warning("room %d", room + 1)
    assert room != 2
    if room < 7:
        raise ValueError(f"{room + 1}")
    return True
'''


def test_changed_lines(tmp_path: Path) -> None:
    """Guards against mutants that only a log line shows, or that no test could notice."""
    (file := tmp_path / "module.py").write_text(SOURCE)
    changes = [mutant.change for mutant in TOOL["mutants_of"](file)]
    assert sorted(change.split(" => ")[0] for change in changes) == sorted(
        ["if room < 7: raise ValueError(f'{room + 1}')", "room < 7", "room < 7"]
        + ["raise ValueError(f'{room + 1}')", "return True", "True"]
    )
    assert {mutant.function for mutant in TOOL["mutants_of"](file)} == {("serve", 4)}


def test_mutants_that_the_new_tests_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a new suite that kills the same number of mutants, but different ones."""
    for name, first, second in (("old", "test_a", ""), ("new", "", "test_b")):
        rows = f"file,line,change,killed by\na.py,1,x,{first}\na.py,2,y,{second}\n"
        (tmp_path / name).write_text(rows)
    tables = [str(tmp_path / name) for name in ("old", "new")]
    monkeypatch.setattr(sys, "argv", ["mutants.py", "compare", *tables])
    assert TOOL["main"]() == 1
    output = capsys.readouterr().out
    assert "| a.py | 2 | 1 | 1 |" in output and "lost: a.py:1:x: test_a" in output
