"""Runs tests in a forked process and reports them in this one."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from typing import Any, BinaryIO  # Any: a report as JSON

import pytest
from _pytest.runner import runtestprotocol

#: Seconds for one test, its server's start included.
PATIENCE = 240

#: By the first test of a group: where its process writes, one line a test, and the process.
_under_way: dict[str, tuple[BinaryIO, int]] = {}


def run(item: pytest.Item, group: list[pytest.Item]) -> None:
    """Reports ``item``; the first call for a ``group`` starts the process that runs all of it."""
    name = group[0].nodeid
    if name not in _under_way:
        _under_way[name] = _start(group)
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, *_under_way[name]):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _start(group: list[pytest.Item]) -> tuple[BinaryIO, int]:
    readable, writable = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(writable)
        return os.fdopen(readable, "rb"), child
    try:
        os.close(readable)
        with os.fdopen(writable, "w") as out:
            for item, following in zip(group, [*group[1:], None], strict=True):
                out.write(json.dumps(_run(item, following)) + "\n")
                out.flush()
    finally:
        os._exit(0)  # NIXL may crash an interpreter at its exit where there is no GPU driver


def _run(item: pytest.Item, following: pytest.Item | None) -> list[Any]:
    to_json = item.config.hook.pytest_report_to_serializable
    return [
        to_json(config=item.config, report=report)
        for report in runtestprotocol(item, nextitem=following, log=False)
    ]


def _reports(item: pytest.Item, stream: BinaryIO, child: int) -> list[pytest.TestReport]:
    ready, _, _ = select.select([stream], [], [], PATIENCE)
    line = stream.readline() if ready else b""
    if line:
        of_json = item.config.hook.pytest_report_from_serializable
        return [of_json(config=item.config, data=data) for data in json.loads(line)]
    if not ready:
        os.kill(child, signal.SIGKILL)
    said = "its process has ended" if ready else f"no result after {PATIENCE} s"
    return [
        pytest.TestReport(
            item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", said, "call"
        )
    ]
