"""Decode's side of a room on any backend: handshake, announcement, end.

Contract: the scheduler's thread only; no call blocks, and every room has a deadline. All ranks call
``Handshakes.finish`` together, with equal entries (one reduction); the rest is this rank's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: SGLang's own attributes, sockets and JSON

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from typing_extensions import override

from sglang.srt.disaggregation.delta import observability, wire
from sglang.srt.disaggregation.delta.decode.deferred import DeferredFree
from sglang.srt.disaggregation.delta.decode.prefill_servers import (
    Connections,
    PrefillServers,
    RankInfos,
)
from sglang.srt.disaggregation.delta.decode.request import Stage, bootstrap_addr, record_of
from sglang.srt.disaggregation.delta.metrics import Reason

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.delta.manager import DeltaManager
    from sglang.srt.managers.schedule_batch import Req
else:
    CommonKVReceiver = object

logger = logging.getLogger(__name__)
_DEADLINE = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"


class DeltaReceiver(CommonKVReceiver):
    """Decode's side of a room: announces the prefix that it already holds."""

    _connect_to_bootstrap_server: Any  # of the upstream class
    #: True once destination pages were announced: prefill may write to them.
    announced = False
    #: True once the client left, so fallback prefill does not compute the request.
    aborted = False
    #: Addresses of the server's ranks, if this rank is not connected to them yet.
    _rank_infos: RankInfos = {}

    def __init__(
        self, mgr: DeltaManager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:  # fmt: skip
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        if self._is_followed:
            self._fail(
                Reason.MISMATCH,
                f"bootstrap_room {bootstrap_room} is still in use by a request that ended early",
            )

    @property
    def _servers(self) -> PrefillServers | None:
        return self.kv_mgr.servers

    @property
    def _is_followed(self) -> bool:
        """True if prefill may still write for an earlier request with this room number."""
        progress = None
        if self._servers is not None:
            progress = self.kv_mgr.transfer_statuses.get(self.bootstrap_room)
        return progress is not None and progress.is_deferred

    def _fail(self, kind: Reason, text: str) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self._servers is not None:
            self._servers.fail(self.bootstrap_room, kind, text)
        else:
            self.kv_mgr.statuses.fail_known(self.bootstrap_room, text)
        self.conclude_state = KVPoll.Failed

    @override
    def init(self, prefill_dp_rank: int) -> None:
        servers = self._servers
        if servers is None:
            super().init(prefill_dp_rank)
            return
        self.kv_mgr.transfer_statuses[self.bootstrap_room].address = self.bootstrap_addr
        try:
            super().init(prefill_dp_rank)
        except Exception as error:  # no request may raise out of the scheduler's loop
            self.fail_handshake(f"could not connect to prefill {self.bootstrap_addr}: {error!r}")
            servers.disconnect(self.bootstrap_addr)
        else:
            if self._rank_infos:
                servers.connected(self.bootstrap_addr, getattr(self, "bootstrap_infos", None) or [])

    def is_ready(self, prefill_dp_rank: int) -> bool:
        """Return True if ``init`` may be called; query missing addresses in the background, because
        ``init`` would block the scheduler on them. Called only with the radix cache."""
        infos = self.kv_mgr.servers.connections.ranks(
            self.bootstrap_addr, prefill_dp_rank, super()._get_bootstrap_info_from_server
        )
        self._rank_infos = infos or {}
        return infos is not None

    @override
    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank: int, prefill_cp_rank: int, target_tp_rank: int, target_pp_rank: int
    ) -> Any:
        rank = (prefill_dp_rank, prefill_cp_rank, target_tp_rank, target_pp_rank)
        if self._servers is None:
            return super()._get_bootstrap_info_from_server(*rank)
        return self._rank_infos.get(rank)

    def fail_handshake(self, text: str) -> None:
        """Fail the room before its announcement."""
        self._fail(Reason.HANDSHAKE, text)

    #: True with a heartbeat (``WatchedServers``): socket queues to prefill ranks are unbounded.
    drops_dead_sockets = False

    @classmethod
    @override
    def _connect(cls, endpoint: str, is_ipv6: bool = False) -> Any:
        socket, lock = super()._connect(endpoint, is_ipv6)
        if cls.drops_dead_sockets:
            with lock:
                # A full queue would block the scheduler. ``drop_socket`` empties a dead peer's.
                socket.setsockopt(zmq.SNDHWM, 0)
        return socket, lock

    def announce(
        self,
        frame: wire.DeltaFrame,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int,
        state_indices: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Send a room's transfer metadata. ``kv_indices``: the *delta's* destination pages.

        ``state_indices``: the delta's pages of an index cache. The frame is completed for each
        connection and added to SGLang's own message, by a socket that appends it.
        """
        connect = self._connect_to_bootstrap_server
        args = self.kv_mgr.kv_args
        pool_pages = args.kv_data_lens[0] // args.kv_item_lens[0]
        metadata_slots = args.aux_data_lens[0] // args.aux_item_lens[0]
        takes_metadata = self.kv_mgr.expect_metadata(self.bootstrap_room, aux_index)

        def connect_with_frame(bootstrap_info: dict[str, Any]) -> tuple[Any, threading.Lock]:
            socket, lock = connect(bootstrap_info)
            is_dummy = bool(bootstrap_info["is_dummy"])
            complete = msgspec.structs.replace(
                frame,
                num_pages=0 if is_dummy else len(kv_indices),
                is_dummy=is_dummy,
                pool_pages=pool_pages,
                metadata_slots=metadata_slots,
                takes_metadata=takes_metadata,
            )
            encoded = wire.encode_frame(complete)
            sends = SimpleNamespace(
                send_multipart=lambda frames: socket.send_multipart([*frames, encoded])
            )
            return sends, lock

        self._connect_to_bootstrap_server = connect_with_frame
        self.announced = True
        try:
            self.send_metadata(kv_indices, aux_index, state_indices)
        except Exception as error:  # no request may raise out of the scheduler's loop
            self._fail(
                Reason.TRANSPORT,
                f"could not announce room {self.bootstrap_room} to prefill "
                f"{self.bootstrap_addr}: {error!r}",
            )
        finally:
            del self._connect_to_bootstrap_server

    def withdraw(self, reason: str) -> None:
        """Notify prefill that decode does not need this room any more. Best effort."""
        infos = getattr(self, "bootstrap_infos", None)
        if self._servers is not None and infos:
            self._servers.withdraw(self.bootstrap_addr, infos, self.bootstrap_room, reason)

    def yield_room(self) -> None:
        """Notify prefill that decode computes the request, so that prefill ends it at once."""
        infos = getattr(self, "bootstrap_infos", None)
        # Rank 0 alone sends it: its prefill peers include the rank that answers clients.
        if self._servers is not None and infos and self.kv_mgr.attn_tp_rank == 0:
            self._servers.yield_room(infos, self.bootstrap_room)

    def defer_free(self) -> DeferredFree | None:
        """Withdraw an announced room. Return the object that follows it until it is drained, or
        None if prefill cannot write to its pages."""
        room, manager = self.bootstrap_room, self.kv_mgr
        is_announced = self.announced or getattr(self, "init_time", None) is not None
        if self._servers is None or not is_announced:
            self.withdraw("it ended before it was announced")
            return None
        progress, writers = manager.transfer_statuses[room], self.required_prefill_response_num
        if progress.is_drained(writers):
            return None
        progress.is_deferred = True
        self.withdraw(manager.failure_records.get(room, "it was aborted"))
        collect = partial(manager.collect_arrivals, room)
        forget = partial(manager.transfer_statuses.pop, room, None)
        return DeferredFree(progress, writers, collect, forget)


class RoomReceiver(CommonKVReceiver):
    """Receiver of a backend that transfers deltas: removes its room's table entries and reports why
    the room failed."""

    conclude_state: KVPoll | None  # of the upstream class; named for the type checker

    @override
    def poll(self) -> KVPoll:
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self.conclude_state is not None:
            return self.conclude_state
        manager, room = self.kv_mgr, self.bootstrap_room
        ended = KVPoll.Success, KVPoll.Failed
        # A missing entry is a failure: without the flag, requests with the same number share its
        # entries, as in SGLang, and the first one that ends removes them.
        status = manager.request_status.get(room, KVPoll.Failed)
        if status not in ended and self.init_time is not None:  # announced
            manager.collect_arrivals(room)
            status = manager.request_status.get(room, KVPoll.Failed)
            if status not in ended and time.time() - self.init_time >= manager.waiting_timeout:
                self._fail(
                    Reason.TIMEOUT,
                    f"room {room}: prefill {self.bootstrap_addr} did not complete it within "
                    f"{manager.waiting_timeout} s ({_DEADLINE})",
                )
                return self.conclude_state
        if status in ended:
            self.conclude_state = status
            if status == KVPoll.Success:
                observability.record(
                    "decode", lambda: observability.Arrived(at=observability.now(), room=room)
                )
        return status

    @override
    def abort(self) -> None:
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        self.aborted = True
        CommonKVReceiver.abort(self)  # because Mooncake's override does not call it

    @override
    def failure_exception(self) -> None:
        error = RuntimeError(self.kv_mgr.statuses.failure_of(self.bootstrap_room))
        self.clear()
        raise error

    @override
    def clear(self) -> None:
        room, manager = self.bootstrap_room, self.kv_mgr
        manager.statuses.forget(room)
        manager.required_prefill_response_num_table.pop(room, None)
        if not self._is_followed:
            manager.transfer_statuses.pop(room, None)
        rooms = manager.addr_to_rooms_tracker.get(self.bootstrap_addr)
        if rooms is not None:
            rooms.discard(room)


# ---- handshakes ----


class _Reached(NamedTuple):
    """Polls a receiver; the lowest bit is 0 while its prefill server is unreachable and the request
    was not attempted locally yet. The ranks agree on the smallest vote."""

    entry: DecodeRequest

    def poll(self) -> int:
        record = record_of(self.entry.req)
        is_reached = record.tried_here or not record.unreachable
        return 2 * int(self.entry.kv_receiver.poll()) + is_reached


class Handshakes:
    """The pending handshakes of one prealloc queue.

    A receiver is initialised when three answers of its prefill server are known (``Connections``):
    the topology, the data-parallel rank that serves the request, and the addresses of the ranks
    that write to this one.
    """

    def __init__(
        self,
        connections: Connections,
        dp_rank_of: Callable[[Req], int | None],
        clock: Callable[[], float],
        *,
        allowed_s: float,
        attempts: int,
        retry_s: float,
    ) -> None:
        """``dp_rank_of`` returns the data-parallel rank that serves a request, None if prefill has
        to be queried; ``allowed_s``: longest handshake; ``attempts``: queries for a server's
        topology before its requests fail, ``retry_s`` apart."""
        self._connections, self._dp_rank_of, self._clock = connections, dp_rank_of, clock
        self._allowed_s, self._max_attempts, self._retry_s = allowed_s, attempts, retry_s
        #: Server -> failed queries for its topology, and time of the next query.
        self._attempts: dict[str, tuple[int, float]] = {}

    def advance(self, entries: Sequence[DecodeRequest]) -> list[DecodeRequest]:
        """Initialise the receivers that are ready and fail the ones past their deadline. Return the
        remaining entries."""
        now, pending = self._clock(), defaultdict[str, list["DecodeRequest"]](list)
        for entry in entries:
            if entry.kv_receiver.conclude_state is not None:
                continue  # already ended; ``finish`` polls it
            record, address = record_of(entry.req), bootstrap_addr(entry.req)
            if record.handshake_since is None:
                record.handshake_since = now
            if now - record.handshake_since < self._allowed_s:
                pending[address].append(entry)
            else:
                entry.kv_receiver.fail_handshake(
                    f"prefill {address} did not report {record.handshake_lacks} "
                    f"within {self._allowed_s} s ({_DEADLINE})"
                )
        waiting = []
        for address, in_time in pending.items():
            waiting += self._advance(address, in_time)
        for address in self._attempts.keys() - pending.keys():  # no request waits for it any more
            del self._attempts[address]
        self._connections.forget_unwanted(pending)
        return waiting

    def finish(
        self, entries: Sequence[DecodeRequest], group: ProcessGroup, *, tries_here: bool
    ) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Poll the handshakes of ``entries`` on all ranks of ``group``. Return the failed ones and,
        if ``tries_here`` (this server may compute them), those with an unreachable server."""
        from sglang.srt.disaggregation.base.conn import KVPoll
        from sglang.srt.disaggregation.utils import poll_and_all_reduce

        failed: list[DecodeRequest] = []
        unreached: list[DecodeRequest] = []
        if not entries:
            return failed, unreached
        pollers = [_Reached(entry) if tries_here else entry.kv_receiver for entry in entries]
        for entry, vote in zip(entries, poll_and_all_reduce(pollers, group), strict=True):
            poll, is_reached = divmod(vote, 2) if tries_here else (vote, True)
            is_ready = poll == KVPoll.WaitingForInput
            # Do not announce a request that SGLang has refused, because its prompt is now [0].
            if poll == KVPoll.Failed or (is_ready and entry.req.to_finish is not None):
                failed.append(entry)
            elif is_ready:
                entry.waiting_for_input = True
                record = record_of(entry.req)
                record.enter(Stage.IN_LINE)
                record.wait.since = self._clock()
                entry.req.time_stats.set_bootstrap_done_time()
            elif not is_reached:
                unreached.append(entry)
        return failed, unreached

    def _advance(self, address: str, entries: list[DecodeRequest]) -> list[DecodeRequest]:
        """Advance the ``entries`` of one server. Return the ones that are not ready yet."""
        connections, now = self._connections, self._clock()
        failed, retry_at = self._attempts.pop(address, (0, 0.0))
        is_due = now >= retry_at
        if is_due and connections.ensure(address):
            return self._initialise(address, entries)
        if is_due and not connections.is_asking(address):
            failed, retry_at = failed + 1, now + self._retry_s
        if failed < self._max_attempts:
            self._attempts[address] = failed, retry_at
            for entry in entries:
                record_of(entry.req).unreachable |= failed > 0
            return entries
        logger.error(
            "prefill server %s did not report its server info in %d attempts: the requests that "
            "wait for it fail. Check that it runs and that this host can reach it",
            address,
            failed,
        )
        why = connections.refusals.pop(address)
        for entry in entries:
            entry.kv_receiver.fail_handshake(why)
        return []

    def _initialise(self, address: str, entries: list[DecodeRequest]) -> list[DecodeRequest]:
        """Initialise the receivers of a known server. Return the entries that are not ready yet."""
        ranks = {entry.req.bootstrap_room: self._dp_rank_of(entry.req) for entry in entries}
        unknown = [room for room, rank in ranks.items() if rank is None]
        if unknown:
            ranks |= self._connections.dp_ranks(address, unknown)
        waiting = []
        for entry in entries:
            record, rank = record_of(entry.req), ranks[entry.req.bootstrap_room]
            if rank is None:
                record.handshake_lacks = "which of its data-parallel ranks serves the request"
            elif not entry.kv_receiver.is_ready(rank):
                record.handshake_lacks = f"the addresses of its ranks (data-parallel rank {rank})"
            else:
                entry.kv_receiver.init(rank)
                continue
            waiting.append(entry)
        return waiting
