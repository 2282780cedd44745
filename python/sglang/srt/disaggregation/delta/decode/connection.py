"""Decode's end of a room on any backend: its handshake, its announcement, its end.

``Handshakes`` initialises receivers when all is known of their prefill servers; nobody waits for an
answer, and no request for ever.
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

import numpy as np
import numpy.typing as npt
import zmq
from typing_extensions import override

from sglang.srt.disaggregation.delta import observability, wire
from sglang.srt.disaggregation.delta.decode.prefill_servers import (
    Connections,
    PrefillServers,
    RankInfos,
)
from sglang.srt.disaggregation.delta.decode.request import Stage, bootstrap_addr, record_of
from sglang.srt.disaggregation.delta.decode.transfer import DeferredFree
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
    #: Prefill was told of pages, and may write to them.
    announced = False
    #: The client left, so fallback prefill does not compute the request.
    aborted = False
    #: Where the server's ranks listen, if this rank is not connected to them yet.
    _answers: RankInfos = {}

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
        """Whether a request of this number ended early that prefill may still write for."""
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
            self._fail(
                Reason.HANDSHAKE, f"could not connect to prefill {self.bootstrap_addr}: {error!r}"
            )
            servers.disconnect(self.bootstrap_addr)
        else:
            if self._answers:
                servers.connected(self.bootstrap_addr, getattr(self, "bootstrap_infos", None) or [])

    def is_ready(self, prefill_dp_rank: int) -> bool:
        """Whether ``init`` may be called: it never queries the prefill server itself, since that
        would stop the scheduler. What is missing is queried in the background. Of a decode server
        with the radix cache, as others have no ``Handshakes``."""
        answers = self.kv_mgr.servers.connections.ranks(
            self.bootstrap_addr, prefill_dp_rank, super()._get_bootstrap_info_from_server
        )
        self._answers = answers or {}
        return answers is not None

    @override
    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank: int, prefill_cp_rank: int, target_tp_rank: int, target_pp_rank: int
    ) -> Any:
        rank = (prefill_dp_rank, prefill_cp_rank, target_tp_rank, target_pp_rank)
        if self._servers is None:
            return super()._get_bootstrap_info_from_server(*rank)
        return self._answers.get(rank)

    def fail_handshake(self, text: str) -> None:
        """End the room before it has begun."""
        self._fail(Reason.HANDSHAKE, text)

    #: Set where a decode rank watches its prefill servers: sockets to them queue without a bound.
    drops_dead_sockets = False

    @classmethod
    @override
    def _connect(cls, endpoint: str, is_ipv6: bool = False) -> Any:
        socket, lock = super()._connect(endpoint, is_ipv6)
        if cls.drops_dead_sockets:
            with lock:
                # A full queue would stop the scheduler; ``drop_socket`` empties a dead peer's.
                socket.setsockopt(zmq.SNDHWM, 0)
        return socket, lock

    @classmethod
    def drop_socket(cls, host: str, port: int) -> None:
        """Throw away what is queued for a prefill rank that is gone."""
        from sglang.srt.utils.network import NetworkAddress

        endpoint = NetworkAddress(host, port).to_tcp()
        with cls._global_lock:
            socket = cls._socket_cache.pop(endpoint, None)
            lock = cls._socket_locks.pop(endpoint, None)
        if socket is not None:
            with lock:
                socket.close(linger=0)

    def announce(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int,
        prefix_len: int,
        state_indices: npt.NDArray[np.int32] | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        """Send the transfer metadata of a room: ``kv_indices`` are the *delta's* destination pages.

        ``prefix_len`` is in tokens; ``state_indices``: the delta's pages of an index cache;
        ``prompt_tokens``: of the whole prompt, 0 if prefill is not to compare. The frame is added
        where the stock code gets its socket, so the stock message stays SGLang's.
        """
        connect = self._connect_to_bootstrap_server
        ours = self.kv_mgr.kv_args
        pool_pages = ours.kv_data_lens[0] // ours.kv_item_lens[0]
        metadata_slots = ours.aux_data_lens[0] // ours.aux_item_lens[0]
        takes_metadata = self.kv_mgr.expect_metadata(self.bootstrap_room, aux_index)

        def connect_with_frame(bootstrap_info: dict[str, Any]) -> tuple[Any, threading.Lock]:
            socket, lock = connect(bootstrap_info)
            is_dummy = bool(bootstrap_info["is_dummy"])
            frame = wire.DeltaFrame(
                decode_prefix_len=prefix_len,
                num_pages=0 if is_dummy else len(kv_indices),
                is_dummy=is_dummy,
                num_writers=self.required_prefill_response_num,
                pool_pages=pool_pages,
                metadata_slots=metadata_slots,
                takes_metadata=takes_metadata,
                prompt_tokens=prompt_tokens,
            )
            encoded = wire.encode_frame(frame)

            def send(frames: list[bytes]) -> None:
                socket.send_multipart([*frames, encoded])

            return SimpleNamespace(send_multipart=send), lock

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
        """Notify prefill that decode does not want this room any more. Needs no answer."""
        infos = getattr(self, "bootstrap_infos", None)
        if self._servers is not None and infos:
            self._servers.withdraw(self.bootstrap_addr, infos, self.bootstrap_room, reason)

    def yield_room(self) -> None:
        """Notify prefill that decode computes the request itself: it ends there at once."""
        infos = getattr(self, "bootstrap_infos", None)
        # One message a room: this rank's prefill ranks have among them the one that clients hear.
        if self._servers is not None and infos and self.kv_mgr.attn_tp_rank == 0:
            self._servers.yield_room(self.bootstrap_addr, infos, self.bootstrap_room)

    def defer_free(self) -> DeferredFree | None:
        """Withdraw a room whose pages were announced, and follow it until it is drained.

        None where nobody can write to them any more.
        """
        room, manager = self.bootstrap_room, self.kv_mgr
        told = self.announced or getattr(self, "init_time", None) is not None
        if self._servers is None or not told:
            self.withdraw("it ended before it was announced")
            return None
        progress, writers = manager.transfer_statuses[room], self.required_prefill_response_num
        if progress.is_drained(writers):
            return None
        progress.is_deferred = True
        self.withdraw(manager.failure_records.get(room, "it was aborted"))
        collect = partial(manager.collect_arrivals, room)
        return DeferredFree(
            progress, writers, collect, partial(manager.transfer_statuses.pop, room, None)
        )


class RoomReceiver(CommonKVReceiver):
    """Of a backend that moves deltas: leaves nothing of its room behind, says why it failed."""

    conclude_state: KVPoll | None  # of the upstream class; named for the type checker

    @override
    def poll(self) -> KVPoll:
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self.conclude_state is not None:
            return self.conclude_state
        manager, room = self.kv_mgr, self.bootstrap_room
        ended = KVPoll.Success, KVPoll.Failed
        # Without the flag requests of a number share its entries, as in SGLang, and the first that
        # ends takes them along.
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
        CommonKVReceiver.abort(self)  # Mooncake's own does not call what is common to all backends

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
    """Polls a receiver, and in the lowest bit, whether its prefill server was reached so far or the
    request was attempted here already. Of several ranks' the smallest counts."""

    entry: DecodeRequest

    def poll(self) -> int:
        record = record_of(self.entry.req)
        is_reached = record.tried_here or not record.unreachable
        return 2 * int(self.entry.kv_receiver.poll()) + is_reached


