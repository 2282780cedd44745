"""Requests that a decode server computes itself: they end here with an empty answer, without work.

The answer is given where the client waits, in the process that speaks HTTP: a scheduler may be in
the middle of a long step, and may not have looked yet at what the router sent it. ``Frontend``, in
the thread that reads decode's messages, hands the room on to ``YieldingTokenizer``, which answers
and sends ``EndYielded`` after the request on its way to the schedulers. SGLang gives that to all
ranks in one step, like every command, so that the ranks need not agree on anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: SGLang's scheduler

from typing_extensions import override

from sglang.srt.disaggregation.delta.unserved import is_sent
from sglang.srt.managers.io_struct import AbortReq, BatchStrOutput

if TYPE_CHECKING:
    import zmq

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
else:
    TokenizerManager = object

logger = logging.getLogger(__name__)

#: Seconds for which a room is waited for whose request has not come, and between two looks.
_WAIT_S, _LOOK_S = 30.0, 0.002
#: With data parallel attention a command may overtake a request: it is sent again, this much later.
_AGAIN_S = 1.0
#: Rooms that are waited for whose request has not come; anybody can send numbers of none.
_MOST_ABSENT = 1024


@dataclass(frozen=True)
class RoomYielded:
    """A scheduler to the tokenizer: decode computes the request of ``room``."""

    room: int


@dataclass
class _YieldedRooms:
    """Rooms that the tokenizer was told of and whose requests it cannot answer yet."""

    #: Those whose request has not come, the oldest first, and until when it is waited for.
    absent: dict[int, float] = field(default_factory=dict)
    #: The ids of those whose request is here, and not sent to the schedulers yet.
    here: dict[int, str] = field(default_factory=dict)
    pause: float = _LOOK_S
    #: That another room was named.
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@dataclass
class EndYielded(AbortReq):
    """The tokenizer to the schedulers: the client of ``rid`` has its answer, do nothing for it."""


class Frontend:
    """The way to the tokenizer, for one thread; its socket is made where it is used first."""

    def __init__(self, address: str) -> None:
        """``address``: where the tokenizer takes the schedulers' output."""
        self._address = address
        self._socket: zmq.Socket[bytes] | None = None

    def yielded(self, room: int) -> None:
        """Decode computes the request of ``room``.

        Raises:
            OSError: it could not be sent.
        """
        import zmq

        if self._socket is None:
            self._socket = zmq.Context.instance().socket(zmq.PUSH)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.connect(self._address)
        try:
            self._socket.send_pyobj(RoomYielded(room), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise OSError(f"could not notify the tokenizer of room {room}: {error}") from error


class YieldingTokenizer(TokenizerManager):
    """Answers requests that decode computes itself. Stock on a server that is no prefill server."""

    @override
    def init_disaggregation(self) -> None:
        super().init_disaggregation()
        # With several tokenizers nobody here knows which of them has the request.
        if self.bootstrap_server is not None and self.server_args.tokenizer_worker_num == 1:
            self.bootstrap_server.yields = True

    @override
    def init_request_dispatcher(self) -> None:
        from sglang.utils import TypeBasedDispatcher

        super().init_request_dispatcher()
        if getattr(self.bootstrap_server, "yields", False):
            self._result_dispatcher += TypeBasedDispatcher([(RoomYielded, self.take_yielded)])

    @cached_property
    def yielded_rooms(self) -> _YieldedRooms:
        """Rooms whose requests are not here yet, or not on the schedulers."""
        return _YieldedRooms()

    def take_yielded(self, message: RoomYielded) -> None:
        """Answer the request of a room, as soon as it is here and the schedulers were sent it."""
        rooms = self.yielded_rooms
        rooms.pause = _LOOK_S
        rooms.absent[message.room] = time.monotonic() + _WAIT_S
        if len(rooms.absent) > _MOST_ABSENT:
            del rooms.absent[next(iter(rooms.absent))]
        rooms.woken.set()
        if (rooms.task is None or rooms.task.done()) and self._answer_yielded():
            rooms.task = asyncio.get_running_loop().create_task(self._wait_for_requests())
            self.asyncio_tasks.add(rooms.task)
            rooms.task.add_done_callback(self.asyncio_tasks.discard)

    async def _wait_for_requests(self) -> None:
        """Decode was faster than this server: requests are on their way, or are being tokenized."""
        rooms = self.yielded_rooms
        while rooms.absent or rooms.here:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(rooms.woken.wait(), rooms.pause)
            rooms.woken.clear()
            rooms.pause = min(1.1 * rooms.pause, 0.1)
            try:
                self._answer_yielded()
            except Exception:
                logger.exception(
                    "could not answer a request with local prefill; the next ones are answered"
                )

    def _answer_yielded(self) -> bool:
        """Answer the requests that the schedulers were sent; whether a room still waits.

        All requests are looked through once for all absent rooms. Those of a paused server are
        here, for as long as it takes: none of them is looked for again.
        """
        rooms, now = self.yielded_rooms, time.monotonic()
        if rooms.absent:
            found = {
                state.obj.bootstrap_room: rid
                for rid, state in reversed(self.rid_to_state.items())
                if isinstance(getattr(state.obj, "bootstrap_room", None), int)
                and not state.finished
            }
            for room, until in list(rooms.absent.items()):
                if room in found:
                    rooms.here[room] = found[room]
                if room in found or now >= until:
                    del rooms.absent[room]
        for room, rid in list(rooms.here.items()):
            state = self.rid_to_state.get(rid)
            if state is None or state.finished:
                del rooms.here[room]
            elif is_sent(state):
                del rooms.here[room]
                end = EndYielded(rid=rid)
                self.send_to_scheduler.send_pyobj(end)
                if self.server_args.enable_dp_attention:
                    loop = asyncio.get_running_loop()
                    loop.call_later(_AGAIN_S, self.send_to_scheduler.send_pyobj, end)
                self._handle_batch_output(empty_answer(rid))
        return bool(rooms.absent or rooms.here)


def empty_answer(rid: str) -> BatchStrOutput:
    """What a scheduler would send for a request that ends before it was begun.

    Its finish reason is no error: SGLang's routers make an error of prefill the client's.
    """
    required = [each.name for each in fields(BatchStrOutput) if each.default is MISSING]
    lists: dict[str, object] = {name: [[]] for name in required}
    for name in required:
        if name.endswith("_tokens") or name in ("retraction_counts", "spec_verify_ct"):
            lists[name] = [0]
    lists.update(
        rids=[rid],
        finished_reasons=[{"type": "length", "length": 0}],
        output_strs=[""],
        output_hidden_states=None,
        routed_experts=None,
    )
    return BatchStrOutput(**lists)


def leave_unannounced(scheduler: Any, req: Req) -> None:
    """Remove a request from the bootstrap queue of a prefill server's scheduler."""
    scheduler.disagg_prefill_bootstrap_queue.queue.remove(req)
    if scheduler.enable_hicache_storage:
        scheduler.tree_cache.release_aborted_request(req.rid)


def end_yielded(scheduler: Any, rid: str) -> None:
    """Forget the request ``rid``, whose client was answered. On all ranks in one step.

    It waits for its announcement, or for its grammar. Anywhere else decode has announced it all the
    same, and it ends like any other.
    """
    for req in [r for r in scheduler.disagg_prefill_bootstrap_queue.queue if r.rid == rid]:
        leave_unannounced(scheduler, req)
        req.disagg_kv_sender.clear()
    grammars = scheduler.grammar_manager
    for req in [req for req in grammars.grammar_queue if req.rid == rid]:
        grammars.grammar_queue = [other for other in grammars.grammar_queue if other is not req]
        if hasattr(req.grammar, "cancel"):
            req.grammar.cancel()
