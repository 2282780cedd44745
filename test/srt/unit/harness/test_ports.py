"""Ports: two servers of one run, or of two runs at once, must never get the same one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.harness import ports

ROOT = Path(__file__).resolve().parents[4]
ASK = "from benchmark.harness.ports import allocate_ports; print(*allocate_ports(20), flush=True); "


def test_ports_are_distinct_and_outside_the_kernels_range() -> None:
    """Guards against a port that an outgoing connection of NIXL or ZMQ takes meanwhile."""
    first, second = ports.allocate_ports(20), ports.allocate_ports(20)
    assert len({*first, *second}) == 40
    assert all(20000 <= port < 32000 for port in first + second)


def test_a_port_in_use_is_not_given_out(monkeypatch) -> None:
    """Guards against handing out a port on which somebody else already listens."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = busy.getsockname()[1]
        assert not ports.is_free(taken)
        free = ports.allocate_ports(1)[0]
        ports._held.pop(free).close()
        monkeypatch.setattr(ports, "PORT_RANGE", [taken, free])
        assert ports.allocate_ports(1) == [free]


def test_a_row_goes_round_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that counts up from its port into a port of one beside it; and what
    was reserved of a row that cannot be had is free again."""
    row = ports.allocate_adjacent_ports(15)
    assert row == list(range(row[0], row[0] + 15))
    for port in [*row[:6], *row[7:]]:
        ports._held.pop(port).close()
    monkeypatch.setattr(ports, "PORT_RANGE", range(row[0], row[-1] + 1))
    with pytest.raises(RuntimeError, match="no 9 free ports in a row"):
        ports.allocate_adjacent_ports(9)
    assert ports.allocate_adjacent_ports(8) == row[7:]
    assert not any(port in ports._held for port in row[:6])


def test_another_process_gets_other_ports_while_we_live() -> None:
    """Guards against two runs at once that both find a port free and then both take it."""
    child = subprocess.Popen(
        [sys.executable, "-c", ASK + "input()"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    theirs = set(map(int, child.stdout.readline().split()))
    try:
        assert len(theirs) == 20
        assert not any(ports._reserve(port, "127.0.0.1") for port in theirs)
    finally:
        child.communicate("\n")
    # The lock goes with the process, so that ports do not run out over time.
    assert ports._reserve(min(theirs), "127.0.0.1")
