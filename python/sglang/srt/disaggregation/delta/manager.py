"""Thin overrides of SGLang's bootstrap server and manager (``disaggregation/common/conn.py``): they
give every backend the delta protocol, and a backend adds only the movement of bytes.

Contract: scheduler thread, except ``pd-reader`` (messages of peers, and ``forget_silent_peers``)
and threads of the backend. The tables that both use (``rooms``, ``decode_ranks``, ``servers``,
``statuses``) have their own locks.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any  # Any: SGLang's receiver; payloads are the backend's own

import msgspec
from aiohttp import web
from typing_extensions import override

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.decode.heartbeat import WatchedServers
from sglang.srt.disaggregation.delta.decode.prefill_servers import Tables, drop_socket
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.observability import TransferGauges
from sglang.srt.disaggregation.delta.pages import RECURRENT_TYPE
from sglang.srt.disaggregation.delta.peer_messages import Announcements, MessageReader
from sglang.srt.disaggregation.delta.prefill.decode_ranks import DecodeRanks, ServedRooms
from sglang.srt.disaggregation.delta.prefill.rooms import GONE, Room, RoomState, RoomTable
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Backend, TransferSettings
from sglang.srt.disaggregation.delta.prefill.transfer_pool import TransferPool
from sglang.srt.disaggregation.delta.rank import RankView, Statuses
from sglang.srt.patchset import environment
from sglang.srt.patchset.attach import exchanged

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.common.conn import (
        CommonKVBootstrapServer,
        CommonKVManager,
        PrefillServerInfo,
    )
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.server_args import ServerArgs
else:
    CommonKVBootstrapServer = CommonKVManager = object

logger = logging.getLogger(__name__)

#: Seconds for which a process that ends waits for transfers under way.
_DRAIN_S = 1.0


class DeltaBootstrapServer(CommonKVBootstrapServer):
    """Prefill's bootstrap server with a route for the server's capabilities and identity."""

    #: True if this server answers requests that decode computes itself (``prefill/yielded.py``).
    yields = False

    @override
    def _setup_routes(self) -> None:
        super()._setup_routes()
        # Serve the route only if the group of this backend's manager is attached.
        names = vars(sys.modules[type(self).__module__]).values()
        if not any(getattr(value, "moves_deltas", False) for value in names):
            return  # like a stock server: decode requests whole prompts
        self._capabilities = msgspec.structs.replace(wire.OURS, incarnation=uuid.uuid4().hex)
        self.app.router.add_get(wire.ROUTE, self._handle_capabilities)

    async def _handle_capabilities(self, request: web.Request) -> web.Response:
        from sglang.srt.server_args import get_global_server_args

        try:
            drafts = get_global_server_args().speculative_algorithm or wire.NO_DRAFTS
        except ValueError:  # SGLang does not set them in the router of several tokenizers
            drafts = None
        capabilities = msgspec.structs.replace(
            self._capabilities, speculative=drafts, yields=self.yields
        )
        return web.json_response(msgspec.to_builtins(capabilities))


class DeltaManager(CommonKVManager):
    """Owns this rank's tables of rooms and peers, and keeps a failed room failed.

    A backend's manager starts the reader thread (``start_prefill``, ``start_decode``) and says how
    bytes move: ``make_backend``, ``cut``, ``announcements`` and ``forget_peer`` for a prefill rank,
    ``peer_name``, ``transfer_statuses`` and ``collect_arrivals`` for a decode rank.
    """

    #: True in backends with the delta protocol; other backends stay stock.
    moves_deltas = False
    #: Prefill only: ``RoomTable`` and ``DecodeRanks``.
    rooms: Any = None
    decode_ranks: Any = None
    #: Decode with the radix cache only: ``PrefillServers``.
    servers: Any = None
    #: Decode only: room -> ``Progress``, created on first access.
    transfer_statuses: dict[int, Any]
    #: Makes the payload of a chunk on a prefill rank, with ``destinations`` by peer: see
    #: ``nixl.conn.cut_chunk``. On the scheduler's thread; raises ``DeltaMismatch``.
    cut: Callable[..., Any]

    def __init__(
        self, args: KVArgs, disaggregation_mode: DisaggregationMode, server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:  # fmt: skip
        names = {"get_zmq_socket_on_host": wire.bounded_socket} if self.moves_deltas else {}
        with exchanged("delta", "sglang.srt.disaggregation.common.conn", names):
            super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.start_delta(disaggregation_mode, server_args)  # before the backend's threads

    def start_delta(self, mode: DisaggregationMode, server_args: ServerArgs) -> None:
        """Set up the tables of this rank's side."""
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver
        from sglang.srt.disaggregation.utils import DisaggregationMode

        has_flag = getattr(server_args, "disaggregation_decode_enable_radix_cache", False)
        is_prefill = mode == DisaggregationMode.PREFILL
        if not self.moves_deltas:
            return
        self.rank = RankView.of(self)
        self.statuses = Statuses(self.request_status, self.failure_records)
        self.update_status = self.statuses.update
        if is_prefill:
            self.rooms = RoomTable(self.statuses)
            self.decode_ranks = DecodeRanks(
                self.rooms, self.decode_kv_args_table, self.rank.writer_id
            )
            self.rooms.on_drained = self.decode_ranks.tell
            self.served_rooms = ServedRooms(self.rank, server_args)
        elif has_flag:
            receivers: Any = CommonKVReceiver  # combined with ``DeltaReceiver``
            receivers.drops_dead_sockets = True
            self.servers = WatchedServers(
                self.rank,
                self.statuses,
                Tables.of(self),
                server_args,
                ask=super().try_ensure_parallel_info,
                peer_name=lambda: self.peer_name,
                drop_socket=partial(drop_socket, receivers),
            )

    # ---- the thread that reads messages of peers ----

    def start_reader(
        self,
        take_other: Callable[[list[bytes]], None] | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread that reads this rank's socket. Control messages go to its rooms
        (prefill) or servers (decode), SGLang's own messages to ``take_other``. ``tick`` is called
        about once a second."""
        side = self.decode_ranks or self.servers
        threading.Thread(
            target=MessageReader(side.take, take_other).serve,
            args=(self.server_socket, tick),
            name="pd-reader",
            daemon=True,
        ).start()

    def start_decode(self, take_other: Callable[[list[bytes]], None] | None = None) -> None:
        """Start the threads of a decode rank with the radix cache."""
        self.start_reader(take_other)
        self.servers.start_heartbeat(self.heartbeat_interval, self.max_failures)

    def start_prefill(self) -> None:
        """Start the threads of a prefill rank."""
        self.start_transfers()
        self.start_reader(self.announcements().take, self.tick_transfers)

    def start_transfers(self) -> None:
        """Start the transfer workers of this prefill rank.

        Raises:
            ValueError: a variable has an impossible value; the message names it.
        """
        settings = TransferSettings.read()
        #: Seconds that a chunk may take, from the queue to its end.
        self.transfer_s = environment.TRANSFER_TIMEOUT.read()
        self.transfer_gauges = TransferGauges()
        self.transfers = TransferPool(
            self.make_backend(settings),
            self.rooms,
            settings,
            self.transfer_gauges,
            prepare_thread=self._prepare_thread,
        )
        self.rooms.on_stopped = self.room_stopped
        self.transfers.start()
        atexit.register(self.transfers.stop, _DRAIN_S)

    def _prepare_thread(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(self.kv_args.gpu_id)

    def tick_transfers(self) -> None:
        """Check workers and decode ranks. Called about once a second by the reader thread."""
        self.transfer_gauges.tick()
        self.transfers.tick()
        self.forget_silent_peers()

    def forget_silent_peers(self) -> None:
        """Drop silent decode ranks; called on prefill about once a second."""
        for peer in self.decode_ranks.tick():
            known = self.decode_kv_args_table.get(peer)
            logger.warning(
                "decode rank %s (%s) was silent for %g s or longer "
                "(SGLANG_DISAGGREGATION_PEER_TIMEOUT), or is the least recently used of more than "
                "4,096 registered ranks: its rooms fail and its registration is dropped. A rank "
                "that pings reconnects by itself",
                peer,
                f"{known.endpoint}:{known.dst_port}" if known is not None else "not registered",
                environment.PEER_TIMEOUT.read(),
            )
            self.forget_peer(peer)

    # ---- what a backend adds on a prefill rank ----

    def make_backend(self, settings: TransferSettings) -> Backend:
        """Return what moves bytes for the transfer workers. Called once."""
        raise NotImplementedError

    def announcements(self) -> Announcements:
        """Return what takes the registrations and announcements of decode ranks. Called once."""
        raise NotImplementedError

    def forget_peer(self, peer: str) -> None:
        """Forget a decode rank. Called on the reader thread."""
        raise NotImplementedError

    def room_stopped(self, room: Room, kind: Reason) -> None:
        """Drop what waits of a room that failed. Called on the thread that failed it."""
        self.transfers.cancel(room)

    # ---- what a backend adds on a decode rank ----

    def collect_arrivals(self, asker: int) -> None:
        """Read the transport's notifications, for room ``asker``. A no-op for a transport whose
        completions arrive as messages."""

    def expect_metadata(self, room: int, slot: int) -> bool:
        """Return True if the metadata of ``room``, which is announced with ``slot``, may arrive in
        the completing notification instead of a write to the slot."""
        return False

    @override
    def get_mha_kv_ptrs_with_pp(self, src_kv_ptrs: list[int], dst_kv_ptrs: list[int]) -> Any:
        # Cut off the buffers of a draft model that only decode has, which follow the target's.
        # Because otherwise, if the draft's layers are a multiple of the target's, stock reads the
        # list as that of more pipeline stages.
        if self.pp_size == 1 and len(dst_kv_ptrs) > len(src_kv_ptrs):
            dst_kv_ptrs = dst_kv_ptrs[: len(src_kv_ptrs)]
        return super().get_mha_kv_ptrs_with_pp(src_kv_ptrs, dst_kv_ptrs)

    @override
    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        if self.servers is not None:
            return bool(self.servers.connections.ensure(bootstrap_addr))
        return bool(super().try_ensure_parallel_info(bootstrap_addr))

    @override
    def _resolve_rank_mapping(self, info: PrefillServerInfo) -> None:
        has_states = getattr(self.kv_args, "state_type", "") == RECURRENT_TYPE
        theirs, ours = (info.attn_tp_size, info.pp_size), (self.attn_tp_size, self.pp_size)
        if self.servers is not None and has_states and theirs != ours:
            # SGLang refuses unequal tensor parallel sizes over NIXL. Over Mooncake it sends slices
            # to wrong places, because each rank's convolution has a part of queries, keys and
            # values.
            raise RuntimeError(
                "recurrent state needs equal tensor and pipeline parallel sizes, not "
                f"{theirs} on prefill and {ours} on decode"
            )
        super()._resolve_rank_mapping(info)

    def peer_takes_delta(self, bootstrap_addr: str) -> bool:
        """Return True if the prefill server at ``bootstrap_addr`` accepts a prefix length."""
        servers = self.servers
        return servers is not None and servers.capabilities(bootstrap_addr).takes_delta

    def peer_yields(self, bootstrap_addr: str) -> bool:
        """Return True if the prefill server at ``bootstrap_addr`` leaves a request to decode on
        demand. False with pipeline stages, because they could not agree on that."""
        topology = self.prefill_info_table.get(bootstrap_addr)
        if self.servers is None or topology is None or topology.pp_size > 1:
            return False
        capabilities = self.servers.capabilities(bootstrap_addr)
        return capabilities.takes_control and capabilities.yields

    def open_rooms(self) -> dict[str, list[int]]:
        """Return every per-room table of this rank with its rooms; all empty on an idle server."""
        tables = {
            name: sorted(getattr(self, name, ()))
            for name in (
                "request_status",
                "failure_records",
                "required_prefill_response_num_table",
                "transfer_statuses",
                "prefill_response_tracker",
            )
        }
        if self.rooms is not None:
            # Not leftovers: rooms announced before their request arrives (which has a deadline),
            # and ended rooms that are kept although their request is gone.
            tables["rooms"] = [
                room.number
                for room in self.rooms.all()
                if room.state is not RoomState.ANNOUNCED
                and (room.state not in GONE or room.reason is None)
            ]
        tracked = list(getattr(self, "addr_to_rooms_tracker", {}).values())
        tables["addr_to_rooms_tracker"] = [room for rooms in tracked for room in rooms]
        return tables
