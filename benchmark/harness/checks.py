"""Checks after a scenario: both servers are idle, balanced and alive.

SGLang checks its pools whenever its scheduler is idle, and kills the process if they do not add up
(the strict idle memory check, on by default). It is therefore enough to check that a server was
idle for one whole turn of its loop, and is still alive.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from benchmark.harness.process import ServerFailed, ServerProcess

LEAK_MARKS = ("memory leak detected", "Mem Leak Detected", "count_memory_leak_warnings")


@dataclass(frozen=True)
class Load:
    """Load of a server: requests running or waiting, and tokens that they occupy."""

    requests: int
    tokens: int


def load(url: str, timeout_s: float = 30.0) -> Load:
    """Return the load as the scheduler reports it, between two turns of its loop."""
    try:
        ranks = _json(f"{url}/get_load", timeout_s)
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise
        ranks = _json(f"{url}/v1/loads", timeout_s)["loads"]  # SGLang 0.5.23
        requests = sum(r["num_running_reqs"] + r["num_waiting_reqs"] for r in ranks)
        return Load(requests, sum(r["num_used_tokens"] for r in ranks))
    return Load(sum(r["num_reqs"] for r in ranks), sum(r["num_tokens"] for r in ranks))


def _json(url: str, timeout_s: float) -> Any:
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        return json.loads(answer.read())


def wait_idle(server: ServerProcess, url: str, timeout_s: float = 60.0) -> None:
    """Block until the server has passed its idle memory check.

    Several empty answers in a row are required. The scheduler reads a request at the start of a
    turn and runs the check at its end, so each turn between two answers has run it, except the last
    one. Two answers are not enough, because prefill's queue of running transfers is not part of the
    load.

    Raises:
        ServerFailed: it died, as it does when the check fails.
        TimeoutError: it is still busy after ``timeout_s``, for example with a stuck request.
    """
    deadline = time.monotonic() + timeout_s
    empty_answers = 0
    last = Load(-1, -1)
    while empty_answers < 5:
        if not server.alive:
            raise server.failure()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{server.name} is not idle after {timeout_s:.0f} s: {last}")
        try:
            last = load(url)
        except (urllib.error.URLError, OSError):
            empty_answers = 0
            time.sleep(0.2)  # it may be exiting: the next turn checks that
            continue
        # The decode server's running batch empties one turn after its last request has ended.
        empty_answers = empty_answers + 1 if last.requests == 0 else 0
        time.sleep(0.05)


def flush(url: str, timeout_s: float = 30.0, wait_s: float = 0.0) -> None:
    """Empty the cache of an idle server.

    The server may delay it by ``wait_s``: with buffer-only HiCache it first completes its writes to
    the store.

    Raises:
        RuntimeError: the server refused, as it does unless it is fully idle.
    """
    request = urllib.request.Request(f"{url}/flush_cache?timeout={wait_s}", method="POST")
    try:
        urllib.request.urlopen(request, timeout=timeout_s + wait_s).close()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url} refused to flush its cache: {error.read()[:300]!r}") from error


def assert_healthy(server: ServerProcess) -> None:
    """Raise ServerFailed if the server died or reported a leak."""
    text = server.log_text()
    if not server.alive or any(mark in text for mark in LEAK_MARKS):
        error = server.failure()
        if server.alive:
            error = ServerFailed(server.name, "it reported a leak", server.log, error.tail)
        raise error
