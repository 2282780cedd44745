"""Server processes and their ports: no leftovers after a run, no shared ports, clear failures."""

from __future__ import annotations

import http.server
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmark.demo.restarts import EARLY_S, MAX_EARLY, Restarts
from benchmark.harness import checks, ports, process
from benchmark.harness.fleet import Fleet
from benchmark.harness.ports import allocate_ports
from benchmark.harness.process import ServerFailed, ServerProcess, diagnose
from benchmark.harness.servers import ServerConfig
from benchmark.harness.watchdog import group_members

ROOT = Path(__file__).resolve().parents[4]

# A server with a child in a separate process group; it answers no request and ignores all signals
# that it can. The output shows that both run.
STUBBORN = """
import os, signal, subprocess, sys
for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(name, signal.SIG_IGN)
sleeper = "print('up', flush=True); import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleeper], preexec_fn=os.setpgrp)
signal.pause()
"""

# A run that starts the server above and is then killed, so that its clean-up does not happen.
RUN = """
import signal, sys, time
# A shell's background job ignores Ctrl-C, and so would everything started from it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from benchmark.harness.process import ServerProcess
import test_process
log = Path(sys.argv[1])
server = test_process.start(log, test_process.STUBBORN)
test_process.until(lambda: "up" in log.read_text())
print(server.pid, flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def start(log: Path, program: str) -> ServerProcess:
    command = [sys.executable, "-c", program]
    return ServerProcess("server", command, os.environ, log, "http://127.0.0.1:9/health")


def test_stop_ends_children_in_other_process_groups(tmp_path: Path) -> None:
    """Guards against leftover schedulers: killing the process group alone would miss them."""
    log = tmp_path / "log"
    with start(log, STUBBORN) as server:
        until(lambda: "up" in log.read_text())
        assert len(group_members(server.pid)) == 2
    assert group_members(server.pid) == []
    assert not server.alive
    server.stop()  # a second time is harmless


@pytest.mark.parametrize("name", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_servers_end_when_their_run_is_killed(tmp_path: Path, name: signal.Signals) -> None:
    """Guards against servers that hold ports and memory after a killed run, SIGKILL included."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert run.stdout is not None
    try:
        group = int(run.stdout.readline())
        assert len(group_members(group)) == 2
        run.send_signal(name)
        run.wait()
    finally:
        run.kill()
    until(lambda: group_members(group) == [])


@pytest.mark.parametrize(
    ("log", "status", "line"),
    [
        ("OSError: [Errno 98] Address already in use", 1, "a port is taken"),
        ("RuntimeError: Not enough memory. Please try", 1, "memory is short"),
        ("Loading weights", -9, "it ended by signal 9"),
        ("ValueError: no room", -15, "it ended by signal 15: ValueError: no room"),
        (
            "ImportError: libibverbs.so.1: cannot open shared object file: No such file",
            1,
            "a system library is missing: libibverbs.so.1",
        ),
        ("ModuleNotFoundError: No module named 'nixl'", 1, "a Python package is missing: nixl"),
        ("error: unrecognized arguments: --foo", 2, "the server does not know an argument: --foo"),
        ("pool memory leak detected! 1", -3, "SGLang's memory check found a leak"),
        (
            "Traceback\nValueError: no such flag",
            1,
            "it ended with status 1: ValueError: no such flag",
        ),
        # SGLang ends a server whose scheduler raised with the signal that the kernel uses.
        (
            "[t] Scheduler hit an exception: Traceback (most recent call last):\n"
            '  File "x.py", line 1, in f\n    raise InvariantError\n'
            "a.b.InvariantError: rooms are left\n\n[t] SIGQUIT received\n",
            -9,
            "its scheduler failed: a.b.InvariantError: rooms are left",
        ),
        ("", 3, "it ended with status 3"),
        ("", None, "it did not become ready in time"),
    ],
)
def test_diagnosis(log: str, status: int | None, line: str) -> None:
    """Guards the one line that a user of the demo sees."""
    assert diagnose(log, status) == line


BROKEN = (sys.executable, "-c", "raise SystemExit('no such model')")


@pytest.mark.slow
def test_one_failed_server_ends_all(tmp_path: Path) -> None:
    """A server that cannot start ends the others, also those that wait to be ready, and no load
    balancer is started in vain."""
    layout = [
        *file_servers(tmp_path, "prefill"),
        ServerConfig("decode", 1, BROKEN),
        ServerConfig("router", 1, BROKEN),
    ]
    fleet = Fleet(layout, tmp_path / "logs")
    with pytest.raises(ServerFailed, match="decode"), fleet:
        pass
    assert set(fleet.processes) == {"prefill", "decode"}
    assert not any(process.alive for process in fleet.processes.values())


def file_servers(folder: Path, *roles: str) -> list[ServerConfig]:
    """Return servers of files, which answer the readiness check of engines and stores."""
    (folder / "health").touch()
    (folder / "metrics").touch()
    layout = []
    for role, port in zip(roles, allocate_ports(len(roles)), strict=True):
        serve = (http.server.__file__, str(port), "--bind", "127.0.0.1", "-d", str(folder))
        layout.append(ServerConfig(role, port, (sys.executable, *serve)))
    return layout


