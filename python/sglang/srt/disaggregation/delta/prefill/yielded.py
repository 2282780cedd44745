"""Requests that a decode server computes itself: prefill ends them with an empty answer.

The tokenizer process answers, because a scheduler may be in the middle of a long step and may not
have received the request yet. ``Frontend`` passes the room to ``YieldingTokenizer``, which answers
and sends ``EndYielded`` after the request on its way to the schedulers. SGLang gives a command to
all ranks in one step, so the ranks need not agree on anything.

Contract: ``Frontend`` is used by the reader thread only, ``YieldingTokenizer`` on the event loop of
the tokenizer, the functions below on the scheduler's thread.
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

#: Seconds to wait for the request of a room.
_REQUEST_TIMEOUT_S = 30.0
#: Seconds until the first check for requests; the pause then grows.
_FIRST_POLL_S = 0.002
#: Seconds until the command is repeated with data parallel attention, where it may overtake the
#: request.
_REPEAT_AFTER_S = 1.0
#: Maximum number of rooms without a request, because any peer can send unknown numbers.
_MAX_ABSENT = 1024


@dataclass(frozen=True)
class RoomYielded:
    """Scheduler to tokenizer: decode computes the request of ``room``."""

    room: int


@dataclass
class _YieldedRooms:
    """Rooms with requests that decode computes and that cannot be answered yet."""

    #: Rooms without a request, oldest first -> deadline for it.
    absent: dict[int, float] = field(default_factory=dict)
    #: Rooms with a request that is not sent to the schedulers yet -> its id.
    here: dict[int, str] = field(default_factory=dict)
    pause: float = _FIRST_POLL_S
    #: Set when another room was named.
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@dataclass
class EndYielded(AbortReq):
    """Tokenizer to schedulers: drop the request ``rid``, because its client was answered."""


class Frontend:
    """A socket to the tokenizer, made on first use, because its thread must be the one that uses
    it."""

    def __init__(self, address: str) -> None:
        """``address``: where the tokenizer receives the schedulers' output."""
        self._address = address
        self._socket: zmq.Socket[bytes] | None = None

    def yielded(self, room: int) -> None:
        """Notify the tokenizer that decode computes the request of ``room``.

        Raises:
            OSError: the message could not be sent.
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
    """Answers requests that decode computes itself. Unchanged on servers other than prefill."""

    @override
    def init_disaggregation(self) -> None:
        super().init_disaggregation()
        # Only with one tokenizer, because it is unknown which of several has the request.
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
        """Rooms without an answer yet."""
        return _YieldedRooms()

    def take_yielded(self, message: RoomYielded) -> None:
        """Answer the request of a room, once it is here and was sent to the schedulers."""
        rooms = self.yielded_rooms
        rooms.pause = _FIRST_POLL_S
        rooms.absent[message.room] = time.monotonic() + _REQUEST_TIMEOUT_S
        if len(rooms.absent) > _MAX_ABSENT:
            del rooms.absent[next(iter(rooms.absent))]
        rooms.woken.set()
        if (rooms.task is None or rooms.task.done()) and self._answer_yielded():
            rooms.task = asyncio.get_running_loop().create_task(self._wait_for_requests())
            self.asyncio_tasks.add(rooms.task)
            rooms.task.add_done_callback(self.asyncio_tasks.discard)

    async def _wait_for_requests(self) -> None:
        """Answer requests that arrive or are tokenized later than decode's message."""
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
        """Answer the requests that were sent to the schedulers. Return True if a room still waits.

        One pass over all requests finds those of all absent rooms. The requests of a paused server
        stay in ``here``, so no later pass searches for them.
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
                    loop.call_later(_REPEAT_AFTER_S, self.send_to_scheduler.send_pyobj, end)
                self._handle_batch_output(empty_answer(rid))
        return bool(rooms.absent or rooms.here)


def empty_answer(rid: str) -> BatchStrOutput:
    """Return what a scheduler would send for a request that ends before it begins.

    The finish reason is not an error, because SGLang's routers pass an error to the client.
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
    """Drop the request ``rid``, which was answered, from the bootstrap and grammar queues. On all
    ranks in one step. In any other place decode has announced it, and it ends like others."""
    for req in [r for r in scheduler.disagg_prefill_bootstrap_queue.queue if r.rid == rid]:
        leave_unannounced(scheduler, req)
        req.disagg_kv_sender.clear()
    grammars = scheduler.grammar_manager
    for req in [req for req in grammars.grammar_queue if req.rid == rid]:
        grammars.grammar_queue = [other for other in grammars.grammar_queue if other is not req]
        if hasattr(req.grammar, "cancel"):
            req.grammar.cancel()
