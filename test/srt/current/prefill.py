"""A prefill server of 0.5.23; the test takes the part of its decode server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any  # Any: objects of SGLang

import numpy as np

from benchmark.harness.ports import allocate_ports
from current.server import HOST, Server
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification, CommonKVBootstrapServer
from sglang.srt.disaggregation.nixl.conn import TransferInfo


class Prefill(Server):
    """One rank of a prefill server with its bootstrap server.

    KV that it sends is queued and never read: ``sent``.
    """

    def __init__(self, model: str, *arguments: str, tokens: int = 8000) -> None:
        (port,) = allocate_ports(1)
        # In SGLang the launcher starts it; the scheduler registers there when it is created.
        self.bootstrap = CommonKVBootstrapServer(HOST, port)
        arguments_with_port = ("--disaggregation-bootstrap-port", str(port), *arguments)
        super().__init__(model, "prefill", *arguments_with_port, tokens=tokens)
        self.bootstrapping = self.scheduler.disagg_prefill_bootstrap_queue
        self.manager = self.bootstrapping.kv_manager
        #: Chunks of KV for NIXL's threads, oldest first.
        self.sent: list[Any] = []
        self.manager.transfer_queues = [SimpleNamespace(put=self.sent.append)]

    def hear(self, frames: list[bytes]) -> None:
        """Pass a message of decode to the manager, as SGLang's reader thread does."""
        assert self.call(lambda: self.manager._handle_abort_notification(frames))

    def hear_abort(self, room: int) -> None:
        """Pass the message that decode has aborted its half of the request."""
        self.hear(AbortNotification(room=room).to_zmq())

    def announce(self, rid: str) -> None:
        """Announce decode's pages for a request, without a prefix on decode."""
        room, pages = self.room(rid), np.zeros(1, np.int32)
        info = TransferInfo(room, HOST, 1, "decode", pages, 0, 1, [])
        self.manager.transfer_infos[room] = {info.agent_name: info}
        self.manager.update_status(room, KVPoll.WaitingForInput)

    def transferred(self, rid: str) -> None:
        """Report that all KV of a request has arrived on decode."""
        self.manager.update_status(self.room(rid), KVPoll.Success)

    def room(self, rid: str) -> Any:
        """Return the number of a request's room."""
        return self.requests[rid].bootstrap_room
