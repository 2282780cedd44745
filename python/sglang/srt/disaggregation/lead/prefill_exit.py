"""Prefill's half of a request that decode computes: it ends with an empty answer and status 200.

Decode notifies prefill by SGLang's ABORT message with a third frame, which a stock server does not
read, and only if the server answers ``ROUTE``: a stock one would answer its client with an error.
An ABORT that arrives before its request is remembered; SGLang ignores it, and the request then
waits until its bootstrap timeout.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Container
from typing import Any  # Any: SGLang's objects

import requests

from sglang.srt.disaggregation.lead.attach import Function, Wraps
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)

#: SGLang's ``ABORT_TAG``.
ABORT = b"ABORT"
#: Third frame of that message: decode computes the request.
LOCAL = b"LOCAL"
#: Route of the bootstrap server that answers 200 if the prefill server knows ``LOCAL``.
ROUTE = "/releases_local_prefill"
#: Number of rooms that are remembered, because any client can send room numbers.
MAX_ROOMS = 10_000


class Rooms(OrderedDict[int, bool | None]):
    """Notices of decode on the rooms of one prefill rank. True: decode computes the request; False:
    it was aborted before it arrived; None: it arrived. A later notice is on an ended room, or on a
    new one with the same number.

    Contract: the rank's reader thread and its scheduler thread call this without a lock, because
    each call is one operation of the dictionary."""

    @staticmethod
    def of(manager: Any) -> Rooms:
        """Return the rooms of a rank's manager."""
        return manager.__dict__.setdefault("lead_rooms", Rooms())

    def note(self, room: int, what: bool | None) -> None:
        """Note a room; forget the oldest one if there are too many."""
        self[room] = what
        if len(self) > MAX_ROOMS:
            self.popitem(last=False)


class ReleasingServers:
    """Prefill servers that release rooms.

    Contract: the scheduler thread calls the methods; each server is queried in a thread of its own,
    which removes its entry if there is no answer.
    """

    def __init__(self) -> None:
        self._releases: dict[str, bool | None] = {}

    def keep(self, reachable: Container[str]) -> None:
        """Forget servers that are not ``reachable``: a new one there is queried again."""
        for address in [*self._releases]:
            if address not in reachable:
                self._releases.pop(address, None)

    def releases(self, address: str) -> bool:
        """Return True if the server at ``address`` is known to release rooms; query a new one."""
        if address not in self._releases:
            self._releases[address] = None  # nothing is known yet
            threading.Thread(target=self._ask, args=(address,), daemon=True).start()
        return bool(self._releases.get(address))

    def _ask(self, address: str) -> None:
        url = f"http://{address}{ROUTE}"
        try:
            found = requests.get(url, timeout=environment.HANDSHAKE_TIMEOUT.read()).status_code
        except requests.RequestException as error:
            logger.warning("prefill server %s could not be queried: %s", url, error)
            self._releases.pop(address, None)
            return
        if address in self._releases:
            self._releases[address] = found == 200
        if found != 200:
            logger.warning(
                "prefill server %s does not release rooms (stock SGLang, or without %s): all its "
                "requests are computed there",
                address,
                environment.LOCAL_TOKENS.name,
            )


def release_room(receiver: Any) -> None:
    """End the request of ``receiver`` on prefill, because decode computes it. One rank notifies one
    connected rank of prefill; prefill's ranks agree on it."""
    message = [ABORT, str(receiver.bootstrap_room).encode("ascii"), LOCAL]
    for info in receiver.bootstrap_infos[:1]:
        if receiver.kv_mgr.attn_tp_rank != 0:
            continue
        try:
            socket, lock = receiver._connect_to_bootstrap_server(info)
            with lock:
                socket.send_multipart(message)
        except Exception as error:
            logger.warning(
                "prefill rank %s was not notified that decode computes room %s (%s): its half "
                "ends by its bootstrap timeout",
                info.get("rank_ip"),
                receiver.bootstrap_room,
                error,
            )
    receiver.clear()


def install(wrap: Wraps) -> None:
    """See ``attach``. Mooncake's module is not imported: it imports ``prometheus_client``. The HTTP
    server's process must not, before SGLang has prepared that, or there are no metrics."""
    from sglang.srt.disaggregation.common import conn
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager
    from sglang.srt.managers.scheduler import Scheduler

    @wrap(NixlKVManager, "_handle_abort_notification", "(self, msg)")
    def note(stock: Function, self: Any, msg: list[bytes]) -> Any:
        notice = conn.AbortNotification.from_zmq(msg) if msg[:1] == [ABORT] else None
        if notice is not None:
            rooms, is_local = Rooms.of(self), msg[2:] == [LOCAL]
            if notice.room not in rooms or (is_local and notice.room in self.request_status):
                rooms.note(notice.room, is_local)
        return stock(msg)

    @wrap(
        conn.CommonKVSender,
        "__init__",
        "(self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=False)",
    )
    def init(
        stock: Function,
        self: Any,
        mgr: Any,
        bootstrap_addr: str,
        bootstrap_room: int,
        *rest: Any,
        **more: Any,
    ) -> None:
        stock(mgr, bootstrap_addr, bootstrap_room, *rest, **more)
        rooms = Rooms.of(mgr)
        told = rooms.get(bootstrap_room)
        rooms.note(bootstrap_room, told or None)
        if told is not None:
            mgr.record_failure(bootstrap_room, "aborted by decode before the request came")
            mgr.update_status(bootstrap_room, conn.KVPoll.Failed)

    wrap(Scheduler, "handle_bootstrap_failure", "(self, req)")(_end)

    @wrap(conn.CommonKVBootstrapServer, "_setup_routes", "(self)")
    def _setup_routes(stock: Function, self: Any) -> None:
        stock()

        async def answer(_: Any) -> Any:
            return conn.web.Response(text="OK")

        self.app.router.add_get(ROUTE, answer)


def _end(stock: Function, self: Any, req: Any) -> None:
    """End a request on prefill before its transfer, with an empty answer if decode computes it. All
    ranks agree on that."""
    from torch.distributed import ReduceOp

    from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer
    from sglang.srt.disaggregation.utils import all_reduce_flags, prepare_abort
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome
    from sglang.srt.mem_cache.common import release_kv_cache

    manager: Any = getattr(req.disagg_kv_sender, "kv_mgr", None)
    room = req.bootstrap_room
    is_local = bool(manager and Rooms.of(manager).get(room))
    if not any(all_reduce_flags([is_local], self.attn_tp_cpu_group, ReduceOp.MAX)):
        stock(req)
        return
    Rooms.of(manager).note(room, None)
    self.clear_pending_chunk_send(req)
    req.disagg_kv_sender.clear()
    with manager.failure_lock:
        manager.failure_records.pop(room, None)
    if req.kv.holds_kv:
        release_kv_cache(req, self.tree_cache, checkpoint=False)
    maybe_release_metadata_buffer(req, self.req_to_metadata_buffer_idx_allocator)
    req.pending_bootstrap = False
    prepare_abort(req, "")  # no log probabilities either
    req.finished_reason = FINISH_LENGTH(length=0)
    self.output_streamer.stream_output([req], req.return_logprob)
    # Nothing else ends its prefetch from a HiCache store: prefill will not read the pages.
    self.tree_cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
