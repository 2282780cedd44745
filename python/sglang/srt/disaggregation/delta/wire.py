"""The delta frame: what a decode server adds to SGLang's transfer metadata message.

SGLang's message is a multipart of eight positional frames, and a stock prefill ignores frames after
them. Ours is one more frame: a magic, then a msgpack map with named fields, so that fields can be
added without breaking a peer. A changed *meaning* raises ``VERSION``, and a peer that speaks
another version fails the room with an error that says so.
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
