"""Sends requests that Schemathesis generates from a server's description to a pair: in turn to both
servers at the same time, and to a load balancer, which sends both halves itself."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from threading import Lock
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmark.harness.fleet import Pair
from e2e.support import route

#: Drawing parses sources, which CPython 3.11 cannot do in two threads.
_drawing = Lock()
PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")


def send_for(pair: Pair, balancer_url: str, seconds: float, workers: int) -> None:
    """Send requests until ``seconds`` are over; each of ``workers`` has its own seed.

    Raises:
        AssertionError: a server ended; the message contains the request.
    """
    with urllib.request.urlopen(f"{pair.decode_url}/openapi.json", timeout=30) as answer:
        description = json.load(answer)
    ends = time.monotonic() + seconds
    with ThreadPoolExecutor(workers) as pool:
        running = [
            pool.submit(_work, pair, balancer_url, description, n, ends) for n in range(workers)
        ]
        for worker in running:
            worker.result()


def _work(
    pair: Pair,
    balancer_url: str,
    description: dict[str, Any],
    number: int,
    ends: float,
) -> None:
    operations = schemathesis.openapi.from_dict(description)
    turn = 0
    with ThreadPoolExecutor(2) as both:
        while time.monotonic() < ends:
            path = PATHS[turn % len(PATHS)]
            direct = [f"{url}{path}" for url in (pair.prefill_url, pair.decode_url)]
            # Three paths and two ways: each path goes both ways in six turns.
            urls = [f"{balancer_url}{path}"] if turn % 2 else direct
            post = partial(_post, pair, both, urls, ends)
            _send_some(operations[path]["POST"].as_strategy(), post, 1000 * number + turn)
            turn += 1


def _send_some(cases: Any, post: Callable[[Any], None], number: int) -> None:
    @seed(number)
    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def send(data: Any) -> None:
        with _drawing:
            case = data.draw(cases)
        post(case.body)

    send()


def _post(pair: Pair, pool: ThreadPoolExecutor, urls: list[str], ends: float, body: Any) -> None:
    if not isinstance(body, dict) or time.monotonic() > ends:
        return
    # The load balancer replaces this room by its own.
    sent = json.dumps({**body, **route(pair)}).encode()
    list(pool.map(_status, urls, [sent] * len(urls)))
    assert all(process.alive for process in pair.processes.values()), sent.decode()


def _status(url: str, body: bytes) -> int:
    """Return the status, or 0 if the client disconnected before the answer."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, HTTPException):
        return 0
