"""Environment variables: a default, a value, or an error that names the variable."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.patchset import environment
from sglang.srt.patchset.environment import VARIABLES, Variable

PACKAGE = Path(__file__).parents[4] / "python"
SECONDS = environment.BUFFER_READ_TIMEOUT
INTEGER = environment.LOCAL_CHUNK
BOUNDED = environment.NIXL_PROGRESS_DELAY


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_unset_is_the_default(variable: Variable[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a default that the variable itself would refuse if set."""
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
    (BOUNDED, "100000", 100_000),
    (environment.DISABLED_GROUPS, " nixl_async,, buffer_only ", ("nixl_async", "buffer_only")),
    (environment.ACTIVE, "0", False),
    (environment.ACTIVE, " OFF ", False),
    (environment.ACTIVE, "yes", True),
    (environment.CHECK_INVARIANTS, "1", True),
    *((environment.CHECK_INVARIANTS, text, True) for text in ("true", "YES", "y", " on ")),
    *((environment.BUFFER_ALWAYS_FETCH, text, True) for text in ("1", "True")),
    *(
        (environment.BUFFER_ALWAYS_FETCH, text, False)
        for text in ("0", "false", "no", "N", "off", "")
    ),
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
    *((BOUNDED, text) for text in ("-1", "100001")),
    *((environment.BUFFER_ALWAYS_FETCH, text) for text in ("2", "enabled", "ture")),
]


@pytest.mark.parametrize(("variable", "text"), WRONG)
def test_wrong_values(variable: Variable[Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a typing error that silently means the default, or a deadline that never
    comes; the message names the variable, its value and the allowed values."""
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(ValueError) as error:
        variable.read()
    assert str(error.value) == f"{variable.name} must be {variable.allowed}, not {text!r}"


FOR_EVER = 1_000_000  # seconds
MOST = 2**31 - 1
#: The smallest and the largest allowed value of each number, and the effect of a smaller one.
BOUNDS: dict[Variable[Any], tuple[float, float]] = {
    # A prefill rank whose reader is late for half of it stops its rooms; the reader ticks each
    # second, and the interpreter keeps it waiting for seconds.
    environment.QUARANTINE_TIMEOUT: (10, FOR_EVER),
    environment.ADMISSION_TIMEOUT: (1, FOR_EVER),  # 0: no request is admitted
    environment.LOCAL_CHUNK: (1, MOST),
    environment.HANDSHAKE_TIMEOUT: (0.1, FOR_EVER),
    environment.TRANSFER_TIMEOUT: (1, FOR_EVER),  # 0: each chunk is late when it is queued
    environment.CLAIM_TIMEOUT: (10, FOR_EVER),  # requests that come after the announcement fail
    environment.PEER_TIMEOUT: (10, FOR_EVER),  # a decode rank is forgotten between two pings
    environment.QUEUES: (1, MOST),
    environment.THREADS: (1, MOST),
    environment.NIXL_PROGRESS_DELAY: (0, 100_000),  # more: each write waits for it
    environment.BUFFER_READ_TIMEOUT: (0, FOR_EVER),
    environment.STORE_DEADLINE: (0.1, FOR_EVER),  # 0: each call is late, the store is never used
    environment.LOCAL_TOKENS: (0, MOST),
    environment.LOCAL_SHARE: (5e-324, 1),  # a chunk runs every 64 decode steps all the same
    environment.LOCAL_MAX_ITL_MS: (0, MOST),  # every 100 steps all the same
    environment.FALLBACK_PREFILL_TOKENS: (0, MOST),
}


@pytest.mark.parametrize(
    "variable",
    [variable for variable in VARIABLES if type(variable.default) in (int, float)],
    ids=lambda variable: variable.name,
)
def test_servers_work_with_every_allowed_number(
    variable: Variable[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a server that starts with a setting which fails every request, or with a wait
    that Python refuses in a thread: a chunk's deadline of 300 years ended one."""
    lowest, highest = BOUNDS[variable]
    for value in (lowest, highest):
        monkeypatch.setenv(variable.name, str(value))
        assert variable.read() == value
    step = 1 if isinstance(variable.default, int) else 0.01
    for value in (lowest - step, highest + 1):
        monkeypatch.setenv(variable.name, str(value))
        with pytest.raises(ValueError, match=variable.name):
            variable.read()


def test_a_default_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a default that depends on the machine and wins over the variable."""
    monkeypatch.delenv(BOUNDED.name, raising=False)
    assert BOUNDED.read(7) == 7
    monkeypatch.setenv(BOUNDED.name, "3")
    assert BOUNDED.read(7) == 3


def test_each_variable_is_listed_once() -> None:
    """Guards against two variables with one name, and a variable that is in no table."""
    names = [variable.name for variable in VARIABLES]
    assert len(set(names)) == len(names) > 20
    assert {variable.group for variable in VARIABLES} == set(environment.VARIABLE_GROUPS)
    printed = "".join(map(environment.table, environment.VARIABLE_GROUPS))
    assert printed.count("\n| `SGLANG_") == len(VARIABLES)


#: Files that may read the environment: the hook cannot import anything, and attach.py leaves a mark
#: there for the processes that it starts.
READERS = {"environment.py", "sglang_disagg_patchset_hook.py", "attach.py"}


def test_no_other_file_reads_the_environment() -> None:
    """Guards against a variable without a row here, and so without bounds and documentation."""
    files = [path for path in PACKAGE.rglob("*.py") if path.name not in READERS]
    reading = re.compile(r"\bos\.(environ|getenv)\b|\bgetenv\(")
    assert [str(path) for path in files if reading.search(path.read_text())] == []
