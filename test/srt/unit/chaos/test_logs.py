"""Server logs: what is an error, and where in the log it counts."""

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
    ("text", "found"),
    [
        pytest.param("ERROR room 7 failed: prefill is gone\n", [], id="an error that faults cause"),
        pytest.param("up\n" + RAISED, [f"2: {ERROR}"], id="a traceback"),
        pytest.param(RAISED * 2, [f"1: {ERROR}".replace("1 times", "2 times")], id="twice"),
        pytest.param(STORE, [], id="a store that was killed"),
        pytest.param(STORE + RAISED, [f"8: {ERROR}"], id="and another error beside it"),
        pytest.param(KILLED_PEER, [], id="a worker of 0.5.23 whose peer was killed"),
        pytest.param(KILLED_PEER + WORKER, [f"9: {ERROR}"], id="and one that failed of itself"),
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
def test_what_is_an_error(tmp_path: Path, text: str, found: list[str]) -> None:
    """Guards against alarms about what a run does to servers, against forgiving another error along
    with it, and against a report from which nobody can tell what happened."""
    (log := tmp_path / "decode.1.log").write_text(text)
    assert log_problems(log) == [f"decode.1.log:{problem}" for problem in found]


def test_what_a_killed_server_says_while_it_dies_is_left_out(tmp_path: Path) -> None:
    """Guards against blaming a process whose parent was just killed, and against forgiving what it
    said before."""
    (log := tmp_path / "prefill.1.log").write_text("up\n" + RAISED)
    assert log_problems(log, killed_at=3) == []
    assert len(log_problems(log, killed_at=3 + len(RAISED))) == 1
