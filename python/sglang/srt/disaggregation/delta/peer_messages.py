"""Messages from peers: read on one thread, and checked before they have any effect.

Stock SGLang asserts and parses on that thread, so one stray message ends it and every later
transfer. Here an invalid message is dropped and logged, and the next one is read. ``Announcements``
serves registrations and rooms' announcements on a prefill rank; a backend adds its own parsing.

Contract: all calls come from the reader thread of the rank. No lock; rooms are changed through
``RoomTable`` only.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any  # Any: a message in its backend's own class

import msgspec
import numpy as np
import zmq
from typing_extensions import Self, override

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import RateLimitedLog
from sglang.srt.disaggregation.delta.pages import of_one_shape
from sglang.srt.patchset.flags import FLAG, NO_WINDOW_POOL

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.delta.prefill.decode_ranks import DecodeRanks
    from sglang.srt.disaggregation.delta.prefill.rooms import RoomTable
    from sglang.srt.disaggregation.delta.rank import RankView
    from sglang.srt.disaggregation.nixl.conn import TransferInfo  # or Mooncake's
else:
    TransferInfo = object

logger = logging.getLogger(__name__)

#: Minimum number of frames of an announcement; later releases of SGLang, and ours, add to them.
_ANNOUNCEMENT_FRAMES = 8
#: Index of the frame in which SGLang 0.5.12 and later send the prefix length, in decimal. Our frame
#: has the same index.
_LATER_PREFIX = 8
#: Maximum number of digits of such a length, because any sender can name any number.
_MAX_DIGITS = 18
_CONTROL: msgspec.msgpack.Decoder[wire.Message] = msgspec.msgpack.Decoder(wire.Message)

#: Maximum number of refused registrations to remember.
_MAX_REFUSED = 256
#: Maximum length of name and address of such a rank, because any sender can choose them.
_MAX_NAME_LENGTH = 256


class BadMessage(ValueError):
    """A message that is not from a peer, or that is invalid."""


class DeltaFrameError(ValueError):
    """A frame with our magic that cannot be parsed."""


class _AnyVersion(msgspec.Struct, frozen=True):
    """The one field that every version has."""

    version: int = wire.VERSION


def find_frame(frames: Sequence[bytes]) -> wire.DeltaFrame | None:
    """Return the delta frame of a metadata message, or None if the peer sent none.

    Raises:
        DeltaFrameError: the frame is malformed or of another version.
    """
    for raw in reversed(frames):
        if not raw.startswith(wire.MAGIC):
            continue
        content = raw[len(wire.MAGIC) :]
        try:
            # Read the version first, because another one may have other fields.
            theirs = msgspec.msgpack.decode(content, type=_AnyVersion).version
            if theirs != wire.VERSION:
                raise DeltaFrameError(
                    f"decode speaks delta protocol {theirs}, this prefill server {wire.VERSION}"
                )
            return msgspec.msgpack.decode(content, type=wire.DeltaFrame)
        except wire.UNREADABLE as error:
            raise DeltaFrameError(f"malformed delta frame: {error}") from error
    return None


def later_prefix_len(frames: Sequence[bytes]) -> int | None:
    """Return the number of tokens that a decode server of SGLang 0.5.12 or later holds; None if the
    message is of an earlier release or has our frame.

    Raises:
        ValueError: the frame is not a number.
    """
    if len(frames) <= _LATER_PREFIX:
        return None
    raw = frames[_LATER_PREFIX]
    if not raw or raw.startswith(wire.MAGIC):
        return None
    if not raw.isdigit() or len(raw) > _MAX_DIGITS:
        raise ValueError(f"frame 9 of the announcement is not a prefix length: {raw[:40]!r}")
    return int(raw)


def decode_control(frames: Sequence[bytes]) -> wire.Message | None:
    """Return the control message in ``frames``, or None if they are of another kind.

    Raises:
        ControlError: the frames have our magic and are malformed.
    """
    if not frames or frames[0] != wire.CONTROL_MAGIC:
        return None
    if len(frames) != 2:
        raise wire.ControlError(f"a control message of {len(frames)} frames, 2 expected")
    try:
        return _CONTROL.decode(frames[1])
    except wire.UNREADABLE as error:
        raise wire.ControlError(f"malformed control message: {error}") from error


class MessageReader:
    """Reads the messages of one rank."""

    def __init__(
        self,
        take_control: Callable[[wire.Message], None],
        take_other: Callable[[list[bytes]], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``take_other`` gets the messages of SGLang's own kinds, and raises at invalid ones; None
        if SGLang sends none."""
        self._take_control = take_control
        self._take_other = take_other
        self._log = RateLimitedLog(logger, clock=clock)

    def handle(self, frames: list[bytes]) -> None:
        """Take one multipart message. Never raises."""
        try:
            message = decode_control(frames)
            if message is not None:
                self._take_control(message)
            elif self._take_other is not None:
                self._take_other(frames)
            else:
                raise BadMessage("it is not a control message of a prefill server")
        except Exception as error:  # of any class, because parsers read unknown bytes
            sender = _sender(frames)
            self._log.error(sender, "dropped a message from %s: %s", sender, error)

    def serve(
        self, socket: zmq.Socket[bytes], tick: Callable[[], None], interval_ms: int = 1000
    ) -> None:
        """Read for ever, and call ``tick`` about every ``interval_ms``. Both outlive any error."""
        ticked = time.monotonic()
        while True:
            if socket.poll(interval_ms):
                self.handle(socket.recv_multipart())
            if (time.monotonic() - ticked) * 1000 >= interval_ms:
                try:
                    tick()
                except Exception as error:
                    self._log.error(
                        "tick", "the check of deadlines failed (repeated in 1 s): %r", error
                    )
                ticked = time.monotonic()


