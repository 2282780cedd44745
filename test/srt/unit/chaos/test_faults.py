"""Signals to sessions of processes, tried on dummy servers."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmark.harness.process import ServerProcess
from benchmark.harness.watchdog import group_members
from chaos import faults

# A server with two children, one of them with a title as SGLang's scheduler has and in a process
# group of its own. All count as long as they run.
SERVER = """
import os, sys, time
import setproctitle
for title, own_group in (("sglang::detokenizer", False), ("sglang::scheduler_TP0", True)):
    if os.fork() == 0:
        if own_group:
            os.setpgrp()
        setproctitle.setproctitle(title)
        break
count = 0
while True:
    count += 1
    with open(os.path.join(sys.argv[1], str(os.getpid())), "w") as out:
        out.write(str(count))
    time.sleep(0.01)
"""


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Waits for a condition, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A running dummy, each of whose processes writes a rising number to a file named by its id."""
    (tmp_path / "counts").mkdir()
    command = [sys.executable, "-c", SERVER, str(tmp_path / "counts")]
    log = tmp_path / "log"
    with ServerProcess("dummy", command, os.environ, log, "http://127.0.0.1:9") as process:
        until(lambda: len(list((tmp_path / "counts").iterdir())) == 3)
        yield process


def running(folder: Path) -> set[int]:
    """The processes that count on within a fifth of a second."""

    def counts() -> dict[int, str]:
        return {int(path.name): path.read_text() for path in (folder / "counts").iterdir()}

    before = counts()
    time.sleep(0.2)
    return {pid for pid, count in counts().items() if count != before[pid]}


def test_a_stopped_server_does_nothing_until_it_goes_on(
    server: ServerProcess, tmp_path: Path
) -> None:
    """Guards against a child, in whatever process group, that works on in a "stopped" server: the
    fault would be another one than the plan says."""
    members = set(group_members(server.pid))
    assert running(tmp_path) == members
    stopped = faults.stop_all(server.pid)
    assert set(stopped) == members and len(members) == 3
    assert running(tmp_path) == set()
    faults.signal_all(stopped, signal.SIGCONT)
    until(lambda: running(tmp_path) == members)


def test_only_the_scheduler_stops(server: ServerProcess, tmp_path: Path) -> None:
    """Guards against stopping the wrong child: the server must go on answering heartbeats."""
    members = set(group_members(server.pid))
    scheduler = faults.scheduler_of(server.pid)
    assert scheduler in members - {server.pid}
    faults.signal_all([scheduler], signal.SIGSTOP)
    faults.wait_stopped([scheduler])
    assert faults.process_state(scheduler) == "T"
    assert running(tmp_path) == members - {scheduler}
    faults.signal_all([scheduler], signal.SIGCONT)
    until(lambda: running(tmp_path) == members)


def test_a_stopped_server_can_be_killed(server: ServerProcess) -> None:
    """Guards against a run that ends within a fault and leaves stopped processes behind."""
    faults.stop_all(server.pid)
    server.stop()
    assert group_members(server.pid) == []


def test_missing_processes(server: ServerProcess) -> None:
    """Guards against a fault that hits nothing and is counted all the same."""
    with pytest.raises(LookupError, match="0 processes titled nothing"):
        faults.scheduler_of(server.pid, b"nothing")
    pid = server.pid
    server.stop()
    assert faults.process_state(pid) is None
    faults.signal_all([pid], signal.SIGCONT)  # gone: no error
    with pytest.raises(LookupError, match="0 processes"):
        faults.scheduler_of(pid)
    assert faults.stop_all(pid) == []


def test_a_process_that_does_not_stop_is_reported(server: ServerProcess) -> None:
    """Guards against waiting forever, or not at all."""
    with pytest.raises(TimeoutError, match="does not stop"):
        faults.wait_stopped([server.pid], timeout_s=0.05)
