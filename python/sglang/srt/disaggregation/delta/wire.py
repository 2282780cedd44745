"""The delta frame, and the notifications that complete a room over NIXL.

The frame is what a decode server adds to SGLang's transfer metadata message. That is a multipart of
eight positional frames, and a stock prefill ignores frames after them. Ours is one more: a magic,
then a msgpack map with named fields, so that fields can be added without breaking a peer. A changed
*meaning* raises ``VERSION``, and a peer that speaks another version fails the room with an error
that says so.

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
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

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
        raise ValueError(f"its ninth frame, {raw[:40]!r}, is no prefix length")
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


def from_writer(text: str, writer: int) -> str:
    """The stock notification ``text``, as the one of ``writer``."""
    note = parse(text.encode())
    if note.kind == "kv":
        return f"{note.room}_kv_{note.chunk}_{int(note.is_last)}_{writer}"
    return f"{note.room}_{note.kind}_{writer}"


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
