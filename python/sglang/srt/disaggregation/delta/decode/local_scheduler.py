"""The scheduler of a decode server that computes turns itself, between its decode steps.

No other server's scheduler has this mixin (``when`` in ``patchset/table.py``).
"""

from __future__ import annotations

import logging
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any  # Any: what SGLang answers to a pause, untyped there

from typing_extensions import override

from sglang.srt.disaggregation.delta.decode.local_turns import LocalTurns
from sglang.srt.disaggregation.delta.decode.record import record_of
from sglang.srt.disaggregation.delta.decode.turn_choice import Limits
from sglang.srt.patchset import environment

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs
else:
    Scheduler = object

logger = logging.getLogger(__name__)


def limits(args: ServerArgs) -> Limits:
    """The settings of a server with these arguments.

    Raises:
        ValueError: an environment variable is not the number that it must be.
    """
    return Limits(
        tokens=args.disaggregation_decode_local_tokens,
        chunk=environment.LOCAL_CHUNK.read(),
        share=args.disaggregation_decode_local_share,
        always=environment.LOCAL_ALWAYS.read(),
        when_lost=args.disaggregation_decode_local_tokens_when_lost,
        max_itl=args.disaggregation_decode_local_max_itl_ms / 1000 or None,
        page=args.page_size,
    )


class LocalTurnsScheduler(Scheduler):
    """Runs local turns between decode steps."""

    # Owned by the upstream class; named for the type checker.
    last_batch: ScheduleBatch | None
    waiting_queue: list[Req]

    @cached_property
    def local_turns(self) -> LocalTurns:
        """The turns that this server computes itself."""
        return LocalTurns(self, limits(self.server_args))

    @override
    def init_disaggregation(self) -> None:
        super().init_disaggregation()
        turns = self.local_turns
        logger.info(
            "local prefill may compute turns of up to %d new tokens, fallback prefill of up to "
            "%d, in chunks of %d",
            turns.choice.limits.tokens,
            turns.choice.limits.when_lost,
            turns.choice.limits.chunk,
        )

    @override
    def get_next_disagg_decode_batch_to_run(self) -> ScheduleBatch | None:
        turns = self.local_turns
        turns.times.hook(time.monotonic())
        turns.join()
        batch = turns.next_batch()
        if batch is not None:
            # As for each batch that SGLang runs: experts in parallel are told how long it is.
            return self.maybe_prepare_mlp_sync_batch(batch)
        held: list[Req] = []
        if turns.is_busy:
            places = turns.places_for_others
            held, self.waiting_queue = self.waiting_queue[places:], self.waiting_queue[:places]
        batch = super().get_next_disagg_decode_batch_to_run()
        if held:
            self.waiting_queue = [*self.waiting_queue, *held]
        # Who found no place waits for others' answers from here on, as one that is computed locally
        # would: that is no time of its prefill server's.
        turns.shown(self.waiting_queue)
        if batch is not None:
            turns.pace.step()
            turns.times.launched(0, time.monotonic())
        return batch

    @override
    def process_batch_result_prebuilt(self, batch: ScheduleBatch) -> None:
        reqs = list(batch.reqs)
        super().process_batch_result_prebuilt(batch)
        self.local_turns.shown(reqs)

    @override
    def process_batch_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        turns = self.local_turns
        turns.times.hook(time.monotonic())
        if getattr(result, "copy_done", None) is not None:
            result.copy_done.synchronize()  # as what follows would
        elif self.server_args.device != "cpu":
            self.device_module.current_stream().synchronize()  # likewise, without overlap
        turns.times.result(time.monotonic())
        if batch.forward_mode.is_decode():
            turns.decoded(batch.reqs)
        if not batch.forward_mode.is_extend():
            super().process_batch_result(batch, result)
            return
        turns.before_result()
        super().process_batch_result(batch, result)
        turns.after_result()
        turns.drop_aborted()

    @override
    def abort_request(self, recv_req: AbortReq) -> None:
        def wanted(req: Req) -> bool:
            return bool(recv_req.abort_all or req.rid.startswith(recv_req.rid))

        queues = self.disagg_decode_prealloc_queue, self.disagg_decode_transfer_queue
        for entry in (*queues[0].queue, *queues[1].queue):
            if wanted(entry.req):
                record_of(entry.req).unwanted = True
        super().abort_request(recv_req)
        self.local_turns.abort(wanted)

    @override
    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        idle: bool = super().is_fully_idle(for_health_check)
        # Turns that a pause holds run nothing that would answer for a health check.
        held = for_health_check and self._is_paused and self._waiting_release is None
        return idle and (held or not self.local_turns.is_busy)

    @override
    def self_check_during_idle(self) -> None:
        # Paused, or in the step in which the last running request leaves the batch, the loop finds
        # nothing to run while turns hold pages and rows that SGLang's check would call leaked.
        if not self.local_turns.is_busy:
            super().self_check_during_idle()

    @override
    def pause_generation(self, recv_req: PauseGenerationReqInput) -> Any:
        if recv_req.mode != "in_place":
            # SGLang would put the requests of a chunk into the running batch, computed or not.
            if self.last_batch and self.last_batch.forward_mode.is_extend():
                if self.enable_overlap:
                    self.process_batch_result(*self.result_queue.popleft())
                self.last_batch = None
            self.local_turns.join()
        answer = super().pause_generation(recv_req)
        self.local_turns.times.interrupted()
        return answer
