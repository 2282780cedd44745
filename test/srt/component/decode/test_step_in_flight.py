"""With overlap scheduling, a step still writes slots of requests that have ended.

``overlapped`` has the loop, the device and the peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from component.decode import kv
from component.decode.checks import check, check_idle
from component.decode.overlapped import TOKEN, Overlapped, until_idle
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode.record import record_of
from sglang.srt.disaggregation.delta.decode.transfer_queue import StepWrites
from sglang.srt.managers.schedule_batch import ScheduleBatch


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS", "0")


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
