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
    """Guards against a batch that lists slots which others share as its outputs, or slots of one
    request as those of the next one in the batch."""
    if cached:
        serve(decoder, PROMPT[:cached])
    reqs = arrived(decoder, PROMPT, [60, 61, 62], [*PROMPT[:33], 50])
    batch, rows = prebuilt(decoder), decoder.req_to_token_pool.req_to_token
    slots, new_ids, lengths = list[int](), list[int](), list[tuple[int, int]]()
    for req in reqs:
        ids = req.origin_input_ids
        held = len(ids) // decoder.page_size * decoder.page_size
        # The transfer put whole pages of the prompt into the tree.
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