class Handshakes:
    """One for each prealloc queue. Called in every step by the scheduler's thread.

    A request passes the three questions of ``Connections``: the topology of its prefill server, the
    data-parallel rank that serves it, and where the ranks listen that write to this one.
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
        """``dp_rank_of``: the data-parallel rank that serves a request, None where prefill has to
        be queried; ``allowed_s``: how long a handshake may take; ``attempts``: how often a server's
        topology is asked for before its requests fail, ``retry_s`` apart."""
        self._connections, self._dp_rank_of, self._clock = connections, dp_rank_of, clock
        self._allowed_s, self._most_attempts, self._retry_s = allowed_s, attempts, retry_s
        #: How often a server could not be queried for its topology, and when it is queried again.
        self._attempts: dict[str, tuple[int, float]] = {}

    def advance(self, entries: Sequence[DecodeRequest]) -> list[DecodeRequest]:
        """Initialise the receivers of ``entries`` that are ready, and fail those that waited for
        too long; the others wait on."""
        now, pending = self._clock(), defaultdict[str, list["DecodeRequest"]](list)
        for entry in entries:
            if entry.kv_receiver.conclude_state is not None:
                continue  # who polls it answers
            record, address = record_of(entry.req), bootstrap_addr(entry.req)
            if record.handshake_since is None:
                record.handshake_since = now
            in_time = pending[address]
            if now - record.handshake_since < self._allowed_s:
                in_time.append(entry)
                continue
            entry.kv_receiver.fail_handshake(
                f"prefill {address} did not report {record.handshake_lacks} "
                f"within {self._allowed_s} s ({_DEADLINE})"
            )
        waiting = []
        for address, in_time in pending.items():
            waiting += self._advance(address, in_time)
        for address in self._attempts.keys() - pending.keys():  # whoever asked went away
            del self._attempts[address]
        self._connections.forget_unwanted(pending)
        return waiting

    def finish(
        self, entries: Sequence[DecodeRequest], group: ProcessGroup, *, tries_here: bool
    ) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Poll the handshakes of ``entries``, on all ranks of ``group``: which of them failed, and
        of which no prefill server was reached. The latter are asked for only where it
        ``tries_here`` to compute such requests."""
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
        """Those of ``entries`` that are still not ready."""
        connections, now = self._connections, self._clock()
        failed, again_at = self._attempts.get(address, (0, 0.0))
        is_known = now >= again_at and connections.ensure(address)
        if now >= again_at and not is_known and not connections.is_asking(address):
            failed, again_at = failed + 1, now + self._retry_s
        self._attempts[address] = failed, again_at
        if is_known or failed == self._most_attempts:
            del self._attempts[address]
        if not is_known and failed == self._most_attempts:
            logger.error(
                "prefill server %s did not report its server info in %d attempts: the requests "
                "that wait for it fail. Check that it runs and that this host can reach it",
                address,
                failed,
            )
            why = connections.refusals.pop(address)
            for entry in entries:
                entry.kv_receiver.fail_handshake(why)
            return []
        if not is_known:
            for entry in entries:
                record_of(entry.req).unreachable |= failed > 0
            return entries
        ranks = {entry.req.bootstrap_room: self._dp_rank_of(entry.req) for entry in entries}
        unknown = [room for room, rank in ranks.items() if rank is None]
        if unknown:
            ranks |= connections.dp_ranks(address, unknown)
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
