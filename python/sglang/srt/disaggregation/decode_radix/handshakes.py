"""Requests whose prefill rank is not connected yet: no step waits, and no request for ever."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.decode_radix.announce import bootstrap_addr

logger = logging.getLogger(__name__)

_DEADLINE = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"


@dataclass
class _Attempts:
    """How often a server could not be asked for its topology, and when it is asked again."""

    failed: int = 0
    again_at: float = 0.0


class Handshakes:
    """One for each prealloc queue. Called in every step by the scheduler's thread.

    A request passes three questions: the topology of its prefill server, the data-parallel rank
    that serves it, and where the ranks listen that write to this one. All are asked in the
    background (``delta.prefill_servers``, ``delta.connections``).
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._attempts: dict[str, _Attempts] = {}

    def advance(self) -> None:
        """Initialise the receivers of ``pending_reqs`` that are ready; drop those that failed."""
        pending: dict[str, list[Any]] = {}
        for entry in self._queue.pending_reqs:
            if entry.kv_receiver.conclude_state is None:  # else who polls it answers
                pending.setdefault(bootstrap_addr(entry.req), []).append(entry)
        waiting = []
        for address, entries in pending.items():
            waiting += self._advance(address, self._in_time(address, entries))
        self._queue.pending_reqs = waiting
        for address in self._attempts.keys() - pending.keys():
            del self._attempts[address]  # whoever asked went away

    def _in_time(self, address: str, entries: list[Any]) -> list[Any]:
        """Fail those that have waited for longer than a transfer may take."""
        allowed = self._queue.kv_manager.waiting_timeout
        now, left = self._queue.clock(), []
        for entry in entries:
            since = entry.__dict__.setdefault("handshake_since", now)
            if now - since < allowed:
                left.append(entry)
                continue
            entry.kv_receiver.fail_handshake(
                f"prefill {address} did not say within {allowed} s "
                f"{entry.__dict__.get('handshake_wants', 'who it is')} ({_DEADLINE})"
            )
        return left

    def _advance(self, address: str, entries: list[Any]) -> list[Any]:
        """Those of ``entries`` that are still not ready."""
        known = self._is_known(address)
        if known is None:
            for entry in entries:
                entry.kv_receiver.abort()
            return []
        if not known:
            return entries
        ranks = {id(entry): self._queue.prefill_dp_rank(entry.req) for entry in entries}
        rooms = [entry.req.bootstrap_room for entry in entries if ranks[id(entry)] is None]
        found = self._queue.kv_manager.servers.connections.dp_ranks(address, rooms) if rooms else {}
        waiting = []
        for entry in entries:
            rank = ranks[id(entry)]
            if rank is None:
                rank = found.get(entry.req.bootstrap_room)
            if rank is None:
                entry.handshake_wants = "which of its data-parallel ranks serves the request"
            elif not entry.kv_receiver.is_ready(rank):
                entry.handshake_wants = f"where its ranks listen (data-parallel rank {rank})"
            else:
                entry.kv_receiver.init(rank)
                continue
            waiting.append(entry)
        return waiting

    def _is_known(self, address: str) -> bool | None:
        """Whether the server's topology is known; None where it was asked for too often."""
        queue = self._queue
        attempts = self._attempts.setdefault(address, _Attempts())
        if queue.clock() < attempts.again_at:
            return False
        if queue.kv_manager.try_ensure_parallel_info(address):
            del self._attempts[address]
            return True
        if queue.kv_manager.servers.is_asking(address):
            return False
        attempts.failed += 1
        attempts.again_at = queue.clock() + queue._ensure_retry_interval
        if attempts.failed < queue._max_ensure_retries:
            return False
        logger.error("prefill server %s: no answer in %d attempts", address, attempts.failed)
        del self._attempts[address]
        return None
