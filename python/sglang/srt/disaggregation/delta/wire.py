"""Messages between our servers beside SGLang's: delta frame, control messages, capabilities.

A decode server adds the *delta frame* to SGLang's transfer metadata message, a multipart of eight
positional frames; a stock prefill ignores frames after them. Ours is one more: a magic, then a
msgpack map with named fields. A peer ignores fields that it does not know, and takes the default of
fields that it is not sent. A changed *meaning* raises ``VERSION``, and a peer of another version
fails the room with an error that names both.

*Control messages* report rooms that end early and signs of life, in both directions and on every
backend; SGLang's handshake has only one message, from decode to prefill. They use the same sockets
(each rank's ``rank_ip:rank_port``), as two frames: a magic, then one msgpack map. Only peers that
announce support, in ``GET /pd_capabilities`` or by their delta frame, are sent any.

Version history of the delta frame (``VERSION``):

- 1: prefix length, number of listed pages, dummies, pool sizes. Later fields, which a peer
  may lack: ``takes_metadata`` (metadata in NIXL's note), ``prompt_tokens`` (compared on prefill).

Version history of control messages (``CONTROL_VERSION``):

- 1: ``Withdraw``, ``Stopped``, ``Ping``, ``Pong``. Later: ``Ping.interval_s``, and
  ``ComputedByDecode``, sent only to servers with ``Capabilities.yields``.

Contract: ``PeerSockets`` is used by any thread, under its lock. Sending never blocks, and nothing
that was queued outlives its peer. One more number for prefill takes three files: a field of
``DeltaFrame`` with a default that means "not sent" (None if 0 is a value; ``Count`` refuses
negative numbers), its value in ``decode/queue.py`` (``_announce``), and its reader in
``prefill/scheduler.py`` (``DeltaSender.read_frame``). Add it to docs/wire.md.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, TypeAlias

import msgspec
import requests
import zmq

from sglang.srt.patchset import PROTOCOL_VERSION, environment

logger = logging.getLogger(__name__)

VERSION = PROTOCOL_VERSION
MAGIC = b"sglang-delta:"


#: Exceptions of msgspec at bytes that any sender can choose.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
Count = Annotated[int, msgspec.Meta(ge=0)]


class DeltaFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One room's announcement to one prefill rank."""

    version: int = VERSION

    # Of the request: filled by decode's queue, read by ``DeltaSender.read_frame``.

    #: Number of tokens at the start of the prompt that decode holds; a whole number of pages.
    decode_prefix_len: int
    #: Number of tokens of the whole prompt; 0 if unknown.
    prompt_tokens: Count = 0

    # Of the connection: filled by ``DeltaReceiver.announce``, read by ``check_announcement``.

    #: Number of listed destination pages; zero for a full prefix hit, which is not a dummy.
    num_pages: int = 0
    #: True if this prefill rank sends nothing, not even metadata (MLA with more prefill ranks).
    is_dummy: bool = False
    #: Sizes of decode's pools, the bounds of an index; 0 if unknown.
    pool_pages: Count = 0
    metadata_slots: Count = 0
    #: True if metadata may come in the note that completes the room (NIXL). A prefill server that
    #: does not know the field, or sends no such note, writes them into the slot.
    takes_metadata: bool = False


def encode_frame(frame: DeltaFrame) -> bytes:
    """Return the frame as bytes."""
    return MAGIC + msgspec.msgpack.encode(frame)


#: Maximum number of bytes of metadata in a note; more are written into decode's slot. (They are
#: 1,728, and more for a model that sends hidden states.)
MAX_METADATA = 1 << 15
#: Index of the hidden states among SGLang's metadata buffers.
HIDDEN_STATES = 8
#: Bytes of that buffer on a prefill server without a draft model.
NO_HIDDEN_STATES = 64


def metadata_fit(buffer: int, sent: int, wanted: int) -> bool:
    """Return True if ``sent`` bytes fit a slot of ``wanted`` bytes of a metadata buffer."""
    without_draft = buffer == HIDDEN_STATES and sent == NO_HIDDEN_STATES
    return sent == wanted or (without_draft and sent < wanted)


def metadata_in_host_memory() -> bool:
    """Return True if this process can read and write its metadata buffers. For one kind of
    Mooncake's memory pools SGLang allocates them on the GPU, whatever the backend."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get() != "INTRA_NODE_NVLINK")


# ---- control messages, and their sockets ----

CONTROL_VERSION = 1
CONTROL_MAGIC = b"sglang-delta-control"


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Decode to prefill: write no more for ``room``; answer with ``Stopped``."""

    room: int
    #: Name of the sender (NIXL agent or Mooncake session), and the address of its control socket.
    peer: str
    host: str
    port: int
    reason: str
    #: False for a rank that writes nothing (a dummy), because its answer would count as a writer's.
    wants_answer: bool = True


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """Prefill to decode: no write of the rank ``writer`` to the room's pages is or will be under
    way."""

    room: int
    writer: int
    reason: str
    #: True if the decode rank is not registered here, because this server was restarted.
    unknown_peer: bool = False


