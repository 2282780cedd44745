"""The replay command: killed, stopped, resumed."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmark.agentic import stub
from benchmark.agentic.replay.cli import main
from benchmark.agentic.replay.sink import load
from benchmark.traces.read import write
from benchmark.traces.record import Record

REQUESTS = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stub.process("--gap-ms", "10", "--worker", "w0") as address:
        yield address


@pytest.fixture
def flags(url: str, tmp_path: Path) -> list[str]:
    """A trace of 6 s."""
    trace = tmp_path / "trace.jsonl"
    write(trace, (Record(i * 100.0, 600, 5, (0, i + 1)) for i in range(REQUESTS)))
    out = str(tmp_path / "out.jsonl")
    return ["--url", url, "--trace", str(trace), "--block-tokens", "64", "--out", out]


def begin(flags: list[str], lines: int) -> subprocess.Popen[bytes]:
    """The command in a process of its own, when so many lines of its file are written."""
    command = [sys.executable, "-m", "benchmark.agentic", "replay", *flags]
    # A shell starts what runs behind it deaf to Ctrl-C, and whoever that starts.
    hearing = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=hearing)
    out = Path(flags[-1])
    deadline = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < lines:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_ended_goes_on(
    how: signal.Signals, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards hours of results: killed or stopped, what was answered is kept and not sent again, and
    the whole has each request once, with one time scale."""
    process = begin(flags, 5)
    (child,) = _children(process.pid, "spawn_main")
    process.send_signal(how)
    assert process.wait(30) in (-9, 130)
    before = load(Path(flags[-1])).outcomes
    assert 4 <= len(before) < REQUESTS

    assert main([*flags, "--speed", "2", "--resume"]) == 2
    assert "--speed was 1.0, is 2.0" in " ".join(capsys.readouterr().out.split())
    assert main([*flags, "--resume"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{len(before)} requests were answered before and are not sent again" in said
    after = load(Path(flags[-1])).outcomes
    assert sorted(after) == list(range(REQUESTS))
    assert {index: after[index] for index in before} == dict(before)
    assert Path(flags[-1]).read_bytes().count(b"\n") == REQUESTS + 1
    assert all(o.error is None and o.late_s < 5 for o in after.values())
    assert not Path(f"/proc/{child}").exists() or _is_zombie(child)

    summary = json.loads(Path(flags[-1]).with_suffix(".summary.json").read_text())
    assert summary["report"]["overall"]["requests"] == REQUESTS
    assert summary["report"]["by_prefill_worker"]["w0"]["hit_rate"] > 0.5
    assert summary["settings"]["heavy_tokens"] == 2500  # scaled with the blocks


def test_failures_are_results_unless_they_are_to_be_retried(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards both ways: failures silently sent again would vanish from the error rate."""
    short = [*flags[:-2], "--requests", "3", "--timeout", "0.001", *flags[-2:]]
    assert main(short) == 0
    path = Path(flags[-1])
    assert [o.error for o in load(path).outcomes.values()] == ["timeout"] * 3
    capsys.readouterr()
    assert main([*short, "--resume"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 failed (3 timeout) and are not sent again either" in said
    assert path.read_bytes().count(b"\n") == 4
    assert main([*short, "--resume", "--retry-errors"]) == 0
    assert path.read_bytes().count(b"\n") == 7


def _children(parent: int, text: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_text()
        except OSError:
            continue  # it ended meanwhile
        if int(status[1]) == parent and text in command:
            found.append(int(entry.name))
    return found


def _is_zombie(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
