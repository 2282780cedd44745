"""With overlap scheduling, a step still writes slots of requests that have ended.

SGLang's own loop runs here. A step's writes happen when the loop waits for its result, the latest
that a device may do them; prefill writes as soon as it is told of pages, the earliest it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode import kv
from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode.record import record_of
from sglang.srt.disaggregation.delta.decode.transfer_queue import StepWrites
from sglang.srt.managers.schedule_batch import ScheduleBatch

TOKEN = 2


class Stop(Exception):
    """Ends the loop."""


class Overlapped(Decoder):
    """A decode scheduler whose loop runs a script: a generator that yields once a turn."""

    script: Iterator[None]

    def __init__(self, page: int, tokens: int, **options: Any) -> None:
        super().__init__(page, tokens, **options)
        self.enable_overlap = True
        #: Announcements that were made before the result of the step in flight was in, and all.
        self.at_once = self.told = 0

    def play(self, script: Iterator[None]) -> None:
        self.script = script
        with pytest.raises(Stop):
            self.event_loop_overlap_disagg_decode()

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
            self.deliver(req, first_token=TOKEN)
        self.told += len(told)
        return len(told)

    def stream_output(self, reqs: list[Any], *arguments: Any, **options: Any) -> None:
        # The step in flight streams those again that have ended; SGLang's own passes over them.
        new = [req for req in reqs if not req.finished_output]
        for req in new:
            req.finished_output = req.finished()
        super().stream_output(new)

    def self_check_during_idle(self) -> None:
        """Checked by the test."""

    def log_batch_result_stats(self, *arguments: Any) -> None:
        """No log."""

    def _maybe_clear_mm_inputs(self, batch: Any) -> None:
        """No images."""

    def maybe_send_health_check_signal(self) -> None:
        """Nobody asks."""

    def run_batch(self, batch: ScheduleBatch, *arguments: Any) -> Any:
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


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS", "0")


def until_idle(decoder: Overlapped) -> Iterator[None]:
    for _ in range(200):
        if decoder._nothing_waits and not decoder.result_queue:
            return
        yield
        if not decoder.result_queue:  # what is in flight is counted, and not there yet
            check(decoder)
    raise AssertionError("not idle")


def one_ends_and_one_arrives(decoder: Overlapped, tokens: int, room: int) -> Iterator[None]:
    """A request ends while a step that it is part of is in flight; the next one gets all memory
    but ``room`` tokens."""
    ends = decoder.submit([5] * tokens, new=9)
    while not ends.finished():
        yield
    assert [ends in batch.reqs for batch, _ in decoder.result_queue] == [True]
    told, at_once = decoder.told, decoder.at_once
    free = decoder.token_to_kv_pool_allocator.available_size() + decoder.tree_cache.evictable_size()
    late = decoder.submit([9] * (int(free) - room), new=2)
    yield
    assert late.kv_allocated_len > 0 and decoder.told == told + 1
    decoder.seen = decoder.at_once - at_once  # type: ignore[attr-defined]
    check(decoder)
    yield from until_idle(decoder)


CASES = [(1, 40), (16, 40), (16, 39 + 16), (16, 16 * 3 - 9)]


def decoder_of(page: int) -> Overlapped:
    return Overlapped(page, 640, reserve=page)


@pytest.mark.hazard("page-of-step-in-flight")
@pytest.mark.parametrize(("page", "tokens"), CASES)
def test_pages_of_the_step_in_flight_are_announced_after_it(page: int, tokens: int) -> None:
    """Guards against KV that prefill wrote and a step, launched earlier, writes over: the tree
    would share it for ever. The slot may have been freed, or be the last of a page that the tree
    evicted at once."""
    decoder = decoder_of(page)
    decoder.play(one_ends_and_one_arrives(decoder, tokens, 2 * page))
    assert decoder.seen == 0  # type: ignore[attr-defined]
    check_idle(decoder)


@pytest.mark.parametrize(("page", "tokens"), CASES)
def test_other_pages_are_announced_at_once(page: int, tokens: int) -> None:
    """Guards against a cost for those that no step can write to."""
    decoder = decoder_of(page)
    decoder.play(one_ends_and_one_arrives(decoder, tokens, 400))
    assert decoder.seen == 1  # type: ignore[attr-defined]
    check_idle(decoder)


@pytest.mark.parametrize(("page", "tokens"), CASES)
def test_announced_at_once_it_is_written_over(
    monkeypatch: pytest.MonkeyPatch, page: int, tokens: int
) -> None:
    """Guards against a script that shows nothing."""
    monkeypatch.setattr(StepWrites, "after", lambda self, pages, announce: announce())
    decoder = decoder_of(page)
    with pytest.raises(AssertionError, match="hold other KV"):
        decoder.play(one_ends_and_one_arrives(decoder, tokens, 2 * page))


class Reading(Overlapped):
    """What a step writes depends on what it reads."""

    def run_batch(self, batch: ScheduleBatch, *arguments: Any) -> Any:
        result = super().run_batch(batch, *arguments)
        reads, written = [], batch.out_cache_loc.clone()
        for req in batch.reqs:
            ids = req.origin_input_ids + req.output_ids
            ids = [*ids, TOKEN][: req.kv_committed_len - 1]
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(ids)].clone()
            reads.append((row, kv.tags(ids, req.extra_key, weights=record_of(req).generation)))
        end_of_step = result.copy_done.synchronize

        def read_and_end() -> None:
            end_of_step()
            for (row, expected), slot in zip(reads, written, strict=True):
                if kv.read(self.pool, row) != expected:
                    kv.write(self.pool, slot[None], [-9])

        result.copy_done.synchronize = read_and_end
        return result


@pytest.mark.hazard("page-of-step-in-flight")
@pytest.mark.parametrize(("page", "tokens"), [(1, 40), (16, 40)])
def test_pages_that_the_step_in_flight_reads_are_announced_after_it(page: int, tokens: int) -> None:
    """Guards against KV in the tree that a step computed from what prefill wrote meanwhile: a
    request ends whose answer began like one that the tree holds. Its own slots of that beginning
    are free at once; that of its last token, which the step in flight computes, is shared."""

    def script(decoder: Reading) -> Iterator[None]:
        first = decoder.submit([5] * tokens, new=25)
        while not first.finished():
            yield
        yield
        yield
        second = decoder.submit([5] * tokens, new=40)
        while not second.finished():
            yield
        assert [second in batch.reqs for batch, _ in decoder.result_queue] == [True]
        told = decoder.told
        late = decoder.submit([9] * int(decoder.token_to_kv_pool_allocator.available_size()), new=2)
        yield
        assert late.kv_allocated_len > 0 and decoder.told == told + 1
        check(decoder)
        yield from until_idle(decoder)

    decoder = Reading(page, 640, reserve=page)
    decoder.play(script(decoder))
    check_idle(decoder)


def test_given_up_before_it_was_announced() -> None:
    """Guards against an announcement of a room that failed in between: its pages are free."""

    def script(decoder: Overlapped) -> Iterator[None]:
        ends = decoder.submit([5] * 40, new=9)
        while not ends.finished():
            yield
        allocator = decoder.token_to_kv_pool_allocator
        free = allocator.available_size() + decoder.tree_cache.evictable_size()
        late = decoder.submit([9] * (int(free) - 32), new=2)
        queue = decoder.disagg_decode_prealloc_queue
        real = queue.pop_preallocated

        def fail_after_admission() -> Any:
            found = real()
            decoder.rooms[-1].state = KVPoll.Failed
            return found

        queue.pop_preallocated = fail_after_admission
        yield
        del queue.pop_preallocated
        assert late.finished() and decoder.rooms[-1].pages is None
        yield from until_idle(decoder)

    decoder = decoder_of(16)
    decoder.play(script(decoder))
    check_idle(decoder)
