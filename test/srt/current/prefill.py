"""A prefill server of 0.5.23, whose decode server is the test."""

from __future__ import annotations

from typing import Any  # Any: objects of SGLang

from benchmark.harness.ports import allocate_ports
from current.server import HOST, Server
from sglang.srt.disaggregation.common.conn import AbortNotification
from sglang.srt.disaggregation.nixl.conn import NixlKVBootstrapServer


class Prefill(Server):
    """One rank of a prefill server with its bootstrap server. No KV leaves it: nobody announces
    pages to it."""

    def __init__(self, model: str, *arguments: str, tokens: int = 8000) -> None:
        (port,) = allocate_ports(1)
        # The launcher's part: the scheduler registers there when it is made.
        self.bootstrap = NixlKVBootstrapServer(HOST, port)
        given = ("--disaggregation-bootstrap-port", str(port), *arguments)
        super().__init__(model, "prefill", *given, tokens=tokens)
        self.bootstrapping = self.scheduler.disagg_prefill_bootstrap_queue
        self.manager = self.bootstrapping.kv_manager

    def hear(self, frames: list[bytes]) -> None:
        """A message of decode, as SGLang's reader thread takes it."""
        assert self.call(lambda: self.manager._handle_abort_notification(frames))

    def hear_abort(self, room: int) -> None:
        """Decode has aborted its half of the request."""
        self.hear(AbortNotification(room=room).to_zmq())

    def room(self, rid: str) -> Any:
        """The number of a request's room."""
        return self.requests[rid].bootstrap_room
