"""What goes between our servers beside SGLang's messages: frame, control messages, capabilities.

The *delta frame* is what a decode server adds to SGLang's transfer metadata message. That is a
multipart of eight positional frames, and a stock prefill ignores frames after them. Ours is one
more: a magic, then a msgpack map with named fields, so that fields can be added without breaking a
peer. A changed *meaning* raises ``VERSION``, and a peer that speaks another version fails the room
with an error that says so.

*Control messages* tell of rooms that end early, and signs of life, in both directions and on every
backend, where SGLang's handshake has one message from decode to prefill. They go over the same
sockets (each rank's ``rank_ip:rank_port``), as two frames: a magic, then one msgpack map; and only
to peers that say in ``GET /pd_capabilities``, or by their delta frame, that they know them. Sending
never blocks, and nothing that was queued outlives its peer.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import requests
import zmq

from sglang.srt.patchset import PROTOCOL_VERSION, environment

logger = logging.getLogger(__name__)

VERSION = PROTOCOL_VERSION
MAGIC = b"sglang-delta:"


class DeltaFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One room's announcement to one prefill rank."""

    version: int = VERSION
    #: Tokens at the start of the prompt that decode already holds; a whole number of pages.
    decode_prefix_len: int
    #: Destination pages listed in the message; zero for a full prefix hit, which is not a dummy.
    num_pages: int
    #: This prefill rank is to send nothing, not even metadata (MLA with more prefill ranks).
    is_dummy: bool
    #: Prefill ranks that will write for this room to this decode rank.
    num_writers: int = 1
    #: Pages and metadata slots of decode's pools: what an index may be; 0 where it does not say.
    pool_pages: int = 0
    metadata_slots: int = 0
    #: It takes the metadata in the note that completes the room (NIXL). A prefill server that does
    #: not know the field, or moves notes in another way, writes them into the slot.
    takes_metadata: bool = False
    #: Tokens of the whole prompt; 0 if unknown.
    prompt_tokens: int = 0


def encode_frame(frame: DeltaFrame) -> bytes:
    """The frame as bytes for the wire."""
    return MAGIC + msgspec.msgpack.encode(frame)


#: Bytes of metadata that go into a note; more are written into decode's slot. (A model that sends
#: hidden states may have more; without them they are 1,728.)
MOST_METADATA = 1 << 15
#: The hidden states among SGLang's metadata buffers, and their bytes on a prefill server that has
#: no draft model.
HIDDEN_STATES, NO_HIDDEN_STATES = 8, 64


def metadata_fit(buffer: int, sent: int, wanted: int) -> bool:
    """Whether ``sent`` bytes belong into a slot of ``wanted`` bytes of a metadata buffer."""
    without_draft = buffer == HIDDEN_STATES and sent == NO_HIDDEN_STATES
    return sent == wanted or (without_draft and sent < wanted)


