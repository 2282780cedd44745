"""A complete transfer: only with its own metadata; and the prebuilt batch, which continues behind
the prefix that admission decided on."""

from __future__ import annotations

import time
from typing import Any

import pytest

from component.decode.checks import check
from component.decode.decoder import Decoder
from component.decode.steps import PROMPT as TEXT
from component.decode.steps import admit, finish, in_tree, land, retract, serve, tick
from sglang.srt.disaggregation.delta.decode.tree import RadixPrebuiltBatch
from sglang.srt.managers.schedule_batch import ScheduleBatch

PROMPT = list(range(3, 45))  # 42 tokens


@pytest.fixture(params=[1, 16])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """A decode server that admits equal prompts together."""
    return Decoder(request.param, 1024)


# ---- metadata ----


def markers(decoder: Decoder) -> set[int]:
    """Return the rooms that metadata slots name."""
    return {int(room) for room in decoder.metadata.bootstrap_room[:, 0].tolist()}


@pytest.mark.hazard("ranks-commit-apart")
@pytest.mark.parametrize("cleared", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_stale_marker_is_not_ones_own(cleared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against metadata of an earlier request with the same room: a client that tries again
    would get the first token of its first try. A late write is forgotten when the slot is taken, a
    marker when the slot is freed."""
    if not cleared:
        module = "sglang.srt.disaggregation.delta.decode.queue"
        monkeypatch.setattr(f"{module}.EMPTY", 1000)
    decoder = Decoder(16, 1024)
    decoder.metadata.bootstrap_room[:, 0] = 1000
    (req,) = admit(decoder, PROMPT, new=4)
    assert req.bootstrap_room == 1000
    decoder.deliver(req, metadata=False)
    tick(decoder, 3)
    if not cleared:
        assert decoder.waiting_queue == [req]
        return
    assert decoder.in_transfer == [req]
    decoder.metadata.bootstrap_room[:, 0] = 0
    decoder.deliver(req)
    assert markers(decoder) == {0, 1000}
    tick(decoder)
    assert decoder.waiting_queue == [req]
    finish(decoder)
    assert markers(decoder) == {0}


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
    """Guards against a request that waits for ever because its room 0 looks like an empty slot."""
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


# ---- the prebuilt batch ----


def arrived(decoder: Decoder, *prompts: list[int], **options: Any) -> list[Any]:
    """Return requests that wait for the prebuilt batch."""
    reqs = admit(decoder, *prompts, **options)
    land(decoder, *reqs, cached=10)
    assert decoder.waiting_queue == reqs
    return reqs


def prebuilt(decoder: Decoder) -> ScheduleBatch:
    """Return the batch of all waiting requests, as the scheduler builds it."""
    batch = decoder.get_new_prebuilt_batch()
    assert batch is not None
    return batch


@pytest.mark.hazard("first-token-in-tree")
@pytest.mark.parametrize("cached", [0, 8, 32, 42])
def test_outputs_start_behind_the_prefix(decoder: Decoder, cached: int) -> None:
    """Guards against a batch that lists shared slots as its outputs, or slots of one request as
    those of the next one in the batch."""
    if cached:
        serve(decoder, PROMPT[:cached])
    reqs = arrived(decoder, PROMPT, [60, 61, 62], [*PROMPT[:33], 50])
    batch, rows = prebuilt(decoder), decoder.req_to_token_pool.req_to_token
    slots, new_ids, lengths = list[int](), list[int](), list[tuple[int, int]]()
    for req in reqs:
        ids = req.origin_input_ids
        held = len(ids) // decoder.page_size * decoder.page_size
        # The transfer inserted whole pages of the prompt into the tree.
        assert req.cache_protected_len == held
        slots += rows[req.req_pool_idx, held : len(ids)].tolist()
        new_ids += ids[held:]
        lengths.append((held, len(ids) - held))
    assert batch.out_cache_loc.tolist() == slots and batch.input_ids.tolist() == new_ids
    assert list(zip(batch.prefix_lens, batch.extend_lens, strict=True)) == lengths
    assert batch.seq_lens.tolist() == [len(req.origin_input_ids) for req in reqs]
    assert batch.extend_num_tokens == len(new_ids)
    decoder.running_batch = batch
    check(decoder)


@pytest.mark.hazard("cached-tokens-twice")
@pytest.mark.parametrize("prefix", [0, 64])
def test_clients_see_the_cached_tokens_of_prefill(prefix: int) -> None:
    """Guards against decode's prefix added to the number that prefill reported, and against a
    negative number after a retraction."""
    decoder = Decoder(8, 1024)
    serve(decoder, TEXT[:prefix] or [60])
    reqs = arrived(decoder, TEXT[:72], [60, 61], new=6)
    assert decoder.rooms[-2].prefix_len == prefix
    for _ in range(2):
        decoder.tick_batch()
    retracted = retract(decoder)
    finish(decoder)
    assert [req.cached_tokens for req in reqs] == [10, 10] and retracted in reqs


@pytest.mark.hazard("matched-twice")
def test_nothing_is_matched_again(decoder: Decoder) -> None:
    """Guards against a longer prefix, inserted by other requests since, that changes the request's
    shared slots or its locked node."""
    serve(decoder, TEXT[:32])
    first, second = admit(decoder, TEXT[:60], TEXT[:60])
    assert first.cache_protected_len == second.cache_protected_len == 32
    land(decoder, second)
    assert in_tree(decoder, TEXT[:60]) > 32  # all whole pages of the prompt
    node, row = first.last_node, decoder.req_to_token_pool.req_to_token[first.req_pool_idx].clone()
    first.init_next_round_input(decoder.tree_cache)
    assert first.last_node is node and first.cache_protected_len == 32
    assert first.prefix_indices.tolist() == row[:32].tolist()
    finish(decoder)


@pytest.mark.hazard("first-token-in-tree")
@pytest.mark.nightly
def test_the_stock_batch_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against checks that SGLang's own method would pass as well: it counts the prefix as
    cached tokens, and lists slots from the start of the row."""
    decoder = Decoder(16, 1024)
    (req,) = arrived(decoder, PROMPT)
    monkeypatch.delattr(RadixPrebuiltBatch, "prepare_for_prebuilt")
    batch = prebuilt(decoder)
    row = decoder.req_to_token_pool.req_to_token[req.req_pool_idx]
    assert req.cached_tokens == 10 + 32
    assert batch.out_cache_loc.tolist() == row[: len(batch.out_cache_loc)].tolist()