class ComputedByDecode(msgspec.Struct, frozen=True, tag="computed_by_decode"):
    """Decode to prefill: this rank computes the request of ``room`` itself and never announces it;
    answer its client with an empty answer. Sent only to servers with ``Capabilities.yields``."""

    room: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Decode to prefill: a sign of life, to be answered. ``to``: the queried address, host:port."""

    to: str
    peer: str
    host: str
    port: int
    #: Seconds until the next ping. The default is SGLang's, for ranks that send no interval.
    interval_s: float = 5.0


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Prefill to decode: the answer of the rank at ``to``."""

    to: str
    #: True if the sender of the ping is registered there.
    knows_peer: bool


Message: TypeAlias = Withdraw | Stopped | ComputedByDecode | Ping | Pong


class ControlError(ValueError):
    """A message with our magic that cannot be parsed, or one that cannot be encoded."""


def encode_control(message: Message) -> list[bytes]:
    """Return the message as frames.

    Raises:
        ControlError: it cannot be encoded: a client chose a room number of more than 64 bits.
    """
    try:
        return [CONTROL_MAGIC, msgspec.msgpack.encode(message)]
    except (OverflowError, UnicodeEncodeError) as error:
        raise ControlError(f"{message} cannot be sent: {error}") from error


#: Maximum number of bytes of a frame, because ZeroMQ reserves the length that any sender names.
#: 16 times the need: the page numbers of a million tokens in pages of one token are 4 MB.
MAX_FRAME = 1 << 26


def bounded_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: zmq.SocketType, host: str | None = None
) -> tuple[int, zmq.Socket[bytes]]:
    """Replace SGLang's ``get_zmq_socket_on_host``: return the port of a socket, and the socket,
    which closes a connection with longer frames."""
    from sglang.srt.utils.network import get_zmq_socket_on_host

    context.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)  # inherited by new sockets
    port, socket = get_zmq_socket_on_host(context, kind, host)
    return port, socket


#: Maximum number of sockets to peers, because any message can name a new address. The least
#: recently used one is closed. (A socket takes two or three descriptors.)
_MAX_SOCKETS = 4096
#: Milliseconds that such a socket gets to send what is queued.
_LINGER_MS = 10_000
#: Milliseconds until the first attempt to connect again; the pause then grows.
_RECONNECT_MS = 1000
#: Longest pause in milliseconds between attempts to connect.
_MAX_RECONNECT_MS = 30_000


class _Context(zmq.Context["zmq.Socket[bytes]"]):
    """A context for all sockets to peers of a process, never collected, because a context that is
    collected waits for its sockets, for ever for those collected with it."""

    _instance = None  # apart from SGLang's instance


