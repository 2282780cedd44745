"""Recording sockets, a clock that tests set, and a decode rank's announcements."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.delta import wire


class Clock:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Sockets:
    """``PeerSockets`` that record instead of sending; hosts in ``refuse`` are refused."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, Any]] = []
        self.dropped: list[tuple[str, int]] = []
        self.refuse: set[str] = set()

    def send(self, host: str, port: int, message: wire.Message) -> None:
        if host in self.refuse:
            raise ValueError(f"invalid address of a peer: {host}")
        wire.encode_control(message)  # refuses unwritable messages like the real ones
        self.sent.append((host, port, message))

    def drop(self, host: str, port: int) -> None:
        self.dropped.append((host, port))

    def drop_unused(self, for_s: float) -> None:
        pass

    def take(self) -> list[tuple[str, int, Any]]:
        """Return the messages since the last call."""
        messages, self.sent = self.sent, []
        return messages


def announcement(
    room: int, *, host: str = "10.0.0.1", dummy: bool = False, stock: bool = False, **fields: Any
) -> Any:
    """Return a decode rank's announcement with the fields that ``DecodeRanks`` uses."""
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
