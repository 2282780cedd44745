"""A rank's identity for its helpers, and SGLang's status of each of its rooms.

Contract: any thread; ``Statuses`` has a lock, ``RankView`` is frozen.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any  # Any: SGLang's manager and its KVArgs

from sglang.srt.disaggregation.base.conn import KVPoll


@dataclass(frozen=True)
class RankView:
    """Constants of a rank, from SGLang's manager."""

    #: SGLang's ``KVArgs``: the rank's memory.
    kv_args: Any
    is_mla: bool
    tp_size: int
    tp_rank: int
    pp_size: int
    #: As registered at the bootstrap server.
    dp_rank: int
    #: Address of the socket for messages of other servers.
    host: str
    port: int
    #: Unique among the prefill ranks that write to one decode rank.
    writer_id: int

    @classmethod
    def of(cls, manager: Any) -> RankView:
        """Return the view of the rank of SGLang's ``CommonKVManager``."""
        by_process = manager.system_dp_size > 1
        stage = manager.attn_tp_rank * manager.pp_size + manager.pp_rank
        return cls(
            kv_args=manager.kv_args,
            is_mla=manager.is_mla_backend,
            tp_size=manager.attn_tp_size,
            tp_rank=manager.attn_tp_rank,
            pp_size=manager.pp_size,
            dp_rank=manager.system_dp_rank if by_process else manager.attn_dp_rank,
            host=manager.local_ip,
            port=manager.rank_port,
            writer_id=stage * manager.attn_cp_size + manager.attn_cp_rank,
        )


class Statuses:
    """SGLang's tables ``request_status`` and ``failure_records``: status of each room that has a
    request here, and reasons of failed rooms. Thread-safe."""

    def __init__(self, statuses: dict[int, KVPoll], failures: dict[int, str]) -> None:
        self._statuses = statuses
        self._failures = failures
        self._lock = threading.Lock()

    def __contains__(self, room: int) -> bool:
        return room in self._statuses

    def update(self, room: int, status: KVPoll) -> None:
        """Set the status of a room as SGLang does, but keep a failed room failed: SGLang merges
        with ``max``, where Failed is the lowest, so that a late message would revive it."""
        with self._lock:
            self._merge(room, self._statuses.get(room, status), status)

    def advance(self, room: int, status: KVPoll) -> None:
        """Update a room only if its request is here, so that a late message opens no room."""
        with self._lock:
            if room in self._statuses:
                self._merge(room, self._statuses[room], status)

    def _merge(self, room: int, known: KVPoll, status: KVPoll) -> None:
        is_failed = KVPoll.Failed in (known, status)
        self._statuses[room] = KVPoll.Failed if is_failed else max(known, status)

    def fail_known(self, room: int, text: str) -> bool:
        """Fail a room if its request is here and it has neither ended nor failed. Return True if it
        was failed."""
        with self._lock:
            known = self._statuses.get(room)
            if known in (None, KVPoll.Failed, KVPoll.Success):
                return False
            self._failures[room] = text
            self._statuses[room] = KVPoll.Failed
            return True

    def failure_of(self, room: int) -> str:
        """Return why a room failed, for its client and the log."""
        elsewhere = (
            f"room {room} failed on another rank of this server, or two requests used its number"
        )
        return self._failures.get(room, elsewhere)

    def forget(self, room: int) -> None:
        """Remove a room, whose request has ended."""
        with self._lock:
            self._statuses.pop(room, None)
            self._failures.pop(room, None)
