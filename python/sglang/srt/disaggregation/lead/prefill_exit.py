"""Prefill's half of a request that decode computes: it ends with an empty answer and status 200.

Decode says so by SGLang's ABORT message with a third frame, which a stock server does not read. It
says it only to servers that answer ``ROUTE``: a stock one would answer its client with an error.
An ABORT that comes before its request is remembered; SGLang ignores it, and the request then waits
until its bootstrap timeout.
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

#: SGLang's ``ABORT_TAG``; and the third frame of that message: decode computes the request.
ABORT, LOCAL = b"ABORT", b"LOCAL"
#: Of the bootstrap server: answers 200 where the prefill server knows ``LOCAL``.
ROUTE = "/releases_local_prefill"
#: The youngest rooms are remembered; anybody can send others' numbers.
MOST_ROOMS = 10_000


class Rooms(OrderedDict[int, bool | None]):
    """What one prefill rank was told of rooms: True, decode computes the request; False, it was
    aborted before it came; None, its request came. A room of which more is heard after that has
    ended, or is asked for again under its number. The rank's reader and its scheduler come here:
    each call is one of the dictionary's own."""

    @staticmethod
    def of(manager: Any) -> Rooms:
        """Those of a rank's manager."""
        return manager.__dict__.setdefault("lead_rooms", Rooms())

    def note(self, room: int, what: bool | None) -> None:
        """The oldest one is forgotten for it, if there are too many."""
        self[room] = what
        if len(self) > MOST_ROOMS:
            self.popitem(last=False)


class Peers:
    """Which prefill servers release rooms. Only the scheduler's thread calls this; they are asked
    in others, which take their own entry away where there is no answer."""

    def __init__(self) -> None:
        self._releases: dict[str, bool | None] = {}

    def keep(self, reachable: Container[str]) -> list[str]:
        """Forgets servers that are not ``reachable`` any more: the next one there is asked anew.
        Returns their addresses."""
        gone = [address for address in [*self._releases] if address not in reachable]
        for address in gone:
            self._releases.pop(address, None)
        return gone

    def releases(self, address: str) -> bool:
        """Whether the server at ``address`` is known to release rooms; else it is asked."""
        if address not in self._releases:
            self._releases[address] = None  # nothing is known yet
            threading.Thread(target=self._ask, args=(address,), daemon=True).start()
        return bool(self._releases.get(address))

    def _ask(self, address: str) -> None:
        url = f"http://{address}{ROUTE}"
        try:
            found = requests.get(url, timeout=environment.HANDSHAKE_TIMEOUT.read()).status_code
        except requests.RequestException as error:
            logger.warning("prefill server %s could not be asked: %s", url, error)
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


def release(receiver: Any) -> None:
    """Ends the request of ``receiver``, and has one rank tell one rank of prefill, which are
    connected, that decode computes it. Prefill's ranks agree on what one of them has heard."""
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
                "prefill rank %s was not told that room %s is computed by decode (%s): its half "
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
    """Ends a request on prefill before its transfer: with an empty answer where decode computes
    it, as all ranks agree."""
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
    # Its prefetch from a HiCache store has no other end: prefill will not read what it brings.
    self.tree_cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