def _sender(frames: list[bytes]) -> str:
    """Return address and port of the sender, as the message names them."""
    for start in (1, 2):  # Mooncake's messages have no guard in front
        if len(frames) > start + 1 and frames[start + 1].isdigit():
            host, port = (frame[:64].decode("ascii", "replace") for frame in frames[start:][:2])
            return f"{host}:{port}"
    return "an unknown peer"


@dataclasses.dataclass
class DeltaTransferInfo(TransferInfo):
    """A decode rank's announcement, with its delta frame if it sent one. A backend's subclass adds
    what a dummy is."""

    delta: wire.DeltaFrame | None = None
    #: Why the frame is unreadable. The sender fails the room with it, because raising here would
    #: leave the room unanswered.
    delta_error: str | None = None
    #: Number of tokens that a decode rank of a later release holds; None for other ranks.
    later_prefix_len: int | None = None

    @classmethod
    @override
    def from_zmq(cls, msg: list[bytes]) -> Self:
        info: Self = super().from_zmq(msg)
        info.later_prefix_len = later_prefix_len(msg)
        try:
            info.delta = find_frame(msg)
        except DeltaFrameError as error:
            info.delta_error = str(error)
        return info

    @property
    def is_ours(self) -> bool:
        """True if its decode rank sent a delta frame, readable or not."""
        return self.delta is not None or self.delta_error is not None

    @property
    def gets_nothing(self) -> bool:
        """True if this rank sends it nothing, so that decode does not wait for this rank."""
        return bool(self.is_dummy() if callable(self.is_dummy) else self.is_dummy)


class Announcements:
    """Serves registrations and announcements of decode ranks on a prefill rank."""

    def __init__(
        self,
        rank: RankView,
        rooms: RoomTable,
        decode_ranks: DecodeRanks,
        registered: dict[str, Any],
        register: Callable[[Any], None],
    ) -> None:
        """``registered``: SGLang's ``decode_kv_args_table``. ``register`` stores a registration
        that was checked."""
        self._rank = rank
        self._rooms = rooms
        self._decode_ranks = decode_ranks
        self._registered = registered
        self._keep = register
        #: Name and address of a decode rank -> why its registration was refused; sent for each of
        #: its rooms. By address too, because another rank could use its name.
        self._refused: dict[tuple[str, str, int], str] = {}

    #: Attribute of registrations and announcements with the name of the decode rank.
    peer_name = ""
    #: Minimum number of frames of a registration.
    registration_frames = 0

    def take(self, frames: list[bytes]) -> None:
        """Serve one message of a decode rank, as SGLang sends it to this backend.

        Raises:
            BadMessage: the message is invalid; any other exception: it cannot be parsed.
        """
        raise NotImplementedError

    def check(self, info: Any) -> None:
        """Check what a decode rank registered (SGLang's ``KVArgsRegisterInfo``).

        Raises:
            BadMessage: the registration does not fit this prefill rank.
        """
        raise NotImplementedError

    def take_message(self, conn: Any, frames: list[bytes]) -> None:
        """Serve a registration or an announcement; raises as ``take`` does. ``conn``: SGLang's
        module of the backend, which parses them."""
        if len(frames) < _ANNOUNCEMENT_FRAMES:
            raise BadMessage(f"{len(frames)} frames, at least {_ANNOUNCEMENT_FRAMES} expected")
        if frames[0] != b"None":
            self._announce(conn.TransferInfo.from_zmq(frames))
            return
        if len(frames) < self.registration_frames:
            raise BadMessage(
                f"a registration of {len(frames)} frames, {self.registration_frames} expected"
            )
        info = conn.KVArgsRegisterInfo.from_zmq(frames)
        peer = str(getattr(info, self.peer_name))
        self._refused.pop(_named(peer, info), None)
        try:
            self.check(info)
        except BadMessage as error:
            known, name = self._registered.get(peer), _named(peer, info)
            is_registered = known is not None and _named(peer, known) == name
            if not is_registered and len(peer) + len(info.endpoint) <= _MAX_NAME_LENGTH:
                self._refused[name] = f"the registration of decode rank {peer} was refused: {error}"
            for oldest in [*self._refused][:-_MAX_REFUSED]:
                del self._refused[oldest]
            raise
        self._keep(info)

    def _announce(self, info: Any) -> None:
        """Record an announcement; the last one of a room makes it ready. Fail the room, with the
        reason on both sides, if the registration of the rank was refused."""
        peer = str(getattr(info, self.peer_name))
        check_announcement(info)
        refused = self._refused.get(_named(peer, info))
        if refused is None and peer not in self._registered:
            self._decode_ranks.refuse_stranger(info)
            raise BadMessage(f"room {info.room}: decode rank {peer!r} never registered")
        is_taken = self._rooms.announce(info.room, peer, info, info.required_dst_info_num)
        room = self._rooms.room(info.room)
        if refused is not None and is_taken and room is not None:
            self._rooms.fail(room, Reason.MISMATCH, f"room {info.room}: {refused}")


