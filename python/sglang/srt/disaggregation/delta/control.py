"""What the two sides tell each other beside the transfer: rooms that end early, signs of life.

SGLang's handshake has one message from decode to prefill and none back that every backend knows.
These go over the same sockets (each rank's ``rank_ip:rank_port``), as two frames: a magic, then one
msgpack map. They are sent only to peers that say in ``GET /pd_capabilities``, or by their delta
frame, that they know them; a stock peer never sees one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

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