def kill(fleet: Fleet, name: str) -> None:
    """Kill a server, and wait for its end."""
    process = fleet.processes[name]
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not process.alive)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [0, 2])
def test_a_killed_server_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """Guards against `make serve` ending with one of its servers, and against the kernel being
    blamed for a kill that was not its own."""
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(process, "VMSTAT", vmstat)
    vmstat.write_text("pgfault 7\noom_kill 3\n")
    shown = io.StringIO()
    with Fleet(file_servers(tmp_path, "prefill", "decode"), tmp_path / "logs") as fleet:
        restarts = Restarts([fleet], Console(file=shown, width=300))
        assert restarts.restart_ended() == []
        before = dict(fleet.processes)
        kill(fleet, "prefill")
        vmstat.write_text(f"pgfault 7\noom_kill {3 + kills}\n")
        assert restarts.restart_ended() == ["prefill"]
        assert fleet.processes["prefill"].alive
        assert fleet.processes["decode"] is before["decode"]
        log = tmp_path / "logs" / "prefill.ended.log"
        assert "GET /health" in log.read_text()
    why = "; since it started, the kernel killed 2 processes for lack of memory" if kills else ""
    assert f"prefill: it ended by signal 9{why}. Starting it again" in shown.getvalue()
    assert str(log) in shown.getvalue() and "prefill serves again" in shown.getvalue()


@pytest.mark.slow
def test_a_server_that_ends_again_and_again_is_not_started_again(tmp_path: Path) -> None:
    """Guards against `make serve` restarting for ever a server that cannot serve; one that has
    served starts from zero, and each server of each fleet has its own count."""
    now = 0.0
    store = Fleet(file_servers(tmp_path, "store"), tmp_path / "logs", start_s=20)
    pair = Fleet(file_servers(tmp_path, "prefill"), tmp_path / "logs", start_s=20)
    with store, pair:
        restarts = Restarts([store, pair], Console(file=io.StringIO()), lambda: now)

        def restarted(*names: str) -> bool:
            fleets = {"store": store, "prefill": pair}
            for name in names:
                kill(fleets[name], name)
            return restarts.restart_ended() == list(names)

        assert all(restarted("store") for _ in range(MAX_EARLY - 1))
        now += EARLY_S
        assert restarted("store", "prefill"), "both have served"
        assert all(restarted("store") for _ in range(MAX_EARLY - 1))
        with pytest.raises(ServerFailed, match="store: it ended 3 times in a row") as failed:
            restarted("store")
        assert failed.value.log == tmp_path / "logs" / "store.log"


# A server of files that ends at once if the file of its first argument exists.
FRAGILE = """
import pathlib, runpy, sys
if pathlib.Path(sys.argv.pop(1)).exists():
    sys.exit("broken")
runpy.run_module("http.server", run_name="__main__")
"""


@pytest.mark.slow
def test_a_server_that_ends_while_it_starts_is_started_again(tmp_path: Path) -> None:
    """Guards against `make serve` ending because a server was killed a second time."""
    (server,), broken = file_servers(tmp_path, "prefill"), tmp_path / "broken"
    python, _, *rest = server.command
    server = replace(server, command=(python, "-c", FRAGILE, str(broken), *rest))
    shown = io.StringIO()
    with Fleet([server], tmp_path / "logs") as fleet:
        restarts = Restarts([fleet], Console(file=shown, width=300))
        kill(fleet, "prefill")
        broken.touch()
        restarts.restart_ended()
        assert not fleet.processes["prefill"].alive and "serves again" not in shown.getvalue()
        broken.unlink()
        restarts.restart_ended()
        assert fleet.processes["prefill"].alive and "serves again" in shown.getvalue()
    assert "it ended with status 1. Starting it again" in shown.getvalue()


def test_every_engine_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an unnoticed leak on the second server of a role."""
    checked: list[str] = []
    monkeypatch.setattr(checks, "wait_idle", lambda server, url, timeout_s: checked.append(server))
    monkeypatch.setattr(checks, "assert_healthy", checked.append)
    roles = ("prefill", "decode", "decode", "router", "store")
    fleet = Fleet([ServerConfig(role, 1, ()) for role in roles], tmp_path)
    fleet.processes = {
        name: name for name in ("prefill", "decode-0", "decode-1", "router", "store")
    }
    fleet.check()
    assert checked == ["decode-0", "decode-1", "prefill", *fleet.processes]


CHILD_PROGRAM = (
    "from benchmark.harness.ports import allocate_ports; print(*allocate_ports(20), flush=True); "
)


def test_another_process_gets_other_ports_while_this_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against two concurrent runs that find the same port free and both take it."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD_PROGRAM + "input()"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    child_ports = sorted(map(int, child.stdout.readline().split()))
    monkeypatch.setattr(ports, "PORT_RANGE", range(child_ports[0], child_ports[0] + 1))
    try:
        assert len(set(child_ports)) == 20
        with pytest.raises(RuntimeError, match="no 1 free ports"):
            allocate_ports(1)
    finally:
        child.communicate("\n")
    # The lock ends with the process, so that ports do not run out over time.
    assert allocate_ports(1) == child_ports[:1]
