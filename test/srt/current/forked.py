"""Runs tests in a forked process and reports their results in this one."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any  # Any: a report as data

import pytest
from _pytest.runner import runtestprotocol

#: Seconds for one test, including the start of its server.
PATIENCE = 240

#: First test of a group -> connection that gets one message a test, and the child's process id.
_under_way: dict[str, tuple[Connection, int]] = {}


def run(item: pytest.Item, group: list[pytest.Item]) -> None:
    """Report ``item``; the first call for a ``group`` starts the process that runs its tests."""
    name = group[0].nodeid
    if name not in _under_way:
        _under_way[name] = _start(group)
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, *_under_way[name]):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _start(group: list[pytest.Item]) -> tuple[Connection, int]:
    # A file may have begun with tests of this process; the child would take them for its own.
    group[0].session._setupstate.teardown_exact(group[0])
    here, there = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        there.close()
        return here, child
    try:
        here.close()
        for item, following in zip(group, [*group[1:], None], strict=True):
            there.send(_run(item, following))
    finally:
        os._exit(0)  # NIXL may crash an interpreter at its exit without a GPU driver


def _run(item: pytest.Item, following: pytest.Item | None) -> list[Any]:
    to_data = item.config.hook.pytest_report_to_serializable
    return [
        to_data(config=item.config, report=report)
        for report in runtestprotocol(item, nextitem=following, log=False)
    ]


def _reports(item: pytest.Item, sent: Connection, child: int) -> list[pytest.TestReport]:
    of_data = item.config.hook.pytest_report_from_serializable
    try:
        if sent.poll(PATIENCE):
            return [of_data(config=item.config, data=data) for data in sent.recv()]
        os.kill(child, signal.SIGKILL)
        reason = f"no result after {PATIENCE} s"
    except EOFError:
        reason = "its process has ended"
    keywords = dict.fromkeys(item.keywords, 1)
    return [pytest.TestReport(item.nodeid, item.location, keywords, "failed", reason, "call")]
