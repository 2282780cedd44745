"""What goes between our servers beside SGLang's own messages: frame, notes, control messages.

The *delta frame* is what a decode server adds to SGLang's transfer metadata message. That is a
multipart of eight positional frames, and a stock prefill ignores frames after them. Ours is one
more: a magic, then a msgpack map with named fields, so that fields can be added without breaking a
peer. A changed *meaning* raises ``VERSION``, and a peer that speaks another version fails the room
with an error that says so.

A notification goes from prefill to decode when everything else of the room is in decode's memory.
Decode ranks that take metadata in it get one for each room and writer: a *writer* is a number that
no other prefill rank of the room has.

    <room>_done_<writer>_<metadata>      a msgpack list of bytes, one for each metadata buffer

All others get stock SGLang's, with one change: stock names only the pipeline stage of the sender,
ours the writer. Where several ranks write for one decode rank (tensor parallelism), the first one
to finish would otherwise count for all. A stock decode server reads both alike.

    <room>_kv_<chunk>_<is last>_<writer>
    <room>_aux_<writer>          stock: <room>_aux
    <room>_state_<writer>

*Control messages* tell of rooms that end early, and signs of life, in both directions and on every
backend, where SGLang's handshake has one message from decode to prefill. They go over the same
sockets (each rank's ``rank_ip:rank_port``), as two frames: a magic, then one msgpack map; and only
to peers that say in ``GET /pd_capabilities``, or by their delta frame, that they know them. Sending
never blocks, and nothing that was queued outlives its peer.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import zmq

if TYPE_CHECKING:
    from sglang.srt.utils.network import NetworkAddress

VERSION = 1
#: Where SGLang 0.5.12 and later have the prefix length, in decimal. Ours stands there too.
_LATER_PREFIX = 8
_MAX_DIGITS = 18
_MAGIC = b"sglang-delta:"


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


class _AnyVersion(msgspec.Struct, frozen=True):
    """The one field that every version has."""

    version: int = VERSION


class DeltaFrameError(ValueError):
    """A frame that carries our magic but cannot be understood."""


def encode_frame(frame: DeltaFrame) -> bytes:
    """The frame as bytes for the wire."""
    return _MAGIC + msgspec.msgpack.encode(frame)


def find_frame(frames: Sequence[bytes]) -> DeltaFrame | None:
    """The delta frame of a metadata message, or None where the peer sent none.

    Raises:
        DeltaFrameError: the frame is malformed or of another version.
    """
    for raw in reversed(frames):
        if not raw.startswith(_MAGIC):
            continue
        content = raw[len(_MAGIC) :]
        try:
            # On its own: another version may name and type all other fields differently.
            theirs = msgspec.msgpack.decode(content, type=_AnyVersion).version
            if theirs != VERSION:
                raise DeltaFrameError(
                    f"decode speaks delta protocol {theirs}, this prefill server {VERSION}"
                )
            return msgspec.msgpack.decode(content, type=DeltaFrame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DeltaFrameError(f"malformed delta frame: {error}") from error
    return None


def later_prefix_len(frames: Sequence[bytes]) -> int | None:
    """Tokens that a decode server of SGLang 0.5.12 or later holds; None where the message is of an
    earlier release or has our frame.

    Raises:
        ValueError: it says something else there.
    """
    if len(frames) <= _LATER_PREFIX:
        return None
    raw = frames[_LATER_PREFIX]
    if not raw or raw.startswith(_MAGIC):
        return None
    if not raw.isdigit() or len(raw) > _MAX_DIGITS:
        raise ValueError(f"its ninth frame, {raw[:40]!r}, is not a prefix length")
    return int(raw)


#: Bytes of metadata that go into a note; more are written into decode's slot. (A model that sends
#: hidden states may have more; without them they are 1,728.)
MOST_METADATA = 1 << 15
_MOST_PARTS = 64
_METADATA: msgspec.msgpack.Decoder[list[bytes]] = msgspec.msgpack.Decoder(list[bytes])


class Notification(msgspec.Struct, frozen=True):
    """One parsed notification; ``writer`` is None in a stock prefill's ``aux``."""

    room: int
    kind: str
    chunk: int = 0
    is_last: bool = False
    writer: int | None = None
    #: With ``done``: what belongs into the room's metadata slot, buffer by buffer.
    metadata: tuple[bytes, ...] = ()


