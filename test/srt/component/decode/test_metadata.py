"""Metadata slots: a transfer is complete when its own metadata are there, and only then."""

from __future__ import annotations

import time
from typing import Any

import pytest

from component.decode.decoder import Decoder
from component.decode.steps import PROMPT, admit, finish, land, tick


@pytest.fixture
def decoder() -> Decoder:
    return Decoder(16, 1024)


def markers(decoder: Decoder) -> set[int]:
    """The rooms that metadata slots speak of."""
    return {int(room) for room in decoder.metadata.bootstrap_room[:, 0].tolist()}


def retried(decoder: Decoder) -> Any:
    """A request whose room's number is in all slots, since an earlier try had it too; its KV has
    arrived, and its metadata not yet."""
    decoder.metadata.bootstrap_room[:, 0] = 1000
    (req,) = admit(decoder, PROMPT, new=4)
    assert req.bootstrap_room == 1000
    decoder.deliver(req, metadata=False)
    return req


def test_a_stale_marker_is_not_ones_own(decoder: Decoder) -> None:
    """Guards against metadata of an earlier request with the same room: a client that tries again
    would get the first token of its first try. A late write is forgotten when the slot is taken."""
    req = retried(decoder)
    tick(decoder, 3)
    assert decoder.in_transfer == [req]
    land(decoder, req)
    assert decoder.waiting_queue == [req]


@pytest.mark.hazard("ranks-commit-apart")
@pytest.mark.nightly
def test_without_clearing_a_stale_marker_passes(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a test that would pass in any case."""
    module = "sglang.srt.disaggregation.delta.decode.transfer_queue"
    monkeypatch.setattr(f"{module}.take_slot", lambda allocator, buffers: allocator.alloc())
    req = retried(decoder)
    tick(decoder)
    assert decoder.waiting_queue == [req]


def test_a_slot_is_cleared_when_it_is_freed(decoder: Decoder) -> None:
    """Guards against a room's marker that outlives its request."""
    (req,) = admit(decoder, PROMPT)
    decoder.deliver(req)
    assert markers(decoder) == {0, req.bootstrap_room}
    finish(decoder)
    assert markers(decoder) == {0}


def test_metadata_of_another_room_fail_the_request(decoder: Decoder) -> None:
    """Guards against another request's first token in an answer."""
    (req,) = admit(decoder, PROMPT, new=4)
    decoder.deliver(req)
    room = decoder.rooms[-1]
    decoder.metadata.bootstrap_room[room.metadata_index, 0] = 99
    tick(decoder)
    reason = decoder.mailbox.reasons[req.rid]["message"]
    assert f"metadata slot {room.metadata_index} holds the metadata of room 99" in reason
    assert req.output_ids == [] and room.clears == 1
    finish(decoder)
    assert markers(decoder) == {0} and decoder.tree_cache.total_size() == 0


def test_metadata_that_never_come(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a request that waits for ever for metadata of a room that its backend reports
    as complete: nothing else would end it."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    (req,) = admit(decoder, PROMPT, new=4)
    decoder.deliver(req, metadata=False)
    for _ in range(3):
        tick(decoder)
        clock[0] += 99.0
        assert decoder.in_transfer == [req]
    clock[0] += 10.0
    tick(decoder)
    assert decoder.in_transfer == [] and decoder.mailbox.ends[req.rid] == 1
    reason = decoder.mailbox.reasons[req.rid]["message"]
    assert "is still empty after" in reason and "WAITING_TIMEOUT" in reason
    assert decoder.held == [req]  # prefill may still write them
    finish(decoder)
    assert decoder.tree_cache.total_size() == 0


def test_no_room_cannot_be_checked(decoder: Decoder) -> None:
    """Guards against a request that waits for ever since its room looks like an empty slot."""
    req = decoder.submit(PROMPT, new=4)
    req.bootstrap_room = 0
    tick(decoder)
    land(decoder, req)
    assert "room 0" in decoder.mailbox.reasons[req.rid]["message"]
    finish(decoder)


@pytest.mark.hazard("ranks-commit-apart")
def test_values_are_copies(decoder: Decoder) -> None:
    """Guards against an answer that changes when its metadata slot is used again."""
    req = decoder.submit(PROMPT, new=4)
    req.return_logprob, req.top_logprobs_num = True, 2
    for name in ("val", "idx"):
        setattr(req, f"output_token_logprobs_{name}", [])
        setattr(req, f"output_top_logprobs_{name}", [])
    decoder.tick_queues()
    decoder.metadata.output_top_logprobs_val[:] = 0.5
    decoder.metadata.output_token_logprobs_val[:] = 0.25
    decoder.deliver(req, first_token=7, cached=3)
    decoder.tick_queues()
    for buffer in vars(decoder.metadata).values():
        if hasattr(buffer, "fill_"):
            buffer.fill_(1)
    assert (req.output_ids, req.cached_tokens) == ([7], 3)
    assert req.output_token_logprobs_val == [0.25]
    assert req.output_top_logprobs_val == [[0.5, 0.5]]
