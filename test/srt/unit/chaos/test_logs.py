"""Server logs: which lines are errors, and where in the log they count."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.logs import log_problems

TRACE = """Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
ValueError: no such room

[2026-01-01 00:00:01] going on
"""
RAISED = "[2026-01-01 00:00:00 TP0] Scheduler hit an exception: " + TRACE
STORE = "HiCache store mooncake: batch_set_v1 failed: error -900\n" + TRACE
WORKER = "[2026-01-01 00:00:00] Unexpected transfer worker error for room 7\n" + TRACE
KILLED_PEER = WORKER.replace("no such room", "room 7 left a handle running 5.0s after")
ERROR = "Traceback (most recent call last): ValueError: no such room (1 times)"


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        pytest.param("ERROR room 7 failed: prefill is gone\n", [], id="an error that faults cause"),
        pytest.param("up\n" + RAISED, [f"2: {ERROR}"], id="a traceback"),
        pytest.param(RAISED * 2, [f"1: {ERROR}".replace("1 times", "2 times")], id="twice"),
        pytest.param(STORE, [], id="a killed store"),
        pytest.param(STORE + RAISED, [f"8: {ERROR}"], id="a killed store and another error"),
        pytest.param(KILLED_PEER, [], id="a worker of 0.5.23 with a killed peer"),
        pytest.param(
            KILLED_PEER + WORKER, [f"9: {ERROR}"], id="the same and a worker's own failure"
        ),
        pytest.param(
            "x InvariantError: 3 pages\npool memory leak detected! 16\n",
            [
                "1: InvariantError: InvariantError: 3 pages (1 times)",
                "2: memory leak detected: memory leak detected! 16 (1 times)",
            ],
            id="without a traceback",
        ),
    ],
)
def test_errors_of_a_log(tmp_path: Path, text: str, problems: list[str]) -> None:
    """Guards against alarms about faults that the run itself injects, against forgiving another
    error beside them, and against a report without the cause."""
    (log := tmp_path / "decode.1.log").write_text(text)
    assert log_problems(log) == [f"decode.1.log:{problem}" for problem in problems]


def test_errors_of_a_dying_server_are_left_out(tmp_path: Path) -> None:
    """Guards against blaming the children of a server that was just killed, and against forgiving
    its earlier errors."""
    (log := tmp_path / "prefill.1.log").write_text("up\n" + RAISED)
    assert log_problems(log, killed_at=3) == []
    assert len(log_problems(log, killed_at=3 + len(RAISED))) == 1
