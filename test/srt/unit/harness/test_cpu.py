"""CPU time that other processes took from the servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.harness import cpu
from benchmark.harness.cpu import Contention, CpuTimes, contention


def test_shares_of_a_span() -> None:
    """Two cores for 10 s: this process and its servers ran 8 s, others 6 s; the servers alone ran
    7 s and waited 3 s."""
    before = CpuTimes(wall=100, machine=50, own=20, ran=10, waited=5)
    after = CpuTimes(wall=110, machine=64, own=28, ran=17, waited=8)
    assert contention(before, after, cores=2) == Contention(waited=0.3, others=0.3)
    assert contention(before, before, cores=2) == Contention(0, 0)


@pytest.mark.parametrize(
    ("waited", "others", "busy"),
    [(0.3, 0.3, True), (0.6, 0.02, False), (0.02, 0.6, False)],
    ids=["both", "servers wait for each other", "others have cores of their own"],
)
def test_a_machine_is_busy_if_others_make_the_servers_wait(
    waited: float, others: float, busy: bool
) -> None:
    assert Contention(waited, others).busy == busy


def test_threads_are_summed(tmp_path: Path) -> None:
    """Guards the fields of schedstat: time on a CPU, time runnable without one, slices."""
    for thread, text in (("7", "100 20 3\n"), ("8", "50 5 1\n")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    (tmp_path / "9").mkdir()  # it ended meanwhile
    assert cpu.scheduled(tmp_path) == (150, 25)
    assert cpu.scheduled(tmp_path / "gone") == (0, 0)


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="no such statistics")
def test_a_child_counts_as_a_server() -> None:
    """Guards against a reading of this process alone, whose servers are its children."""
    before = cpu.now()
    spin = "import time; end = time.process_time() + 0.05\nwhile time.process_time() < end: pass\n"
    with subprocess.Popen(
        [sys.executable, "-c", spin + "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        after = cpu.now()
        child.communicate(b"\n")
    assert after.ran - before.ran >= 0.05 and after.own - before.own >= 0.04
    assert after.machine > before.machine and after.wall > before.wall
