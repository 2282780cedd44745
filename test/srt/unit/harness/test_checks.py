"""What a server holds, as each release of SGLang tells it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from benchmark.harness.checks import Load, load

OLD = [{"num_reqs": 3, "num_tokens": 40}, {"num_reqs": 1, "num_tokens": 2}]
NEW = {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 2, "num_used_tokens": 42}]}


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, Any]], str]]:
    """Serves the given answers by their paths, and 404 for all others; gives the URL."""
    started: list[HTTPServer] = []

    def start(answers: dict[str, Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path in answers else 404)
                self.end_headers()
                self.wfile.write(json.dumps(answers.get(self.path)).encode())

            def log_message(self, *args: object) -> None:
                """Nothing."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("answers", [{"/get_load": OLD}, {"/v1/loads": NEW}], ids=["old", "new"])
def test_load_of_each_release(serve: Callable[[dict[str, Any]], str], answers: Any) -> None:
    """Guards against a server of 0.5.23 that is never seen idle: it has another path and names."""
    assert load(serve(answers)) == Load(4, 42)
