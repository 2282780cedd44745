"""Sockets to peers: sending never blocks, and nothing that was queued outlives its peer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import zmq

from sglang.srt.disaggregation.delta import control

#: Peers come and go, and each chooses its own address: the one unused for longest makes room.
_MAX_SOCKETS = 512


class PeerSockets:
    """One PUSH socket an address ("host:port"). Used by several threads.

    A send queue without a limit cannot stop a scheduler; what it may hold is bounded by the rooms
    under way, and ``drop`` throws it away once the peer is gone.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._sockets: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()

    def send(self, host: str, port: int, message: control.Message) -> None:
        """Queue a control message for the peer at ``host``:``port``.

        Raises:
            OSError, ValueError: the address cannot be (``zmq.ZMQError`` is an OSError).
        """
        self.send_frames(host, port, control.encode(message))

    def send_frames(self, host: str, port: int, frames: list[bytes]) -> None:
        """Queue a message of another kind; raises as ``send`` does."""
        from sglang.srt.utils.network import NetworkAddress

        if not host or not 0 < port < 65536:  # ZeroMQ would cut the port to 16 bits
            raise ValueError(f"no peer can be at {host!r}, port {port}")
        address = NetworkAddress(host, port)
        name = address.to_host_port_str()
        with self._lock:
            socket = self._sockets.get(name)
            if socket is None:
                socket = self._open(address)
            self._sockets.move_to_end(name)
            socket.send_multipart(frames, flags=zmq.NOBLOCK)

    def _open(self, address: Any) -> zmq.Socket[bytes]:
        while len(self._sockets) >= _MAX_SOCKETS:
            self._sockets.popitem(last=False)[1].close()
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        if address.is_ipv6:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.connect(address.to_tcp())
        except zmq.ZMQError as error:
            socket.close()
            raise ValueError(f"no peer can be at {address.to_host_port_str()}: {error}") from error
        self._sockets[address.to_host_port_str()] = socket
        return socket

    def drop(self, host: str, port: int) -> None:
        """Forget what is queued for a peer that is gone."""
        from sglang.srt.utils.network import NetworkAddress

        with self._lock:
            socket = self._sockets.pop(NetworkAddress(host, port).to_host_port_str(), None)
            if socket is not None:
                socket.close()