def metadata_in_host_memory() -> bool:
    """Whether the metadata buffers of this process are where it can read and write them itself:
    for one kind of Mooncake's memory pools SGLang makes them on the GPU, whatever the backend."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get() != "INTRA_NODE_NVLINK")


# ---- control messages, and their sockets ----

CONTROL_VERSION = 1
CONTROL_MAGIC = b"sglang-delta-control"


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


class ComputedByDecode(msgspec.Struct, frozen=True, tag="computed_by_decode"):
    """Decode to prefill: this rank computes the request of ``room`` itself and will never announce
    it; its client is to be given an empty answer. Sent only to servers that say they know it."""

    room: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Decode to prefill: are you there? ``to`` is the address that was asked, host:port."""

    to: str
    peer: str
    host: str
    port: int
    #: Seconds until the next ping. The default is SGLang's, for ranks that do not send it.
    interval_s: float = 5.0


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Prefill to decode: the answer of the rank at ``to``."""

    to: str
    #: Whether the asking rank is registered there.
    knows_peer: bool


Message: TypeAlias = Withdraw | Stopped | ComputedByDecode | Ping | Pong


class ControlError(ValueError):
    """A message with our magic that cannot be understood, or one that cannot be written."""


def encode_control(message: Message) -> list[bytes]:
    """The message as frames for the wire.

    Raises:
        ControlError: it cannot be written: a client chose a room number of more than 64 bits.
    """
    try:
        return [CONTROL_MAGIC, msgspec.msgpack.encode(message)]
    except (OverflowError, UnicodeEncodeError) as error:
        raise ControlError(f"{message} cannot be sent: {error}") from error


#: Bytes of the longest frame that a rank takes, and 16 times what is needed: the page numbers of a
#: prompt of a million tokens in pages of one token are 4 MB. ZeroMQ reserves what a stranger says
#: that its frame has.
MOST_FRAME = 1 << 26


def bounded_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: zmq.SocketType, host: str | None = None
) -> tuple[int, zmq.Socket[bytes]]:
    """SGLang's ``get_zmq_socket_on_host``: the port of a socket that closes a connection over which
    a longer frame comes, and the socket."""
    from sglang.srt.utils.network import get_zmq_socket_on_host

    context.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME)  # of the sockets that it makes
    port, socket = get_zmq_socket_on_host(context, kind, host)
    return port, socket


#: Peers come and go, and each chooses its own address: the one unused for longest makes room, and
#: gets so many milliseconds for what it has not sent. (A socket takes two or three descriptors.)
_MAX_SOCKETS, _LEAVING_MS = 4096, 10_000
#: Milliseconds between attempts to connect: the first pause, and the longest.
_RECONNECT_MS, _LONGEST_RECONNECT_MS = 1000, 30_000


class _Context(zmq.Context["zmq.Socket[bytes]"]):
    """One for all sockets to peers of a process: a context that is collected waits for its sockets,
    and would wait for ever for those that are collected with it."""

    _instance = None  # not SGLang's


class PeerSockets:
    """One PUSH socket an address ("host:port"). Used by several threads.

    A send queue without a limit cannot stop a scheduler; what it may hold is bounded by the rooms
    under way, and ``drop`` throws it away once the peer is gone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._context = _Context.instance()
        self._context.set(zmq.MAX_SOCKETS, 4 * _MAX_SOCKETS)  # those that leave count too
        self._clock = clock
        self._lock = threading.Lock()
        #: With the time of the last message; the one unused for longest comes first.
        self._sockets: OrderedDict[str, tuple[zmq.Socket[bytes], float]] = OrderedDict()

    def send(self, host: str, port: int, message: Message) -> None:
        """Queue a control message for the peer at ``host``:``port``. ``host`` is an IP address, as
        ranks bind one: all sockets share a thread of ZeroMQ's, and a name would hold all up there
        while it is resolved.

        Raises:
            OSError, ValueError: the address cannot be (``zmq.ZMQError`` is an OSError).
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
                    self._close_first(_LEAVING_MS)
                socket = self._context.socket(zmq.PUSH)
                socket.setsockopt(zmq.SNDHWM, 0)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
                socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS)
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
        """Throw away what is queued for a peer that is gone."""
        from sglang.srt.utils.network import NetworkAddress

        with self._lock:
            found = self._sockets.pop(NetworkAddress(host, port).to_host_port_str(), None)
            if found is not None:
                found[0].close()

    def drop_unused(self, for_s: float) -> None:
        """Drop the peers to which nothing was sent for so many seconds: one that lives has all of
        it by now, and with one that does not ZeroMQ would try to connect for ever."""
        with self._lock:
            until = self._clock() - for_s
            while self._sockets and next(iter(self._sockets.values()))[1] <= until:
                self._close_first(0)


# ---- negotiation: decode sends a prefix only to a server that says that it understands one ----

#: Of a prefill server's bootstrap server. A route of its own, because a stock decode server builds
#: its ``PrefillServerInfo`` from every key of the stock answer, and would refuse a new one. A stock
#: prefill answers 404, and is then served as today: prefix 0, whole prompt.
ROUTE = "/pd_capabilities"
#: Prompts bring the target's KV only.
NO_DRAFTS = "none"
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Capabilities(msgspec.Struct, frozen=True):
    """What a prefill server understands.

    ``delta`` and ``control``: the versions of its delta frame and its control messages, or 0.
    ``yields``: whether it ends a request that decode computes itself (``ComputedByDecode``).
    ``incarnation``: names this run of the server; another one at the same address is another
    server, whose ranks know nobody yet. ``speculative``: its ``--speculative-algorithm``, or
    ``NO_DRAFTS``; None where it does not say.
    ``samples``: whether it gives each of parallel samples a room of its own (``unserved.py``).
    """

    delta: int = 0
    control: int = 0
    yields: bool = False
    incarnation: str | None = None
    speculative: str | None = None
    samples: bool = False

    @property
    def takes_delta(self) -> bool:
        """Whether a decode server of this version may send a prefix length."""
        return self.delta == VERSION

    @property
    def takes_control(self) -> bool:
        """Whether it may be sent control messages, and sends them."""
        return self.control == CONTROL_VERSION


OURS = Capabilities(delta=VERSION, control=CONTROL_VERSION, samples=True)
STOCK = Capabilities()


def fetch_capabilities(bootstrap_addr: str) -> Capabilities | None:
    """Query the bootstrap server at ``bootstrap_addr`` (host:port). One attempt.

    Returns None where it could not be queried; the caller tries again later. An answer that cannot
    be understood counts as a stock server: prefix 0 is always right.
    """
    try:
        response = requests.get(
            f"http://{bootstrap_addr}{ROUTE}", timeout=environment.HANDSHAKE_TIMEOUT.read()
        )
    except requests.RequestException as error:
        logger.error(
            "could not query the capabilities of prefill server %s (%s). Its requests wait and "
            "the query is repeated. Check that it is up",
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
    except _UNREADABLE as error:
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
    """The incarnation that a body of ``GET /pd_capabilities`` names; None if it cannot be read."""
    try:
        return msgspec.json.decode(content, type=Capabilities).incarnation
    except _UNREADABLE:
        return None
