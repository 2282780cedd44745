"""With overlap scheduling, a step still writes, and reads, slots of requests that have ended.

``overlapped`` has the loop, the device and the peer; ``Ahead`` the same with a draft model (spec
v2), with which a step looks up on the device which slots it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from component.decode import kv
from component.decode.checks import check
from component.decode.overlapped import TOKEN, Ahead, Overlapped, until_idle
from component.decode.steps import finish, ids
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode.request import record_of
from sglang.srt.disaggregation.delta.decode.transfer import StepWrites
from sglang.srt.disaggregation.policy.pace import Limits
from sglang.srt.managers.schedule_batch import ScheduleBatch


def decoder_of(page: int, steps: int) -> Any:
    kind: Any = Ahead if steps else Overlapped
    return kind(page, 640, steps=steps, reserve=page)


def one_ends_and_one_arrives(
    decoder: Any, tokens: int, room: int, prefix: int = 0
) -> Iterator[None]:
    """Let a request end while a step with it is in flight; the next one gets its row, and all
    memory but ``room`` tokens. ``prefix``: number of tokens that it shares with the tree."""
    shared = ids(9, 80)
    if decoder.steps:
        decoder.submit(shared, new=1)
        yield from until_idle(decoder)
    ends = decoder.submit([5] * tokens, new=9)
    while not ends.finished():
        yield
    assert [ends in batch.reqs for batch, _ in decoder.result_queue] == [True]
    told, at_once = decoder.told, decoder.at_once
    free = decoder.token_to_kv_pool_allocator.available_size() + decoder.tree_cache.evictable_size()
    late = decoder.submit([*shared[:prefix], *[8] * (int(free) - prefix - room)], new=2)
    rows = decoder.req_to_token_pool
    others, rows.free_slots = rows.free_slots[:-1], rows.free_slots[-1:]
    yield
    rows.free_slots += others
    assert late.kv_allocated_len > 0 and decoder.told == told + 1
    decoder.seen = decoder.at_once - at_once
    decoder.check_now()
    yield from until_idle(decoder)


#: Page, tokens of the ended prompt, draft steps; tokens of memory to leave for a late request.
CASES = [(1, 40, 0, 2), (16, 40, 0, 32), (16, 39 + 16, 0, 32), (16, 16 * 3 - 9, 0, 32)]
CASES += [(1, 40, 3, 64), (2, 40, 3, 64), (16, 40, 3, 64)]


@pytest.mark.hazard("page-of-step-in-flight")
@pytest.mark.parametrize("protected", [True, False])
@pytest.mark.parametrize(("page", "tokens", "steps", "room"), CASES)
def test_pages_of_the_step_in_flight_are_announced_after_it(
    page: int, tokens: int, steps: int, room: int, protected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against KV that prefill wrote and that an earlier launched step overwrites: the tree
    would share it for ever. The slot may have been freed, be the last of a page that the tree
    evicted at once, or be held ahead of a text. Other slots are announced at once. Without the
    protection the fault occurs."""
    if not protected:
        monkeypatch.setattr(StepWrites, "after", lambda self, pages, announce: announce())
        decoder = decoder_of(page, steps)
        with pytest.raises(AssertionError, match="hold other"):
            decoder.play(one_ends_and_one_arrives(decoder, tokens, room))
        return
    for left, at_once in ((room, 0), (400, 1)):
        decoder = decoder_of(page, steps)
        decoder.play(one_ends_and_one_arrives(decoder, tokens, left))
        assert decoder.seen == at_once
        finish(decoder)


@pytest.mark.hazard("row-of-step-in-flight")
@pytest.mark.parametrize("protected", [True, False])
@pytest.mark.parametrize("page", [1, 2, 16])
def test_a_row_is_given_away_when_the_step_in_flight_has_looked_into_it(
    page: int, protected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a step that writes into the prefix of the next owner of an ended request's
    row; without the protection it does."""
    decoder = decoder_of(page, 3)
    script = one_ends_and_one_arrives(decoder, 40, 200, prefix=79)
    if protected:
        decoder.play(script)
        finish(decoder)
        return
    monkeypatch.setattr(StepWrites, "rows_are_free", lambda self: None)
    with pytest.raises(AssertionError, match="hold other"):
        decoder.play(script)


class Reading(Overlapped):
    """A scheduler with steps that write values which depend on the ones they read."""

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
    """Guards against KV in the tree that a step computed from prefill's later writes: a request
    ends whose answer began like one in the tree. Its own slots of that beginning are free at once;
    that of its last token, which the step in flight computes, is shared."""

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
    finish(decoder)


@pytest.mark.parametrize("starts_over", [False, True])
def test_given_up_before_it_was_announced(starts_over: bool) -> None:
    """Guards against an announcement of a room that failed in between, with freed pages; also if
    its request is computed locally instead, and has not ended."""

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
        assert late.finished() is not starts_over and decoder.rooms[-1].pages is None
        yield from until_idle(decoder)

    limits = Limits(tokens=20, chunk=64, when_lost=640) if starts_over else None
    decoder = Overlapped(16, 640, reserve=16, limits=limits)
    decoder.play(script(decoder))
    finish(decoder)
