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
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING

from typing_extensions import override

from sglang.srt.managers.io_struct import AbortReq, BatchStrOutput

if TYPE_CHECKING:
    import zmq

    from sglang.srt.disaggregation.delta.prefill.scheduler import DeltaScheduler
    from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
else:
    TokenizerManager = object

logger = logging.getLogger(__name__)

#: Seconds for which a room is waited for whose request has not come, and between two looks.
_WAIT_S, _LOOK_S = 30.0, 0.002
#: With data parallel attention a command may overtake a request: it is sent again, this much later.
_AGAIN_S = 1.0


@dataclass(frozen=True)
class RoomYielded:
    """A scheduler to the tokenizer: decode computes the request of ``room``."""

    room: int


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
            raise OSError(f"the tokenizer was not told of room {room}: {error}") from error


class YieldingTokenizer(TokenizerManager):
    """Answers requests that decode computes itself. Stock on a server that is no prefill server."""

    rid_to_state: dict[str, ReqState]  # owned by the upstream class; named for the type checker

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

    def take_yielded(self, message: RoomYielded) -> None:
        """Answer the request of a room, as soon as it is here and the schedulers were sent it."""
        rid = self._request_of(message.room)
        if rid is not None and self._is_sent(rid):
            self._end_yielded(rid)
            return
        task = asyncio.get_running_loop().create_task(self._wait_for_request(message.room, rid))
        self.asyncio_tasks.add(task)
        task.add_done_callback(self.asyncio_tasks.discard)

    async def _wait_for_request(self, room: int, rid: str | None) -> None:
        """Decode was faster than this server: the request is on its way, or is being tokenized.
        ``rid``: its id, once it is here."""
        until, pause = time.monotonic() + _WAIT_S, _LOOK_S
        # Here, it may wait for longer: while weights are updated, nothing is sent on. All of a
        # paused server's are here then: none of them is looked for again.
        while rid is not None or time.monotonic() < until:
            await asyncio.sleep(pause)
            state = self.rid_to_state.get(rid) if rid is not None else None
            if state is None or not _waits(state, room):
                rid = self._request_of(room)
            if rid is not None and self._is_sent(rid):
                self._end_yielded(rid)
                return
            pause = min(1.1 * pause, 0.1)
        logger.debug("decode computed room %s, whose request never came here", room)

    def _request_of(self, room: int) -> str | None:
        """The id of the request of ``room``, if it is here; looks through all of them."""
        for rid, state in self.rid_to_state.items():
            if _waits(state, room):
                return rid
        return None

    def _is_sent(self, rid: str) -> bool:
        """Whether the schedulers have been sent it."""
        return bool(self.rid_to_state[rid].time_stats.api_server_dispatch_finish_time)

    def _end_yielded(self, rid: str) -> None:
        self.send_to_scheduler.send_pyobj(EndYielded(rid=rid))
        if self.server_args.enable_dp_attention:
            again = EndYielded(rid=rid)
            loop = asyncio.get_running_loop()
            loop.call_later(_AGAIN_S, lambda: self.send_to_scheduler.send_pyobj(again))
        self._handle_batch_output(empty_answer(rid))


def _waits(state: ReqState, room: int) -> bool:
    """Whether it is the request of ``room``, and its client waits for the answer."""
    return getattr(state.obj, "bootstrap_room", None) == room and not state.finished


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


def end_yielded(scheduler: DeltaScheduler, rid: str) -> None:
    """Forget the request ``rid``, whose client was answered. On all ranks in one step.

    It waits for its announcement, or for its grammar; where else it might be, decode has announced
    it all the same, and it ends like any other.
    """
    waiting = scheduler.disagg_prefill_bootstrap_queue
    for req in [req for req in waiting.queue if req.rid == rid]:
        waiting.queue = [other for other in waiting.queue if other is not req]
        req.disagg_kv_sender.clear()
        if scheduler.enable_hicache_storage:
            scheduler.tree_cache.release_aborted_request(rid)
    grammars = scheduler.grammar_manager
    for req in [req for req in grammars.grammar_queue if req.rid == rid]:
        grammars.grammar_queue = [other for other in grammars.grammar_queue if other is not req]
        if hasattr(req.grammar, "cancel"):
            req.grammar.cancel()
