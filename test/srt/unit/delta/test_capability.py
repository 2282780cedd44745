"""Negotiation with a prefill server: understood, stock, or not reachable yet."""

from __future__ import annotations

import http.server
import logging
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from sglang.srt.disaggregation.delta import capability, wire

Serve = Callable[[int, bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a bootstrap server that gives one answer; returns its address."""
    running: list[http.server.HTTPServer] = []

    def start(status: int, body: bytes) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status if self.path == capability.ROUTE else 418)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "says",
    [capability.OURS, {"delta": wire.VERSION, "abort": 1}],
    ids=["ours", "of a later release"],
)
def test_who_says_so_takes_a_prefix(serve: Serve, says: object) -> None:
    """Guards against two sides of one release that do not find each other, and against a later one,
    with more capabilities, that loses the old ones."""
    found = capability.fetch_capabilities(serve(200, msgspec.json.encode(says)))
    assert found is not None and found.takes_delta


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b"404: Not Found"),
        (200, b"{}"),
        (200, b'{"hicache": 3}'),
        (200, b"<html>some proxy</html>"),
        (200, b""),
        (200, b"\xff\xfe\x00"),
        (200, b'{"delta": "1"}'),
        (200, b"[1]"),
    ],
)
def test_anything_else_is_a_stock_server(serve: Serve, status: int, body: bytes) -> None:
    """Guards against sending a prefix to a server that would write the start of the prompt into the
    pages of its tail: no clear yes means prefix 0."""
    found = capability.fetch_capabilities(serve(status, body))
    assert found is not None and not found.takes_delta


@pytest.mark.parametrize("offset", [-1, 1])
def test_another_version(serve: Serve, caplog: pytest.LogCaptureFixture, offset: int) -> None:
    """Guards against a prefix for a peer that reads it differently, and against a lost hit rate
    that nobody can explain: the log names both versions."""
    body = msgspec.json.encode({"delta": wire.VERSION + offset})
    with caplog.at_level(logging.WARNING):
        found = capability.fetch_capabilities(serve(200, body))
    assert found is not None and not found.takes_delta
    assert f"protocol {wire.VERSION + offset}" in caplog.text
    assert f"decode server {wire.VERSION}" in caplog.text


@pytest.mark.parametrize("status", [500, 502, 503])
def test_server_errors_are_asked_again(serve: Serve, status: int) -> None:
    """Guards against a prefill server that is just starting and counts as stock for ever."""
    assert capability.fetch_capabilities(serve(status, b"")) is None


def test_connection_refused() -> None:
    """Guards against an exception on the scheduler's thread."""
    with socket.socket() as unused:  # bound, not listening
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert capability.fetch_capabilities(address) is None


def test_address_that_is_none() -> None:
    """Guards against an exception where the load balancer sent an unusable host."""
    assert capability.fetch_capabilities("not a host:port") is None
