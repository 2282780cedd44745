"""SGLang's own overlap loop on a ``Decoder``, at the worst times that a device and a peer can have.

A step's writes happen when the loop waits for its result, the latest that a device may do them;
prefill writes as soon as it is told of pages, the earliest it can.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode import kv
from component.decode.actions import TOKENS
from component.decode.checks import check
from component.decode.decoder import Decoder
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode.record import record_of
from sglang.srt.managers.schedule_batch import ScheduleBatch

TOKEN = 2


class Stop(Exception):
    """Ends the loop."""


class Overlapped(Decoder):
    """A decode scheduler whose loop runs a script: a generator that yields once a turn."""

    script: Iterator[None]

    def __init__(self, page: int, tokens: int, **options: Any) -> None:
        super().__init__(page, tokens, **options)
        self.enable_overlap, self.result_queue = True, deque()
        #: Announcements that were made before the result of the step in flight was in, and all.
        self.at_once = self.told = 0

    def play(self, script: Iterator[None]) -> None:
        self.script = script
        with pytest.raises(Stop):
            self.event_loop_overlap_disagg_decode()

    def check_now(self) -> None:
        """What must hold between two turns, unless a step is in flight: it has not written yet."""
        if not self.result_queue:
            check(self)

    def recv_requests(self) -> list[Any]:
        for _ in self.script:
            return []
        raise Stop

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        """The script does what requests do."""

    def process_decode_queue(self) -> None:
        super().process_decode_queue()
        self.at_once += self.deliver_all()

    def process_batch_result(self, batch: Any, result: Any) -> None:
        super().process_batch_result(batch, result)
        self.deliver_all()

    def deliver_all(self) -> int:
        """Prefill writes what it was told of; how many rooms it fills."""
        told = [req for req in self.in_transfer if self.room(req).poll() == KVPoll.Transferring]
        for req in told:
            self.deliver(req, first_token=self.first_token(req))
        self.told += len(told)
        return len(told)

    def first_token(self, req: Any) -> int:
        """What prefill answers."""
        return TOKEN

    def stream_output(self, reqs: list[Any], *arguments: Any, **options: Any) -> None:
        # The step in flight streams those again that have ended; SGLang's own passes over them.
        new = [req for req in reqs if not req.finished_output]
        for req in new:
            req.finished_output = req.finished()
        super().stream_output(new)

    def self_check_during_idle(self) -> None:
        """Checked by the test."""

    def run_batch(self, batch: ScheduleBatch, *arguments: Any) -> Any:
        if batch.forward_mode.is_extend():
            return self._run_chunk_later(batch)
        writes = []
        for req, slot in zip(batch.reqs, batch.out_cache_loc.clone(), strict=True):
            ids = req.origin_input_ids + req.output_ids
            ids += [TOKEN] * (req.kv_committed_len - len(ids))  # sampled, and not read back yet
            tag = kv.tags(ids, req.extra_key, weights=record_of(req).generation)[-1]
            writes.append((slot[None], tag))
        batch.output_ids = batch.seq_lens.new_full((len(batch.reqs),), TOKEN)

        def end_of_step() -> None:
            for slot, tag in writes:
                kv.write(self.pool, slot, [tag])

        return SimpleNamespace(
            copy_done=SimpleNamespace(synchronize=end_of_step),
            logits_output=None,
            next_token_ids=batch.output_ids,
            can_run_cuda_graph=False,
            num_accepted_tokens=0,
            delay_sample_func=None,
        )

    def _run_chunk_later(self, batch: ScheduleBatch) -> Any:
        """Chunks are written when the loop waits for their result, like decode steps."""
        writes, result = self.chunk_writes(batch), self.chunk_result([TOKEN] * len(batch.reqs))
        batch.output_ids = result.next_token_ids

        def end_of_step() -> None:
            for slots, values in writes:
                kv.write(self.pool, slots, values)

        result.copy_done = SimpleNamespace(synchronize=end_of_step)
        return result


def until_idle(decoder: Overlapped) -> Iterator[None]:
    for _ in range(2000):
        decoder.check_now()
        if decoder._nothing_waits and not decoder.result_queue:
            return
        yield
    raise AssertionError("not idle")


def random_talks(decoder: Overlapped, seed: int) -> Iterator[None]:
    """Talks whose turns arrive at any time; some clients leave."""
    rng = random.Random(seed)
    talks = [[rng.randrange(TOKENS) for _ in range(rng.randrange(5, 60))] for _ in range(4)]
    for _ in range(150):
        if rng.random() < 0.4 and len(decoder.queued) < 4:
            talk = rng.choice(talks)
            talk += [rng.randrange(TOKENS) for _ in range(rng.randrange(1, 40))]
            del talk[160:]
            decoder.submit(talk, new=rng.choice([1, 2, 9, 20]))
        if rng.random() < 0.08 and decoder.submitted:
            decoder.abort(rng.choice(decoder.submitted[-6:]).rid)
        yield
        decoder.check_now()
    yield from until_idle(decoder)