class PeerSockets:
    """One PUSH socket for each address ("host:port").

    Send queues have no limit, because a full one would block a scheduler. Rooms under way bound
    their length, and ``drop`` empties the queue of a lost peer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._context = _Context.instance()
        self._context.set(zmq.MAX_SOCKETS, 4 * _MAX_SOCKETS)  # closing sockets count too
        self._clock = clock
        self._lock = threading.Lock()
        #: Sockets with the time of the last message, least recently used first.
        self._sockets: OrderedDict[str, tuple[zmq.Socket[bytes], float]] = OrderedDict()

    def send(self, host: str, port: int, message: Message) -> None:
        """Queue a control message for the peer at ``host``:``port``. ``host`` is an IP address,
        because all sockets share a thread of ZeroMQ, which would block while it resolves a name.

        Raises:
            OSError, ValueError: the address is invalid (``zmq.ZMQError`` is an OSError).
        """
        self.send_frames(host, port, encode_control(message))

    def send_frames(self, host: str, port: int, frames: list[bytes]) -> None:
        """Queue a message of another kind; raises as ``send`` does."""
        from sglang.srt.utils.network import NetworkAddress

        if not host or not 0 < port < 65536:  # ZeroMQ would cut the port to 16 bits
            raise ValueError(f"invalid address of a peer: {host!r}, port {port}")
        address = NetworkAddress(host, port)
        name = address.to_host_port_str()
        with self._lock:
            if name in self._sockets:
                socket = self._sockets[name][0]
            else:
                ipaddress.ip_address(address.host)
                while len(self._sockets) >= _MAX_SOCKETS:
                    self._close_first(_LINGER_MS)
                socket = self._context.socket(zmq.PUSH)
                socket.setsockopt(zmq.SNDHWM, 0)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
                socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
                socket.setsockopt(zmq.IPV6, int(address.is_ipv6))
                try:
                    socket.connect(address.to_tcp())
                except zmq.ZMQError as error:
                    socket.close()
                    raise ValueError(f"invalid address of a peer: {name}: {error}") from error
            self._sockets[name] = socket, self._clock()
            self._sockets.move_to_end(name)
            socket.send_multipart(frames, flags=zmq.NOBLOCK)

    def _close_first(self, linger_ms: int) -> None:
        _, (socket, _) = self._sockets.popitem(last=False)
        socket.close(linger_ms)

    def drop(self, host: str, port: int) -> None:
        """Close the socket of a lost peer, with all that is queued."""
        from sglang.srt.utils.network import NetworkAddress

        with self._lock:
            found = self._sockets.pop(NetworkAddress(host, port).to_host_port_str(), None)
            if found is not None:
                found[0].close()

    def drop_unused(self, for_s: float) -> None:
        """Close sockets unused for ``for_s`` seconds: a live peer has all messages by now, and to a
        lost one ZeroMQ would try to connect for ever."""
        with self._lock:
            until = self._clock() - for_s
            while self._sockets and next(iter(self._sockets.values()))[1] <= until:
                self._close_first(0)


# ---- negotiation: decode sends a prefix only to a server that announces support ----

#: Route of a prefill server's bootstrap server. A new one, because a stock decode server builds its
#: ``PrefillServerInfo`` from every key of the stock answer, and would refuse a new key. A stock
#: prefill answers 404, and then sends whole prompts.
ROUTE = "/pd_capabilities"
#: Value of ``speculative`` of a server that computes no draft KV.
NO_DRAFTS = "none"


class Capabilities(msgspec.Struct, frozen=True):
    """The capabilities of a prefill server.

    ``delta`` and ``control``: the versions of its delta frame and its control messages, or 0.
    ``yields``: True if it ends a request that decode computes itself (``ComputedByDecode``).
    ``incarnation``: an id of this run of the server; after a restart its ranks know no decode rank.
    ``speculative``: its ``--speculative-algorithm``, or ``NO_DRAFTS``; None if unknown.
    ``samples``: True if each of parallel samples has a room of its own (``unserved.py``).
    """

    delta: int = 0
    control: int = 0
    yields: bool = False
    incarnation: str | None = None
    speculative: str | None = None
    samples: bool = False

    @property
    def takes_delta(self) -> bool:
        """True if a decode server of this version may send a prefix length."""
        return self.delta == VERSION

    @property
    def takes_control(self) -> bool:
        """True if it accepts control messages, and sends them."""
        return self.control == CONTROL_VERSION


OURS = Capabilities(delta=VERSION, control=CONTROL_VERSION, samples=True)
STOCK = Capabilities()


def fetch_capabilities(bootstrap_addr: str) -> Capabilities | None:
    """Return the capabilities of the bootstrap server at ``bootstrap_addr`` (host:port), or None if
    the query failed; the caller repeats it later. Blocks.

    An unreadable answer counts as a stock server, because prefix 0 is always right.
    """
    try:
        response = requests.get(
            f"http://{bootstrap_addr}{ROUTE}", timeout=environment.HANDSHAKE_TIMEOUT.read()
        )
    except requests.RequestException as error:
        logger.error(
            "prefill server %s: could not query its capabilities (%s). Its requests wait and the "
            "query is repeated. Check that it is up",
            bootstrap_addr,
            error,
        )
        return None
    if response.status_code == 404:
        logger.warning(
            "prefill server %s does not support decode_prefix_len (stock SGLang?): it will send "
            "whole prompts",
            bootstrap_addr,
        )
        return STOCK
    if response.status_code != 200:
        logger.error(
            "prefill server %s answered %s for %s. Its requests wait and the query is repeated. "
            "Check its log",
            bootstrap_addr,
            response.status_code,
            ROUTE,
        )
        return None
    try:
        capabilities = msgspec.json.decode(response.content, type=Capabilities)
    except UNREADABLE as error:
        logger.error(
            "prefill server %s sent unreadable capabilities (%s): it will send whole prompts. "
            "Check its version",
            bootstrap_addr,
            error,
        )
        return STOCK
    if not capabilities.takes_delta:
        logger.warning(
            "prefill server %s speaks delta protocol %d, this decode server %d: it will send "
            "whole prompts",
            bootstrap_addr,
            capabilities.delta,
            VERSION,
        )
    return capabilities


def incarnation_in(content: bytes) -> str | None:
    """Return the incarnation in a body of ``GET /pd_capabilities``; None if it is unreadable."""
    try:
        return msgspec.json.decode(content, type=Capabilities).incarnation
    except UNREADABLE:
        return None
