"""Server logs: what is an error, and where in the log it counts."""

from pathlib import Path

from chaos.logs import log_problems

TRACE = """[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
ValueError: no such room

[2026-01-01 00:00:01] going on
"""


def test_a_quiet_log_is_fine(tmp_path: Path) -> None:
    """Guards against alarms about the error lines that faults rightly cause."""
    log = tmp_path / "decode.1.log"
    log.write_text("ERROR room 7 failed: prefill is gone\nAttempting to reconnect to 1.2.3.4:5\n")
    assert log_problems(log) == []


def test_a_traceback_is_named_by_its_error(tmp_path: Path) -> None:
    """Guards against a report from which nobody can tell what happened."""
    log = tmp_path / "decode.1.log"
    log.write_text("up\n" + TRACE * 2)
    (problem,) = log_problems(log)
    assert problem.startswith("decode.1.log:2: ")
    assert problem.endswith("ValueError: no such room (2 times)")


def test_a_store_that_failed_is_no_trouble_of_the_server(tmp_path: Path) -> None:
    """Guards against alarms about stores that a run kills, and against forgiving another error
    along with theirs."""
    trace = TRACE.partition("exception: ")[2]
    log = tmp_path / "prefill.1.log"
    log.write_text(f"HiCache store mooncake: batch_set_v1 failed: error -900\n{trace}")
    assert log_problems(log) == []
    log.write_text(log.read_text() + TRACE)
    (problem,) = log_problems(log)
    assert problem.endswith("ValueError: no such room (1 times)")


def test_a_worker_whose_peer_was_killed_is_no_trouble(tmp_path: Path) -> None:
    """Guards against alarms about decode servers that a run kills, and against forgiving a worker
    of SGLang 0.5.23 another error."""
    said = "[2026-01-01 00:00:00] Unexpected transfer worker error for room 7\n"
    trace = TRACE.partition("exception: ")[2]
    log = tmp_path / "prefill.1.log"
    log.write_text(said + trace.replace("no such room", "room 7 left a handle running 5.0s after"))
    assert log_problems(log) == []
    log.write_text(log.read_text() + said + trace)
    (problem,) = log_problems(log)
    assert problem.endswith("ValueError: no such room (1 times)")


def test_what_a_killed_server_says_while_it_dies_is_left_out(tmp_path: Path) -> None:
    """Guards against blaming a process whose parent was just killed, and against forgiving what it
    said before."""
    log = tmp_path / "prefill.1.log"
    log.write_text("up\n" + TRACE)
    assert log_problems(log, killed_at=3) == []
    assert len(log_problems(log, killed_at=3 + len(TRACE))) == 1


def test_leaks_and_broken_invariants_count_without_a_traceback(tmp_path: Path) -> None:
    """Guards against a check whose finding nobody reads."""
    log = tmp_path / "decode.2.log"
    log.write_text("x InvariantError: 3 pages\npool memory leak detected! 16\n")
    assert [line.split(": ")[1] for line in log_problems(log)] == [
        "InvariantError",
        "memory leak detected",
    ]
