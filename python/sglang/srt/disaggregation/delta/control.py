"""Messages beside the transfer, and their sockets: rooms that end early, and signs of life.

SGLang's handshake has one message from decode to prefill and none back that every backend knows.
These go over the same sockets (each rank's ``rank_ip:rank_port``), as two frames: a magic, then one
msgpack map. They are sent only to peers that say in ``GET /pd_capabilities``, or by their delta
frame, that they know them; a stock peer never sees one. Sending never blocks, and nothing that was
queued outlives its peer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import zmq

VERSION = 1
MAGIC = b"sglang-delta-control"


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Decode to prefill: this rank wants nothing more of ``room``; answer with ``Stopped``."""

    room: int
    #: Who is asking (NIXL agent or Mooncake session), and where its control socket listens.
    peer: str
    host: str
    port: int
    reason: str
    #: A rank that writes nothing (a dummy) is not to answer: it would count as a writer.
    wants_answer: bool = True


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """Prefill to decode: the rank ``writer`` writes to the room's pages no more, now and later."""

    room: int
    writer: int
    reason: str
    #: The decode rank that announced the room is not registered here: this server is a new one.
    unknown_peer: bool = False


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Decode to prefill: are you there? ``to`` is the address that was asked, host:port."""

    to: str
    peer: str
    host: str
    port: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Prefill to decode: the answer of the rank at ``to``."""

    to: str
    #: Whether the asking rank is registered there.
    knows_peer: bool


Message: TypeAlias = Withdraw | Stopped | Ping | Pong
_DECODER = msgspec.msgpack.Decoder(Message)


class ControlError(ValueError):
    """A message with our magic that cannot be understood, or one that cannot be written."""


def encode(message: Message) -> list[bytes]:
    """The message as frames for the wire.

    Raises:
        ControlError: it cannot be written: a client chose a room number of more than 64 bits.
    """
    try:
        return [MAGIC, msgspec.msgpack.encode(message)]
    except (OverflowError, UnicodeEncodeError) as error:
        raise ControlError(f"{message} cannot be sent: {error}") from error


def decode(frames: Sequence[bytes]) -> Message | None:
    """The control message in ``frames``, or None: they are of another kind.

    Raises:
        ControlError: they carry our magic and are malformed.
    """
    if not frames or frames[0] != MAGIC:
        return None
    if len(frames) != 2:
        raise ControlError(f"a control message of {len(frames)} frames, 2 wanted")
    try:
        message: Message = _DECODER.decode(frames[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(f"malformed control message: {error}") from error
    return message


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

    def send(self, host: str, port: int, message: Message) -> None:
        """Queue a control message for the peer at ``host``:``port``.

        Raises:
            OSError, ValueError: the address cannot be (``zmq.ZMQError`` is an OSError).
        """
        self.send_frames(host, port, encode(message))

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
        """Throw away what is queued for a peer that is gone."""
        from sglang.srt.utils.network import NetworkAddress

        with self._lock:
            socket = self._sockets.pop(NetworkAddress(host, port).to_host_port_str(), None)
            if socket is not None:
                socket.close()
