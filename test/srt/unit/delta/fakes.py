"""A manager without a transport, sockets that record, and a clock that a test moves."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.manager import DeltaManager


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


class StockManager:
    """The rules of SGLang's own manager for a room's status, and its tables."""

    def __init__(self) -> None:
        self.request_status: dict[int, Any] = {}
        self.failure_records: dict[int, str] = {}
        self.required_prefill_response_num_table: dict[int, int] = {}
        self.decode_kv_args_table: dict[str, Any] = {}
        self.prefill_info_table: dict[str, Any] = {}
        self.connection_pool: dict[str, Any] = {}
        self.connection_lock = threading.Lock()
        self.addr_to_rooms_tracker: dict[str, set[int]] = defaultdict(set)
        self.bootstrap_timeout = 300
        self.heartbeat_interval, self.max_failures = 5.0, 2
        self.local_ip, self.rank_port = "10.9.9.9", 4999
        self.pp_size = self.attn_cp_size = 1
        self.attn_tp_rank = self.pp_rank = self.attn_cp_rank = 0

    def update_status(self, bootstrap_room: int, status: Any) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        before = self.request_status.get(bootstrap_room)
        if before is None or status == KVPoll.Failed:
            self.request_status[bootstrap_room] = status
        else:
            self.request_status[bootstrap_room] = max(before, status)

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        self.failure_records[bootstrap_room] = failure_reason


class Progress:
    """Writers that stopped or delivered; see ``decode/deferred_free.py``."""

    def __init__(self) -> None:
        self.done: set[int] = set()

    def stop(self, writer: int) -> None:
        self.done.add(writer)

    def is_drained(self, writers: int) -> bool:
        return len(self.done) >= writers


class Manager(DeltaManager, StockManager):
    """Our manager over those tables; how bytes move is left out."""

    def __init__(self) -> None:
        StockManager.__init__(self)
        self._status_lock = threading.Lock()
        self.rooms = self.servers = self.decode_ranks = None
        self.progresses: dict[int, Progress] = defaultdict(Progress)
        self.dropped: list[tuple[str, int]] = []
        self.collected = 0

    @property
    def peer_name(self) -> str:
        return "decode-agent"

    def progress(self, room: int) -> Progress:
        return self.progresses[room]

    def take_progress(self, room: int) -> Progress:
        return self.progresses.pop(room, None) or Progress()

    def collect_arrivals(self, asker: int) -> None:
        self.collected += 1

    def drop_socket(self, host: str, port: int) -> None:
        self.dropped.append((host, port))


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
        required_dst_info_num=1,
    )
    info.__dict__.update(fields)
    return info
