"""The prebuilt batch: continues behind the prefix that admission decided on."""

from __future__ import annotations

from typing import Any

import pytest

from component.decode.checks import check
from component.decode.decoder import Decoder
from component.decode.steps import PROMPT as TEXT
from component.decode.steps import admit, finish, in_tree, land, retract, serve
from sglang.srt.disaggregation.delta.decode.prefix_tree import RadixPrebuiltBatch
from sglang.srt.managers.schedule_batch import ScheduleBatch

PROMPT = list(range(3, 45))  # 42 tokens


@pytest.fixture(params=[1, 16])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """A decode server that admits equal prompts together."""
    return Decoder(request.param, 1024)


def arrived(decoder: Decoder, *prompts: list[int], **options: Any) -> list[Any]:
    """Requests that wait for the prebuilt batch."""
    reqs = admit(decoder, *prompts, **options)
    land(decoder, *reqs, cached=10)
    assert decoder.waiting_queue == reqs
    return reqs


def prebuilt(decoder: Decoder) -> ScheduleBatch:
    """The batch of everything that waits, as the scheduler builds it."""
    batch = decoder.get_new_prebuilt_batch()
    assert batch is not None
    return batch


@pytest.mark.hazard("first-token-in-tree")
@pytest.mark.parametrize("cached", [0, 8, 32, 42])
def test_outputs_start_behind_the_prefix(decoder: Decoder, cached: int) -> None:
    """Guards against a batch that lists slots which others share as its outputs."""
    if cached:
        serve(decoder, PROMPT[:cached])
    (req,) = arrived(decoder, PROMPT)
    held = req.cache_protected_len  # the transfer put whole pages of the prompt into the tree
    assert held == len(PROMPT) // decoder.page_size * decoder.page_size
    batch = prebuilt(decoder)
    row = decoder.req_to_token_pool.req_to_token[req.req_pool_idx]
    assert batch.out_cache_loc.tolist() == row[held : len(PROMPT)].tolist()
    assert batch.prefix_lens == [held] and batch.extend_lens == [len(PROMPT) - held]
    assert batch.seq_lens.tolist() == [len(PROMPT)]
    assert batch.extend_num_tokens == len(PROMPT) - held
    assert batch.input_ids.tolist() == PROMPT[held:]


def test_rows_of_different_lengths(decoder: Decoder) -> None:
    """Guards against slots of one request that are attributed to the next one in the batch."""
    serve(decoder, PROMPT[:32])
    reqs = arrived(decoder, PROMPT, [60, 61, 62], [*PROMPT[:33], 50])
    batch = prebuilt(decoder)
    rows = decoder.req_to_token_pool.req_to_token
    expected = [
        int(slot)
        for req in reqs
        for slot in rows[req.req_pool_idx, req.cache_protected_len : len(req.origin_input_ids)]
    ]
    assert batch.out_cache_loc.tolist() == expected
    decoder.running_batch = batch
    check(decoder)


@pytest.mark.hazard("cached-tokens-twice")
@pytest.mark.parametrize("prefix", [0, 8, 64])
@pytest.mark.parametrize("retracted", [False, True])
def test_clients_see_the_cached_tokens_of_prefill(prefix: int, retracted: bool) -> None:
    """Guards against our prefix being added to what prefill reported, and against a negative number
    after a retraction."""
    decoder = Decoder(8, 1024)
    if prefix:
        serve(decoder, TEXT[:prefix])
    reqs = arrived(decoder, TEXT[:72], [60, 61], new=6)
    assert decoder.rooms[-2].prefix_len == prefix
    for _ in range(2):
        decoder.tick_batch()
    if retracted:
        retract(decoder)
    finish(decoder)
    assert [req.cached_tokens for req in reqs] == [10, 10]


@pytest.mark.hazard("matched-twice")
def test_nothing_is_matched_again(decoder: Decoder) -> None:
    """Guards against a longer prefix, inserted by others meanwhile, replacing which slots the
    request shares and which node it has locked."""
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
@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_the_first_token_is_not_in_the_tree(decoder: Decoder, length: int) -> None:
    """Guards against the first generated token, which came with the metadata and has no KV yet,
    entering the tree with a slot that nobody wrote."""
    prompt, page = PROMPT[:length], decoder.page_size
    (req,) = arrived(decoder, prompt)
    whole = length // page * page
    assert in_tree(decoder, [*prompt, 1]) == whole
    decoder.running_batch = prebuilt(decoder)
    assert req.output_ids == [1]
    assert in_tree(decoder, [*prompt, 1]) == decoder.tree_cache.total_size() == whole
    check(decoder)


def test_the_answer_is_in_the_tree_when_it_ends(decoder: Decoder) -> None:
    """Guards against a next turn that moves the answer of the turn before it."""
    (req,) = arrived(decoder, PROMPT[:30], new=20)
    finish(decoder)
    text = req.origin_input_ids + req.output_ids
    page = decoder.page_size
    # The last token ended the request and was never computed.
    assert in_tree(decoder, [*text, 1, 2]) == (len(text) - 1) // page * page
    admit(decoder, [*text, 40, 41])
    room = decoder.rooms[-1]
    assert room.prefix_len == (len(text) - 1) // page * page
    assert len(room.pages) == -(-(len(text) + 2) // page) - room.prefix_len // page


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
