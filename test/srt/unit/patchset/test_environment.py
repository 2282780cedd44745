"""Environment variables: a default, a value, or an error that names the variable."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.patchset import environment
from sglang.srt.patchset.environment import VARIABLES, Variable

PACKAGE = Path(__file__).parents[4] / "python"
SECONDS = environment.CLAIM_TIMEOUT
INTEGER = environment.LOCAL_CHUNK
BOUNDED = environment.QUEUES


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda each: each.name)
def test_unset_is_the_default(variable: Variable[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a default that the variable itself would refuse, or that nobody may give."""
    monkeypatch.delenv(variable.name, raising=False)
    assert variable.read() == variable.default
    if isinstance(variable.default, (int, float, str)) and not isinstance(variable.default, bool):
        monkeypatch.setenv(variable.name, str(variable.default))
        assert variable.read() == variable.default


VALUES: list[tuple[Variable[Any], str, Any]] = [
    (SECONDS, "0", 0.0),
    (SECONDS, "2.5", 2.5),
    (SECONDS, "1e-3", 0.001),
    (INTEGER, "1", 1),
    (INTEGER, " 8 ", 8),
    (BOUNDED, "1", 1),
    (BOUNDED, "256", 256),
    (environment.START_METHOD, "fork", "fork"),
    (environment.DISABLED_GROUPS, " nixl_async,, buffer_only ", ("nixl_async", "buffer_only")),
    (environment.ACTIVE, "0", False),
    (environment.ACTIVE, " OFF ", False),
    (environment.ACTIVE, "yes", True),
    (environment.CHECK_INVARIANTS, "1", True),
    *((environment.CHECK_INVARIANTS, text, True) for text in ("true", "YES", "y", " on ")),
    *((environment.LOCAL_ALWAYS, text, True) for text in ("1", "True")),
    *((environment.LOCAL_ALWAYS, text, False) for text in ("0", "false", "no", "N", "off")),
]


@pytest.mark.parametrize(("variable", "text", "value"), VALUES)
def test_values(
    variable: Variable[Any], text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against zero, which turns a feature off, being taken for "not set"."""
    monkeypatch.setenv(variable.name, text)
    assert variable.read() == value


WRONG: list[tuple[Variable[Any], str]] = [
    *((SECONDS, text) for text in ("", "soon", "-0.1", "nan", "inf", "-inf", "1s")),
    *((INTEGER, text) for text in ("", "many", "1.5", "-1", "0x10")),
    *((BOUNDED, text) for text in ("0", "257")),
    (environment.START_METHOD, "forkserver"),
    *((environment.LOCAL_ALWAYS, text) for text in ("", "2", "enabled", "ture")),
]


@pytest.mark.parametrize(("variable", "text"), WRONG)
def test_wrong_values(variable: Variable[Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a typing error that silently means the default, or a deadline that never
    comes; the message says which variable, what it was and what it may be."""
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(ValueError) as error:
        variable.read()
    assert str(error.value) == f"{variable.name} must be {variable.allowed}, not {text!r}"


def test_a_default_of_the_readers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a default that depends on the machine and wins over the variable."""
    monkeypatch.delenv(BOUNDED.name, raising=False)
    assert BOUNDED.read(7) == 7
    monkeypatch.setenv(BOUNDED.name, "3")
    assert BOUNDED.read(7) == 3


def test_each_is_listed_once() -> None:
    """Guards against two variables of one name, and one that is in no table."""
    names = [each.name for each in VARIABLES]
    assert len(set(names)) == len(names) > 20
    assert {each.group for each in VARIABLES} == set(environment.GROUPS)
    printed = "".join(map(environment.table, environment.GROUPS))
    assert printed.count("\n| `SGLANG_") == len(VARIABLES)


#: Who may look into the environment: the hook can import nothing, and attach.py leaves a mark there
#: for the processes that it starts.
READERS = {"environment.py", "sglang_disagg_patchset_hook.py", "attach.py"}


def test_nobody_else_reads_the_environment() -> None:
    """Guards against a variable that has no row here, and so no bounds and no documentation."""
    files = [path for path in PACKAGE.rglob("*.py") if path.name not in READERS]
    reading = re.compile(r"\bos\.(environ|getenv)\b|\bgetenv\(")
    assert [str(path) for path in files if reading.search(path.read_text())] == []