def done(room: int, writer: int, metadata: Sequence[bytes]) -> bytes:
    """The note that completes ``room`` for one writer."""
    return f"{room}_done_{writer}_".encode() + msgspec.msgpack.encode(list(metadata))


def stock_notes(room: int, writer: int, has_state: bool) -> list[bytes]:
    """The notes that complete ``room`` for one writer where the metadata were written too. Stock
    counts chunks. They all have landed, so one note stands for them: the only one of one."""
    kinds = ["kv_0_1", *["state"] * has_state, "aux"]
    return [f"{room}_{kind}_{writer}".encode() for kind in kinds]


def parse(raw: bytes) -> Notification:
    """Parse one notification.

    Raises:
        ValueError: it has none of the known forms.
    """
    head, mark, rest = raw.partition(b"_done_")
    if mark:
        return _parse_done(head, rest)
    text = raw.decode("ascii")
    room, kind, *numbers = text.split("_")
    fields = [int(number) for number in numbers]
    if min([int(room), *fields]) < 0:
        raise ValueError(f"negative numbers in NIXL notification {text[:80]!r}")
    if kind == "kv" and 2 <= len(fields) <= 3 and fields[1] <= 1:
        writer = fields[2] if len(fields) == 3 else 0
        return Notification(int(room), kind, fields[0], bool(fields[1]), writer)
    if kind == "aux" and len(fields) <= 1:
        return Notification(int(room), kind, writer=fields[0] if fields else None)
    if kind == "state" and len(fields) <= 1:
        return Notification(int(room), kind, writer=fields[0] if fields else 0)
    raise ValueError(f"unknown NIXL notification {text[:80]!r}")


def _parse_done(room: bytes, rest: bytes) -> Notification:
    writer, _, content = rest.partition(b"_")
    numbers = int(room.decode("ascii")), int(writer.decode("ascii"))
    if min(numbers) < 0:
        raise ValueError("negative numbers in a NIXL notification")
    if len(content) > MOST_METADATA + 8 * _MOST_PARTS:
        raise ValueError(f"{len(content)} bytes of metadata in a NIXL notification")
    try:
        metadata = tuple(_METADATA.decode(content))
    except msgspec.DecodeError as error:
        raise ValueError(f"unreadable metadata in a NIXL notification: {error}") from error
    return Notification(numbers[0], "done", writer=numbers[1], metadata=metadata)


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


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Prefill to decode: the answer of the rank at ``to``."""

    to: str
    #: Whether the asking rank is registered there.
    knows_peer: bool


Message: TypeAlias = Withdraw | Stopped | ComputedByDecode | Ping | Pong
_CONTROL_DECODER = msgspec.msgpack.Decoder(Message)


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


def decode_control(frames: Sequence[bytes]) -> Message | None:
    """The control message in ``frames``, or None: they are of another kind.

    Raises:
        ControlError: they carry our magic and are malformed.
    """
    if not frames or frames[0] != CONTROL_MAGIC:
        return None
    if len(frames) != 2:
        raise ControlError(f"a control message of {len(frames)} frames, 2 expected")
    try:
        message: Message = _CONTROL_DECODER.decode(frames[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(f"malformed control message: {error}") from error
    return message


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
            socket = self._sockets[name][0] if name in self._sockets else self._open(address)
            self._sockets[name] = socket, self._clock()
            self._sockets.move_to_end(name)
            socket.send_multipart(frames, flags=zmq.NOBLOCK)

    def _open(self, address: NetworkAddress) -> zmq.Socket[bytes]:
        ipaddress.ip_address(address.host)
        while len(self._sockets) >= _MAX_SOCKETS:
            self._close_first(_LEAVING_MS)
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS)
        if address.is_ipv6:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.connect(address.to_tcp())
        except zmq.ZMQError as error:
            socket.close()
            raise ValueError(
                f"invalid address of a peer: {address.to_host_port_str()}: {error}"
            ) from error
        return socket

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
