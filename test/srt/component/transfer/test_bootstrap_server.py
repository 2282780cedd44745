"""SGLang's bootstrap server with our route, and a rank's socket: their answers and limits."""

from __future__ import annotations

import http.client
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from benchmark.harness.ports import allocate_ports
from sglang.srt import server_args
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.manager import DeltaBootstrapServer
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVBootstrapServer
from sglang.srt.disaggregation.nixl.conn import NixlKVBootstrapServer
from sglang.srt.disaggregation.utils import DisaggregationMode


class Rank(conn.CommonKVManager):
    """A prefill rank with SGLang's own socket, and nothing else."""

    moves_deltas = True

    def register_to_bootstrap(self) -> None: ...


def test_a_frame_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an unknown sender that makes a rank reserve memory without a limit. A frame of
    the longest prompt is accepted, and other connections stay."""
    for name in ("tp_size", "tp_rank", "cp_size", "cp_rank", "dp_size", "dp_rank"):
        monkeypatch.setattr(conn, f"get_attention_{name}", lambda: 1)
    monkeypatch.setattr(conn, "get_local_ip_auto", lambda: "127.0.0.1")
    monkeypatch.setattr(conn, "get_pp_group", lambda: None)
    monkeypatch.setattr(Rank, "__abstractmethods__", frozenset())
    stock = conn.get_zmq_socket_on_host
    server = SimpleNamespace(
        host="", disaggregation_bootstrap_port=0, dist_init_addr=None, dp_size=1, pp_size=1,
        enable_dp_attention=False,
    )  # fmt: skip
    args = SimpleNamespace(system_dp_rank=0, pp_rank=0)
    manager: Any = Rank(args, DisaggregationMode.PREFILL, server)
    assert conn.get_zmq_socket_on_host is stock
    context = zmq.Context.instance()
    near, far = (context.socket(zmq.PUSH) for _ in range(2))
    closed = far.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        for each in (near, far):
            each.setsockopt(zmq.LINGER, 0)
            each.connect(f"tcp://127.0.0.1:{manager.rank_port}")

        def arrived() -> int:
            assert manager.server_socket.poll(20_000)
            return len(manager.server_socket.recv())

        near.send(b"before")
        assert arrived() == len(b"before")
        far.send(bytes(wire.MAX_FRAME + 1))
        assert closed.poll(20_000), "the connection is closed"
        near.send(bytes(wire.MAX_FRAME))
        assert arrived() == wire.MAX_FRAME
    finally:
        for each in (near, far, manager.server_socket):
            each.close(0)


@contextmanager
def started(kind: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield a backend's bootstrap server with our route, its address, and its first answer."""
    (port,) = allocate_ports(1)
    server, address = kind("127.0.0.1", port), f"127.0.0.1:{port}"
    try:
        for _ in range(400):  # wait for its thread; refused connections return at once
            if (found := wire.fetch_capabilities(address)) is not None:
                break
            threading.Event().wait(0.05)
        yield server, address, found
    finally:
        server.close()


@pytest.mark.parametrize(
    ("kind", "takes"),
    [
        (NixlKVBootstrapServer, True),
        (MooncakeKVBootstrapServer, True),
        # The server of a stock backend, or of one without an attached feature group.
        (conn.CommonKVBootstrapServer, False),
    ],
)
def test_it_says_what_it_takes(monkeypatch: pytest.MonkeyPatch, kind: Any, takes: bool) -> None:
    """Guards against a route that is missing, or that stock's own routes hide; and against a
    prefill server that would write whole prompts into the pages of a delta."""
    drafting = SimpleNamespace(speculative_algorithm="EAGLE")
    monkeypatch.setattr(server_args, "_global_server_args", drafting)
    with started(kind) as (server, _, found):
        assert found is not None and bool(found.incarnation) == takes
        expected = wire.OURS if takes else wire.STOCK
        assert msgspec.structs.replace(found, incarnation=None, speculative=None) == expected
        assert found.speculative == ("EAGLE" if takes else None)
        assert isinstance(server, DeltaBootstrapServer)


PATHS = ("/route", "/register_dp_rank", "/query_dp_ranks", "/health", wire.ROUTE, "/", "/x")
QUERIES = ("", "?prefill_dp_rank=x", "?prefill_dp_rank=-1&prefill_cp_rank=" + "9" * 5000, "?%ff")
BODIES = (
    *(b"", b"{", b"[]", b"null", b'{"bootstrap_rooms": 3}', b'{"bootstrap_room": "x"}'),
    *(b"[" * 5000, b'{"rank_port": "x", "page_size": null}', b"\xff" * 100),
)


def test_broken_requests() -> None:
    """Guards against a request of any method, path and body, or a truncated one, that ends the
    thread through which all decode servers connect, or changes its answers."""
    rng, answered = random.Random(3), 0
    with started(conn.CommonKVBootstrapServer) as (_, address, before):
        host, port = address.split(":")
        for number in range(400):
            with socket.create_connection((host, int(port)), timeout=30) as raw:
                if number % 8 == 0:
                    raw.sendall(rng.randbytes(rng.randrange(200)))
                    continue  # not HTTP, and closed without waiting for an answer
                method = rng.choice(("GET", "PUT", "POST", "DELETE", "HEAD"))
                body = rng.choice((*BODIES, rng.randbytes(50)))
                length = len(body) + (1000 if number % 8 == 1 else 0)  # cut off
                head = f"{method} {rng.choice(PATHS)}{rng.choice(QUERIES)} HTTP/1.1\r\nHost: p\r\n"
                head += f"Content-Length: {length}\r\nContent-Type: application/json\r\n\r\n"
                raw.sendall(head.encode() + body)
                if length == len(body):
                    http.client.HTTPResponse(raw, method=method).begin()
                    answered += 1
        assert answered == 300 and wire.fetch_capabilities(address) == before
