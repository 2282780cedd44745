"""Thin overrides of SGLang's common connector classes (``disaggregation/common/conn.py``).

Every backend that derives from them gets the delta protocol; only how bytes move is its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web
from typing_extensions import override

from sglang.srt.disaggregation.delta import capability, wire
from sglang.srt.disaggregation.delta.pages import DeltaMismatch, plan_delta

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVManager
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender  # isort: skip
else:
    CommonKVBootstrapServer = CommonKVManager = CommonKVReceiver = CommonKVSender = object

logger = logging.getLogger(__name__)


def is_failed(status: Any) -> bool:
    """Whether a room's status is ``KVPoll.Failed``."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    return bool(status == KVPoll.Failed)


class DeltaBootstrapServer(CommonKVBootstrapServer):
    """Prefill's bootstrap server also says what this prefill server understands."""

    @override
    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get(capability.ROUTE, self._handle_capabilities)

    async def _handle_capabilities(self, request: web.Request) -> web.Response:
        return web.json_response(msgspec.to_builtins(capability.OURS))


class DeltaManager(CommonKVManager):
    """Remembers which prefill servers take a delta, and keeps a failed room failed."""

    @override
    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        known = self._peer_capabilities
        if self.wants_delta and bootstrap_addr not in self.prefill_info_table:
            # Asked again whenever the stock code fetches the topology again: a prefill server that
            # came back at the same address may be another version.
            known.pop(bootstrap_addr, None)
            capabilities = capability.fetch_capabilities(bootstrap_addr)
            if capabilities is None:
                return False
            known[bootstrap_addr] = capabilities
        return bool(super().try_ensure_parallel_info(bootstrap_addr))

    @property
    def wants_delta(self) -> bool:
        """Whether this is a decode server with the radix cache on."""
        return getattr(self.server_args, "disaggregation_decode_enable_radix_cache", False)

    @property
    def _peer_capabilities(self) -> dict[str, capability.Capabilities]:
        table: dict[str, capability.Capabilities] = self.__dict__.setdefault("_capabilities", {})
        return table

    def peer_takes_delta(self, bootstrap_addr: str) -> bool:
        """Whether the prefill server at ``bootstrap_addr`` may be sent a prefix length."""
        return self._peer_capabilities.get(bootstrap_addr, capability.STOCK).takes_delta

    @override
    def update_status(self, bootstrap_room: int, status: Any) -> None:
        # Stock merges states with max(), where Failed is the lowest: a late message would bring a
        # failed room back to life.
        if is_failed(self.request_status.get(bootstrap_room)):
            return
        super().update_status(bootstrap_room, status)


class _FrameAppender:
    """A ZMQ socket that adds one frame to the multipart message sent through it."""

    def __init__(self, socket: Any, frame: bytes) -> None:
        self._socket = socket
        self._frame = frame

    def send_multipart(self, frames: list[bytes]) -> None:
        self._socket.send_multipart([*frames, self._frame])


class DeltaReceiver(CommonKVReceiver):
    """Decode's side of a room: announces the prefix that it already holds."""

    _connect_to_bootstrap_server: Any

    def announce(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int,
        prefix_len: int,
    ) -> None:
        """Send the transfer metadata of a room: ``kv_indices`` are the *delta's* destination pages.

        ``prefix_len`` is in tokens. The frame is added where the stock code gets its socket, so the
        stock message and its order of frames stay SGLang's.
        """
        connect = self._connect_to_bootstrap_server

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
            )
            return _FrameAppender(socket, wire.encode_frame(frame)), lock

        self._connect_to_bootstrap_server = connect_with_frame
        try:
            self.send_metadata(kv_indices, aux_index, None)
        finally:
            del self._connect_to_bootstrap_server


class _Destination(msgspec.Struct, frozen=True):
    """One real destination of a room, as the plan wants it."""

    decode_prefix_len: int
    num_pages: int


class DeltaSender(CommonKVSender):
    """Prefill's side of a room: starts at the prefix that decode holds."""

    #: Tokens that decode holds and that are not sent.
    decode_prefix_len: int = 0
    #: What the room's decode ranks announced.
    announcements: Sequence[Any] = ()

    @override
    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        # Runs when the metadata of every decode rank is in, before the first chunk is computed.
        # Kept because SGLang's manager forgets them with the last chunk, before it was delivered.
        self.announcements = list(self.kv_mgr.transfer_infos.get(self.bootstrap_room, {}).values())
        try:
            plan = plan_delta(
                self.bootstrap_room,
                self._destinations(),
                num_kv_indices,
                self.kv_mgr.kv_args.page_size,
            )
        except (DeltaMismatch, wire.DeltaFrameError) as error:
            super().init(num_kv_indices, aux_index)
            self.fail(str(error))
            return
        self.decode_prefix_len = plan.prefix_len
        super().init(plan.num_pages, aux_index)

    def _destinations(self) -> list[_Destination]:
        found = []
        for info in self.announcements:
            error = getattr(info, "delta_error", None)
            if error:
                raise wire.DeltaFrameError(f"room {self.bootstrap_room}: {error}")
            is_dummy = info.is_dummy() if callable(info.is_dummy) else info.is_dummy
            if is_dummy:
                continue
            frame: wire.DeltaFrame | None = getattr(info, "delta", None)
            prefix = frame.decode_prefix_len if frame else 0
            found.append(_Destination(prefix, len(info.dst_kv_indices)))
        return found

    def fail(self, reason: str) -> None:
        """Fail this room alone: record why, send nothing more, tell its decode ranks."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        logger.error("KV transfer of room %s failed: %s", self.bootstrap_room, reason)
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.tell_failure(reason)

    def tell_failure(self, reason: str) -> None:
        """Tell the room's decode ranks that it failed. Backends that can do so override this."""
