"""A decode rank's messages to a prefill rank of each backend, and a rank that reads them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from component.transfer import bare
from sglang.srt.disaggregation.delta.peer_messages import MessageReader
from sglang.srt.disaggregation.delta.wire import DeltaFrame, encode_frame
from sglang.srt.disaggregation.mooncake import conn as mooncake
from sglang.srt.disaggregation.nixl import conn as nixl

_FROM = [b"10.0.0.2", b"4000"]


class Dialect:
    """Messages of the decode rank at 10.0.0.2:4000 in the order of one backend's frames."""

    backend: str
    #: The decode rank's name on prefill.
    peer: str
    #: Class of a parsed announcement, and SGLang's sender with the package's mixin.
    transfer_info: Any
    sender: Any

    def __repr__(self) -> str:
        return self.backend

    def registration(
        self,
        kv_buffers: int = 2,
        tp: tuple[int, int] = (1, 0),
        item: int = 64,
        kv: Sequence[int] = (),
        aux: Sequence[int] = (9,),
        **own: bytes,
    ) -> list[bytes]:
        """Return a registration as stock SGLang sends it; ``item``: bytes of a KV page; ``kv``,
        ``aux``: addresses."""
        pointers, slots = (
            struct.pack(f"{len(each)}Q", *each) for each in (kv or range(kv_buffers), aux)
        )
        size, rank, length = (str(number).encode() for number in (*tp, item))
        return self._registration(pointers, slots, size, rank, length, **own)

    def announcement(
        self,
        room: int = 7,
        pages: tuple[int, ...] = (4, 5),
        needed: int = 1,
        slot: bytes = b"3",
        ours: bool = True,
        **frame: Any,
    ) -> list[bytes]:
        """Return a room's announcement, with a delta frame if it is ``ours``."""
        listed = np.array(pages, dtype=np.int32).tobytes()
        number, ranks = str(room).encode(), str(needed).encode()
        frames = self._announcement(number, listed, slot, ranks)
        fields = {"decode_prefix_len": 0, "num_pages": len(pages), "is_dummy": False, **frame}
        return [*frames, encode_frame(DeltaFrame(**fields))] if ours else frames

    @staticmethod
    def unguarded(frames: list[bytes]) -> list[bytes]:
        """Return the part of a message that SGLang's own parser gets."""
        return frames

    @staticmethod
    def is_dummy(info: Any) -> bool:
        """Return True if the announcing rank gets nothing from prefill, not even metadata."""
        return bool(info.is_dummy)

    def _registration(
        self, pointers: bytes, slots: bytes, size: bytes, rank: bytes, item: bytes, **own: bytes
    ) -> list[bytes]:
        raise NotImplementedError

    def _announcement(self, room: bytes, pages: bytes, slot: bytes, needed: bytes) -> list[bytes]:
        raise NotImplementedError

    def listener(self, *clock: Any, **own: Any) -> tuple[Any, MessageReader]:
        """Return a prefill rank's manager with ``own`` attributes, and its thread's reader."""
        manager = bare.prefill(self.backend, **own)
        take = manager.announcements().take
        return manager, MessageReader(manager.decode_ranks.take, take, *clock)

    def acquainted(self, *clock: Any) -> tuple[Any, MessageReader]:
        """Return the same after this decode rank has registered."""
        manager, reader = self.listener(*clock)
        reader.handle(self.registration())
        return manager, reader


class Nixl(Dialect):
    """NIXL's messages, which begin with a guard frame."""

    backend, peer = "nixl", "D"
    transfer_info, sender = nixl.TransferInfo, nixl.NixlKVSender

    @staticmethod
    def unguarded(frames: list[bytes]) -> list[bytes]:
        return frames[1:]

    @staticmethod
    def is_dummy(info: Any) -> bool:
        return bool(info.is_dummy())

    def _registration(
        self,
        pointers: bytes,
        slots: bytes,
        size: bytes,
        rank: bytes,
        item: bytes,
        *,
        metadata: bytes = b"metadata",
        state: bytes = b"",
    ) -> list[bytes]:
        frames = [nixl.GUARD, b"None", *_FROM, b"D", metadata, pointers, slots]
        return [*frames, state, b"0", size, rank, item]

    def _announcement(self, room: bytes, pages: bytes, slot: bytes, needed: bytes) -> list[bytes]:
        return [nixl.GUARD, room, *_FROM, b"D", pages, slot, needed, b""]


class Mooncake(Dialect):
    """Mooncake's messages, which name a session of the engine."""

    backend, peer = "mooncake", "10.0.0.2:4001"
    transfer_info, sender = mooncake.TransferInfo, mooncake.MooncakeKVSender

    def _registration(
        self,
        pointers: bytes,
        slots: bytes,
        size: bytes,
        rank: bytes,
        item: bytes,
        *,
        session: bytes = b"10.0.0.2:4001",
        hisparse: bytes = b"0",
        state: bytes = b"",
    ) -> list[bytes]:
        frames = [b"None", *_FROM, session, pointers, slots, state]
        return [*frames, rank, size, item, b"", b"", hisparse, b"", b""]

    def _announcement(self, room: bytes, pages: bytes, slot: bytes, needed: bytes) -> list[bytes]:
        return [room, *_FROM, self.peer.encode(), pages, slot, b"", needed]


NIXL, MOONCAKE = Nixl(), Mooncake()
DIALECTS: tuple[Dialect, ...] = (NIXL, MOONCAKE)
