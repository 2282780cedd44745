"""Decode's end of a room on any backend: a thin override of SGLang's receiver."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any  # Any: SGLang's own attributes, sockets and JSON

import numpy as np
import numpy.typing as npt
import zmq
from typing_extensions import override

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.decode.deferred_free import DeferredFree
from sglang.srt.disaggregation.delta.decode.prefill_servers import PrefillServers
from sglang.srt.disaggregation.delta.metrics import Reason

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver
    from sglang.srt.disaggregation.delta.manager import DeltaManager
else:
    CommonKVReceiver = object


class _FrameAppender:
    """A ZMQ socket that adds one frame to the multipart message sent through it."""

    def __init__(self, socket: Any, frame: bytes) -> None:
        self._socket = socket
        self._frame = frame

    def send_multipart(self, frames: list[bytes]) -> None:
        self._socket.send_multipart([*frames, self._frame])


class DeltaReceiver(CommonKVReceiver):
    """Decode's side of a room: announces the prefix that it already holds."""

    _connect_to_bootstrap_server: Any  # of the upstream class
    #: Prefill was told of pages, and may write to them.
    announced = False
    _epoch = 0

    def __init__(
        self, mgr: DeltaManager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:  # fmt: skip
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        if self._servers is not None and self._servers.deferred(bootstrap_room) is not None:
            self._fail(
                Reason.MISMATCH,
                f"bootstrap_room {bootstrap_room} is still in use by a request that ended early",
            )

    @property
    def _servers(self) -> PrefillServers | None:
        return self.kv_mgr.servers

    def _fail(self, kind: Reason, text: str) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self._servers is not None:
            self._servers.fail(self.bootstrap_room, kind, text)
        else:
            self.kv_mgr.record_failure(self.bootstrap_room, text)
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed

    def fail_if_overdue(self) -> bool:
        """Fail an announced room that is not complete by its deadline; whether it was one."""
        manager = self.kv_mgr
        if self.init_time is None or time.time() - self.init_time < manager.waiting_timeout:
            return False
        self._fail(
            Reason.TIMEOUT,
            f"room {self.bootstrap_room}: prefill {self.bootstrap_addr} did not complete it within "
            f"{manager.waiting_timeout} s (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)",
        )
        return True

    @override
    def init(self, prefill_dp_rank: int) -> None:
        servers = self._servers
        if servers is None:
            super().init(prefill_dp_rank)
            return
        try:
            super().init(prefill_dp_rank)
        except Exception as error:  # no request may raise out of the scheduler's loop
            self._fail(
                Reason.HANDSHAKE, f"could not connect to prefill {self.bootstrap_addr}: {error!r}"
            )
            servers.disconnect(self.bootstrap_addr)
            return
        finally:
            servers.connections.settled(self.bootstrap_addr, prefill_dp_rank)
        self._epoch = servers.epoch(self.bootstrap_addr)
        servers.connected(self.bootstrap_addr, getattr(self, "bootstrap_infos", None) or [])

    def is_ready(self, prefill_dp_rank: int) -> bool:
        """Whether ``init`` may be called: it never queries the prefill server itself, since that
        would stop the scheduler. What is missing is queried in the background."""
        servers = self._servers
        return servers is None or servers.connections.is_ready(
            self.bootstrap_addr, prefill_dp_rank, super()._get_bootstrap_info_from_server
        )

    @override
    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank: int, prefill_cp_rank: int, target_tp_rank: int, target_pp_rank: int
    ) -> Any:
        rank = (prefill_dp_rank, prefill_cp_rank, target_tp_rank, target_pp_rank)
        if self._servers is None:
            return super()._get_bootstrap_info_from_server(*rank)
        return self._servers.connections.answer(self.bootstrap_addr, rank)

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
    ) -> None:
        """Send the transfer metadata of a room: ``kv_indices`` are the *delta's* destination pages.

        ``prefix_len`` is in tokens; ``state_indices``: the delta's pages of an index cache. The
        frame is added where the stock code gets its socket, so the stock message and its order of
        frames stay SGLang's.
        """
        connect = self._connect_to_bootstrap_server
        ours = self.kv_mgr.kv_args
        pool_pages = ours.kv_data_lens[0] // ours.kv_item_lens[0]
        metadata_slots = ours.aux_data_lens[0] // ours.aux_item_lens[0]
        takes_metadata = self.kv_mgr.expect_metadata(self.bootstrap_room, aux_index)

        def connect_with_frame(
            bootstrap_info: dict[str, Any],
        ) -> tuple[_FrameAppender, threading.Lock]:
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
            )
            return _FrameAppender(socket, wire.encode_frame(frame)), lock

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
        servers = self._servers
        told = self.announced or getattr(self, "init_time", None) is not None
        if servers is None or not told:
            self.withdraw("it ended before it was announced")
            return None
        room = self.bootstrap_room
        deferred = servers.defer_free(
            room, self.bootstrap_addr, self._epoch, self.required_prefill_response_num
        )
        if deferred is not None:
            self.withdraw(self.kv_mgr.failure_records.get(room, "it was aborted"))
        return deferred

    def forget(self) -> None:
        """Leave no entry of the room in the manager's tables."""
        room, manager = self.bootstrap_room, self.kv_mgr
        manager.statuses.forget(room)
        manager.required_prefill_response_num_table.pop(room, None)
        if self._servers is not None:
            manager.take_progress(room)
        rooms = manager.addr_to_rooms_tracker.get(self.bootstrap_addr)
        if rooms is not None:
            rooms.discard(room)
