"""End of prefill's half of a request that decode computes: an empty answer with status 200.

Decode sends SGLang's ABORT message with a third frame, which a stock server does not read, and only
to servers that answer ``RELEASES_ROUTE``, because a stock server would answer the client with an
error. An ABORT that arrives before its request is remembered; SGLang ignores it, so that the
request would wait until its bootstrap timeout.

Contract: ``Rooms`` is used by a prefill rank's reader and scheduler threads; each access is one
atomic call of the dictionary. ``ReleasingServers`` is called by the scheduler thread; its query
threads change only their own entry. ``_end`` contains a collective over prefill's ranks.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Container
from typing import Any  # Any: SGLang's objects

import requests
import zmq

from sglang.srt.disaggregation.lead.attach import Function, Wraps
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)

#: SGLang's ``ABORT_TAG``.
ABORT = b"ABORT"
#: Third frame of that message: decode computes the request.
LOCAL_NOTICE = b"LOCAL"
#: Route of the bootstrap server that answers 200 if the prefill server reads ``LOCAL``.
RELEASES_ROUTE = "/releases_local_prefill"
#: Maximum rooms remembered, the newest ones. Bounded, because any peer can send room numbers.
MAX_ROOMS = 10_000


class Rooms(OrderedDict[int, bool | None]):
    """Notices to one prefill rank, by room. True: decode computes the request. False: aborted
    before the request arrived. None: the request has arrived; a later notice for the room means
    that it has ended or that its number is used again."""

    @staticmethod
    def of(manager: Any) -> Rooms:
        """Return the rooms of a rank's manager."""
        return manager.__dict__.setdefault("lead_rooms", Rooms())

    def note(self, room: int, notice: bool | None) -> None:
        """Record a notice; remove the oldest room beyond ``MAX_ROOMS``."""
        self[room] = notice
        self._trim()

    def arrive(self, room: int) -> bool | None:
        """Record that the request has arrived. Return the notice that was there before."""
        notice = self.setdefault(room, None)  # no notice of the reader thread is lost
        if notice is False:
            self[room] = None
        self._trim()
        return notice

    def _trim(self) -> None:
        if len(self) > MAX_ROOMS:
            self.popitem(last=False)


class ReleasingServers:
    """Knows which prefill servers release rooms. Servers are queried on threads, which remove their
    entry if there is no answer."""

    def __init__(self) -> None:
        self._releases: dict[str, bool | None] = {}

    def keep(self, reachable: Container[str]) -> None:
        """Forget servers that are no longer ``reachable``, so that a server there is queried
        again."""
        for address in [*self._releases]:
            if address not in reachable:
                self._releases.pop(address, None)

    def releases(self, address: str) -> bool:
        """Return True if the server at ``address`` is known to release rooms. Query it if it is
        not known."""
        if address not in self._releases:
            self._releases[address] = None  # query in flight
            threading.Thread(target=self._query, args=(address,), daemon=True).start()
        return bool(self._releases.get(address))

    def _query(self, address: str) -> None:
        url = f"http://{address}{RELEASES_ROUTE}"
        try:
            status = requests.get(url, timeout=environment.HANDSHAKE_TIMEOUT.read()).status_code
        except requests.RequestException as error:
            logger.warning(
                "prefill server %s did not answer (%s): it computes all its requests until a later "
                "query succeeds",
                url,
                error,
            )
            self._releases.pop(address, None)
            return
        if address in self._releases:
            self._releases[address] = status == 200
        if status != 200:
            logger.warning(
                "prefill server %s does not release rooms (stock SGLang, or without %s): it "
                "computes all its requests",
                address,
                environment.LOCAL_TOKENS.name,
            )


