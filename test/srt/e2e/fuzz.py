"""Requests that Schemathesis makes of a server's description, sent to both servers of a pair."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmark.harness.pair import Pair
from benchmark.harness.servers import HOST

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")


def send_for(pair: Pair, seconds: float, workers: int) -> None:
    """Send requests until ``seconds`` are over; each of ``workers`` has a seed of its own.

    Raises:
        AssertionError: a server ended; the message has the request.
    """
    with urllib.request.urlopen(f"{pair.decode_url}/openapi.json", timeout=30) as answer:
        description = json.load(answer)
    ends, rooms = time.monotonic() + seconds, count(1 << 40, 1 << 10)
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(_work, pair, description, n, ends, rooms) for n in range(workers)]
        for each in running:
            each.result()


def _work(pair: Pair, description: dict[str, Any], number: int, ends: float, rooms: Any) -> None:
    operations = schemathesis.openapi.from_dict(description)
    turn = 0
    with ThreadPoolExecutor(2) as both:
        while time.monotonic() < ends:
            path = PATHS[turn % len(PATHS)]
            post = partial(_post_to_both, pair, both, path, ends, rooms)
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
    @given(case=cases)
    def send(case: Any) -> None:
        post(case.body)

    send()


def _post_to_both(
    pair: Pair, both: ThreadPoolExecutor, path: str, ends: float, rooms: Any, body: Any
) -> None:
    if not isinstance(body, dict) or time.monotonic() > ends:
        return
    address = {"bootstrap_host": HOST, "bootstrap_room": next(rooms)}
    address["bootstrap_port"] = pair.layout[0].bootstrap_port
    sent = json.dumps({**body, **address}).encode()
    list(
        both.map(_post, [f"{url}{path}" for url in (pair.prefill_url, pair.decode_url)], [sent] * 2)
    )
    assert all(process.alive for process in pair.processes.values()), sent.decode()


def _post(url: str, body: bytes) -> int:
    """The status; 0 where the client left before the answer, which ends the request."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