def _named(peer: str, info: Any) -> tuple[str, str, int]:
    """Return name and address of a decode rank, from its registration or an announcement."""
    return peer, info.endpoint, info.dst_port


def check_registration(
    rank: RankView,
    *,
    kv_buffers: int,
    state_buffers: int,
    aux_buffers: int,
    tp_size: int,
    tp_rank: int,
    item_len: int | None,
) -> None:
    """Check that a decode rank's buffers match those of this prefill rank.

    ``item_len``: bytes of a page in each of its buffers; None if its pages may differ.

    Raises:
        BadMessage: they do not match; the text has the numbers.
    """
    ours: KVArgs = rank.kv_args
    state = len(getattr(ours, "state_data_ptrs", None) or ())
    if state_buffers != state and rank.pp_size == 1:
        raise BadMessage(
            f"decode registered {kv_buffers} KV buffers and {state_buffers} buffers of state, this "
            f"prefill rank has {len(ours.kv_data_ptrs)} and {state}. For a model with "
            f"sliding-window layers, give {NO_WINDOW_POOL} to both servers or to neither; with "
            f"{FLAG} on decode, to both. A later release of SGLang lists them differently and "
            "cannot be served for a model with state (Mamba, sliding window, NSA)"
        )
    if kv_buffers < len(ours.kv_data_ptrs):
        raise BadMessage(
            f"decode registered {kv_buffers} KV buffers, "
            f"this prefill rank has {len(ours.kv_data_ptrs)}"
        )
    if aux_buffers != len(ours.aux_data_ptrs):
        raise BadMessage(
            f"decode registered {aux_buffers} metadata buffers, "
            f"this prefill rank has {len(ours.aux_data_ptrs)}"
        )
    if tp_size < 1 or tp_rank < 0:
        raise BadMessage(f"decode rank {tp_rank} of {tp_size} is invalid")
    if tp_size != rank.tp_size and not of_one_shape(ours.kv_item_lens, latent=rank.is_mla):
        raise BadMessage(
            "the KV pages of the draft model and of the target differ in size (number of heads), "
            f"but with tensor parallel sizes {rank.tp_size} on prefill and {tp_size} on "
            "decode the heads of all layers are split in the same way. Use the same tensor "
            "parallel size, or no --speculative-algorithm"
        )
    if item_len is None:
        return
    same_layout = rank.is_mla or tp_size == rank.tp_size
    if item_len < 1 or (same_layout and item_len != ours.kv_item_lens[0]):
        raise BadMessage(
            f"decode's KV pages have {item_len} bytes, this prefill rank's "
            f"{ours.kv_item_lens[0]}: model, page size or KV dtype differ"
        )


def check_announcement(info: DeltaTransferInfo) -> None:
    """Check the numbers in an announcement, before descriptors are made of them.

    Raises:
        BadMessage: a number is impossible; the text has it.
    """
    pages, slot = info.dst_kv_indices, info.dst_aux_index
    if info.required_dst_info_num < 1 or (slot is not None and slot < 0):
        raise BadMessage(f"room {info.room}: a count or an index is negative")
    if pages.size and int(pages.min()) < 0:
        raise BadMessage(f"room {info.room}: a destination page is negative")
    if len(np.unique(pages)) != len(pages):
        raise BadMessage(f"room {info.room}: a destination page is listed twice")
    delta = info.delta
    if delta is None:
        return
    if delta.num_pages != len(pages):
        raise BadMessage(
            f"room {info.room}: {len(pages)} destination pages came, {delta.num_pages} were sent"
        )
    if delta.pool_pages and pages.size and int(pages.max()) >= delta.pool_pages:
        raise BadMessage(
            f"room {info.room}: destination page {int(pages.max())}, "
            f"but decode's pool has {delta.pool_pages}"
        )
    if delta.metadata_slots and slot is not None and slot >= delta.metadata_slots:
        raise BadMessage(
            f"room {info.room}: metadata slot {slot}, but decode has {delta.metadata_slots}"
        )