def release_room(receiver: Any) -> None:
    """End the request of ``receiver``. Rank 0 notifies one connected prefill rank that decode
    computes it; prefill's ranks agree on notices of any rank of their first stage, which answers.
    """
    message = [ABORT, str(receiver.bootstrap_room).encode("ascii"), LOCAL_NOTICE]
    for info in [info for info in receiver.bootstrap_infos if info["pp_rank"] == 0][:1]:
        if receiver.kv_mgr.attn_tp_rank != 0:
            continue
        try:
            socket, lock = receiver._connect_to_bootstrap_server(info)
            with lock:
                socket.send_multipart(message, zmq.NOBLOCK)  # raises if prefill reads nothing
        except Exception as error:
            logger.warning(
                "room %s: prefill rank %s was not notified that decode computes it (%s); its half "
                "ends by its bootstrap timeout",
                receiver.bootstrap_room,
                info.get("rank_ip"),
                error,
            )
    receiver.clear()


def install(wrap: Wraps) -> None:
    """Wrap SGLang's methods (``attach``). Do not import Mooncake's module, because it imports
    ``prometheus_client``: in the HTTP server's process, before SGLang has prepared it, that would
    disable all metrics."""
    from sglang.srt.disaggregation.common import conn
    from sglang.srt.managers.scheduler import Scheduler

    @wrap(
        conn.CommonKVManager,
        "__init__",
        "(self, args, disaggregation_mode, server_args, is_mla_backend=False)",
    )
    def init_manager(stock: Function, self: Any, *args: Any, **more: Any) -> None:
        stock(*args, **more)
        # Each transfer backend has its own method, which its later reader thread calls.
        handle = self._handle_abort_notification

        def note(msg: list[bytes]) -> Any:
            notice = conn.AbortNotification.from_zmq(msg) if msg[:1] == [ABORT] else None
            if notice is not None:
                rooms, is_local = Rooms.of(self), msg[2:] == [LOCAL_NOTICE]
                if notice.room not in rooms or (is_local and notice.room in self.request_status):
                    rooms.note(notice.room, is_local)
            return handle(msg)

        self._handle_abort_notification = note

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
        if Rooms.of(mgr).arrive(bootstrap_room) is not None:
            mgr.record_failure(bootstrap_room, "aborted by decode before the request arrived")
            mgr.update_status(bootstrap_room, conn.KVPoll.Failed)

    wrap(Scheduler, "handle_bootstrap_failure", "(self, req)")(_end)

    @wrap(conn.CommonKVBootstrapServer, "_setup_routes", "(self)")
    def _setup_routes(stock: Function, self: Any) -> None:
        stock()

        async def answer(_: Any) -> Any:
            return conn.web.Response(text="OK")

        self.app.router.add_get(RELEASES_ROUTE, answer)


def _end(stock: Function, self: Any, req: Any) -> None:
    """End a request on prefill before its transfer, with an empty answer if any rank was notified
    that decode computes it."""
    from torch.distributed import ReduceOp

    from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer
    from sglang.srt.disaggregation.utils import all_reduce_flags, prepare_abort
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome
    from sglang.srt.mem_cache.common import release_kv_cache

    manager: Any = getattr(req.disagg_kv_sender, "kv_mgr", None)
    room = req.bootstrap_room
    is_local = [bool(manager and Rooms.of(manager).get(room))]
    for group in (self.attn_tp_cpu_group, self.attn_cp_cpu_group):
        is_local = all_reduce_flags(is_local, group, ReduceOp.MAX)
    if not any(is_local):
        stock(req)
        return
    Rooms.of(manager).note(room, None)
    self.clear_pending_chunk_send(req)
    req.disagg_kv_sender.clear()
    with manager.failure_lock:
        manager.failure_records.pop(room, None)
    if req.kv.holds_kv or req.kv.holds_mamba:
        release_kv_cache(req, self.tree_cache, checkpoint=False)
    maybe_release_metadata_buffer(req, self.req_to_metadata_buffer_idx_allocator)
    req.pending_bootstrap = False
    prepare_abort(req, "")  # also without log probabilities
    # Restore the abort after the answer: otherwise SGLang does not drop the request's chunks in
    # flight (optimistic prefill).
    aborted, req.finished_reason = req.finished_reason, FINISH_LENGTH(length=0)
    self.output_streamer.stream_output([req], req.return_logprob)
    req.finished_reason = aborted
    # End its prefetch from a HiCache store, because no other code will.
    self.tree_cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
