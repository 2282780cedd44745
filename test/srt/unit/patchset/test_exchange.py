"""Names of other packages that are replaced while one object is made."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang.srt.patchset import status as patchset_status
from sglang.srt.patchset.attach import exchanged
from sglang.srt.patchset.status import GroupState, GroupStatus
from sglang.srt.patchset.table import Exchange, Group

SOURCES = Path(patchset_status.__file__).parents[1]
LISTED = Exchange("engines", ("Engine", "inner.Part"), "test")
OURS: dict[str, Any] = {"Engine": "ours", "inner.Part": "our part"}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of another package."""
    module: Any = ModuleType("engines")
    module.Engine, module.inner = "stock", SimpleNamespace(Part="stock part")
    monkeypatch.setitem(sys.modules, "engines", module)
    return module


def attach(monkeypatch: pytest.MonkeyPatch, status: GroupStatus) -> None:
    """Make ``feature`` the only group."""
    group = Group("feature", "test", (), exchanges=(LISTED,))
    now = SimpleNamespace(groups=(GroupState(group, status, "", ()),))
    monkeypatch.setattr(patchset_status, "state", lambda: now)


def names(engines: Any) -> tuple[str, str]:
    return engines.Engine, engines.inner.Part


STOCK = ("stock", "stock part")


@pytest.mark.parametrize(
    ("status", "within"),
    [
        (GroupStatus.ATTACHED, ("ours", "our part")),
        (GroupStatus.PENDING, ("ours", "our part")),
        (GroupStatus.OFF, STOCK),
        (GroupStatus.STOCK, STOCK),
    ],
)
def test_names_are_restored(
    engines: Any, monkeypatch: pytest.MonkeyPatch, status: GroupStatus, within: tuple[str, str]
) -> None:
    """Guards against a feature that is switched off and still changes SGLang's objects, and against
    a NIXL or a store that stays changed for other users, also after an error."""
    attach(monkeypatch, status)
    with exchanged("feature", "engines", OURS):
        assert names(engines) == within
    assert names(engines) == STOCK
    with pytest.raises(ZeroDivisionError), exchanged("feature", "engines", OURS):
        raise ZeroDivisionError
    assert names(engines) == STOCK


@pytest.mark.parametrize(("module", "name"), [("engines", "Other"), ("others", "Engine")])
def test_only_what_the_table_lists(
    engines: Any, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    """Guards against a replaced name that the report does not show."""
    attach(monkeypatch, GroupStatus.ATTACHED)
    with (
        pytest.raises(LookupError, match=f"{module}:{name}"),
        exchanged("feature", module, {**OURS, name: 1}),
    ):
        pass
    assert names(engines) == STOCK


def reaching(tree: ast.AST) -> Iterator[str]:
    """Yield assignments to names of imported modules, and to values found in ``sys.modules``."""
    imported = {
        (name.asname or name.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in node.names
    }
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, ast.Attribute)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            targets = node.args[:1]
        for target in targets:
            owner = ast.unparse(target)
            if owner.partition(".")[0] in imported or "sys.modules" in owner:
                yield f"line {target.lineno}: {owner}"


def test_no_other_file_changes_imported_modules() -> None:
    """Guards against a change of SGLang or NIXL that no table shows and no switch reverts."""
    reached = {
        str(path.relative_to(SOURCES)): found
        for path in SOURCES.rglob("*.py")
        if path.relative_to(SOURCES).parts[0] != "patchset"  # attachment itself
        and (found := list(reaching(ast.parse(path.read_text()))))
    }
    assert reached == {}


def test_reaching_is_found() -> None:
    """Guards against a search that never finds anything."""
    code = (
        "from nixl import _api\nimport sys\n_api.a = 1\nsetattr(sys.modules['x'], 'b', 2)\no.c = 3"
    )
    assert len(list(reaching(ast.parse(code)))) == 2
