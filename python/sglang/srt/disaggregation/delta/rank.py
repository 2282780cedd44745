"""A rank, as its helpers are given it: who it is, and SGLang's status of each of its rooms."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any  # Any: SGLang's manager and its KVArgs

from sglang.srt.disaggregation.base.conn import KVPoll


@dataclass(frozen=True)
class RankView:
    """What does not change of a rank, once SGLang's manager knows it."""

    #: SGLang's ``KVArgs``: the rank's memory.
    kv_args: Any
    is_mla: bool
    tp_size: int
    tp_rank: int
    pp_size: int
    #: As it has registered at the bootstrap server.
    dp_rank: int
    #: Where it listens for messages of other servers.
    host: str
    port: int
    #: Tells this prefill rank from the others that write for one decode rank.
    writer_id: int

    @classmethod
    def of(cls, manager: Any) -> RankView:
        """Of the rank of SGLang's ``CommonKVManager``."""
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
    """SGLang's status of each room whose request is here, and why rooms failed: what it keeps in
    ``request_status`` and ``failure_records``. Used by any thread."""

    def __init__(self, statuses: dict[int, KVPoll], failures: dict[int, str]) -> None:
        self._statuses = statuses
        self._failures = failures
        self._lock = threading.Lock()

    def __contains__(self, room: int) -> bool:
        return room in self._statuses

    def update(self, room: int, status: KVPoll) -> None:
        """A room is as far as that. As SGLang's, but a room that failed stays failed: SGLang merges
        states with ``max``, where Failed is the lowest, and a late message would revive it."""
        with self._lock:
            self._merge(room, self._statuses.get(room, status), status)

    def advance(self, room: int, status: KVPoll) -> None:
        """``update`` for a room whose request is here: a late message opens no other."""
        with self._lock:
            if room in self._statuses:
                self._merge(room, self._statuses[room], status)

    def _merge(self, room: int, known: KVPoll, status: KVPoll) -> None:
        is_failed = KVPoll.Failed in (known, status)
        self._statuses[room] = KVPoll.Failed if is_failed else max(known, status)

    def fail_known(self, room: int, text: str) -> bool:
        """Fail a room whose request is here and that has neither ended nor failed; whether it
        was one."""
        with self._lock:
            known = self._statuses.get(room)
            if known in (None, KVPoll.Failed, KVPoll.Success):
                return False
            self._failures[room] = text
            self._statuses[room] = KVPoll.Failed
            return True

    def failure_of(self, room: int) -> str:
        """Why a room failed, for its client and the log."""
        elsewhere = (
            f"room {room} failed on another rank of this server, or two requests used its number"
        )
        return self._failures.get(room, elsewhere)

    def forget(self, room: int) -> None:
        """The room's request is done with: nothing about it is kept, now or later."""
        with self._lock:
            self._statuses.pop(room, None)
            self._failures.pop(room, None)
