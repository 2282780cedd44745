"""Sockets that record, a clock that a test moves, and what a decode rank announces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.delta import wire


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Sockets:
    """``PeerSockets`` that remember instead of sending; unknown hosts are refused."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, Any]] = []
        self.dropped: list[tuple[str, int]] = []
        self.refuse: set[str] = set()

    def send(self, host: str, port: int, message: wire.Message) -> None:
        if host in self.refuse:
            raise ValueError(f"invalid address of a peer: {host}")
        wire.encode_control(message)  # what cannot be written is refused as the real ones do
        self.sent.append((host, port, message))

    def drop(self, host: str, port: int) -> None:
        self.dropped.append((host, port))

    def drop_unused(self, for_s: float) -> None:
        pass

    def take(self) -> list[tuple[str, int, Any]]:
        """What was sent since the last look."""
        taken, self.sent = self.sent, []
        return taken


def announcement(
    room: int, *, host: str = "10.0.0.1", dummy: bool = False, stock: bool = False, **fields: Any
) -> Any:
    """A decode rank's announcement, as far as ``DecodeRanks`` looks at it."""
    frame = wire.DeltaFrame(decode_prefix_len=0, num_pages=0, is_dummy=dummy)
    info = SimpleNamespace(
        room=room,
        endpoint=host,
        dst_port=4000,
        delta=None if stock else frame,
        delta_error=None,
        is_dummy=lambda: dummy,
        gets_nothing=dummy,
        required_dst_info_num=1,
    )
    info.__dict__.update(fields)
    info.is_ours = info.delta is not None or info.delta_error is not None
    return info
