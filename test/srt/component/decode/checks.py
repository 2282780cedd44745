"""Invariants of a ``Decoder`` between any two steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from component.decode import drafting, kv, recurrent
from component.decode.peer import WarmUpRoom
from sglang.srt.disaggregation.delta.decode import invariants
from sglang.srt.disaggregation.delta.decode.claims import upwards
from sglang.srt.disaggregation.delta.decode.request import Stage, is_fake, record_of
from sglang.srt.disaggregation.delta.decode.tree import Retired
from sglang.srt.disaggregation.policy.memory import (
    Claim,
    entering,
    expected_length,
    final_length,
    growth,
    page_ceil,
)
from sglang.srt.managers.schedule_batch import ScheduleBatch


def holders(decoder: Any) -> list[Any]:
    """Return the requests that own pages and a lock."""
    return [*readers(decoder), *decoder.disagg_decode_transfer_queue.deferred_requests]


def readers(decoder: Any) -> list[Any]:
    """Return the requests whose KV will be read."""
    running = [req for req in decoder.running_batch.reqs if not req.finished()]
    return [*decoder.in_transfer, *decoder.waiting_queue, *decoder.local, *running]


def check(decoder: Any) -> None:
    """Raise ``AssertionError`` with all violations."""
    held = holders(decoder)
    problems = invariants.tree_problems(decoder.tree_cache, held)
    problems += invariants.pool_problems(
        decoder.tree_cache,
        decoder.token_to_kv_pool_allocator,
        decoder.req_to_token_pool.req_to_token,
        held,
        decoder.max_total_num_tokens,
    )
    problems += _claims(decoder)
    problems += _tables(decoder, held)
    problems += _stages(decoder)
    problems += _content(decoder, readers(decoder))
    if decoder.has_states:
        reading = [req for req in readers(decoder) if req not in decoder.in_transfer]
        arrived = [req for req in reading if not is_fake(req)]
        problems += recurrent.problems(decoder.req_to_token_pool, held, arrived)
    if decoder.steps:
        waiting = [req for req in decoder.waiting_queue if not is_fake(req)]
        problems += [problem for req in waiting for problem in drafting.start_problems(req)]
    for entry in decoder.disagg_decode_transfer_queue.queue:
        problems += _announcement(decoder, entry)
    assert not problems, "; ".join(problems)


def check_idle(decoder: Any) -> None:
    """Check an idle server, and that each request ended exactly once."""
    assert decoder.is_fully_idle() and decoder.nothing_waits
    check(decoder)
    assert invariants.idle_problems(decoder) == []
    assert decoder.tree_cache.protected_size() == 0
    assert decoder.tree_cache.root_node.lock_ref == 1
    ends = {req.rid: decoder.mailbox.ends[req.rid] for req in decoder.submitted}
    assert set(ends.values()) <= {1}, {rid: count for rid, count in ends.items() if count != 1}


def _claims(decoder: Any) -> list[str]:
    running = [req for req in decoder.running_batch.reqs if not req.finished()]
    claims = decoder.tree_cache.claims
    if claims is None:  # no request was admitted yet
        return []
    problems = claims_problems(
        claims,
        running,
        [*decoder.in_transfer, *decoder.waiting_queue, *decoder.local],
        decoder.disagg_decode_transfer_queue.deferred_requests,
        decoder.max_total_num_tokens,
    )
    if decoder.steps:
        step = ScheduleBatch(
            reqs=running,
            token_to_kv_pool_allocator=decoder.token_to_kv_pool_allocator,
            spec_algorithm=decoder.spec_algorithm,
            enable_overlap=decoder.enable_overlap,
        )
        wanted = step.new_tokens_required_next_decode()
        if claims.reserved < wanted:  # SGLang would retract some, and abort the last one
            problems.append(f"a step takes {wanted} tokens, {claims.reserved} are reserved")
    return problems


def claims_problems(
    claims: Any, running: list[Any], waiting: list[Any], deferred: list[Any], total: int
) -> list[str]:
    """Return the differences between ``claims`` and a walk of all requests that hold pages.

    ``waiting``: requests that do not run yet; ``deferred``: requests with a deferred free;
    ``total``: the pool's size in tokens.
    """
    claims.recount()  # as a step does
    problems = []
    page, cap, step = claims.page, claims.cap, claims.step_tokens
    reserved = sum(growth(_claim(req, step), cap, page) for req in running) + sum(
        growth(entering(_claim(req, step), step), claims.entry_cap, page) for req in waiting
    )
    if claims.reserved != reserved:
        problems.append(f"claims reserve {claims.reserved} tokens, not {reserved}")
    pinned_nodes = {
        node.id: len(node.key) for req in (*waiting, *deferred) for node in upwards(req.last_node)
    }
    private = {
        id(req): page_ceil(req.kv_allocated_len, page) - req.cache_protected_len
        for req in (*waiting, *deferred)
    }
    pinned = sum(pinned_nodes.values()) + sum(private.values())
    if claims.pinned != pinned:
        problems.append(f"claims pin {claims.pinned} tokens, not {pinned}")
    needs = [0]
    for req in (*running, *waiting):
        shared = sum(pinned_nodes.get(node.id, 0) for node in upwards(req.last_node))
        whole = page_ceil(expected_length(req, req.kv_allocated_len, step), page)
        needs.append(whole - shared - private.get(id(req), 0))
    for size in (total, total // 2, pinned + max(needs), pinned + max(needs) - 1):
        found = claims.everyone_can_finish(None, 0, 0, size)
        alone = not running and not waiting
        if found != (alone or max(needs) <= size - pinned):
            problems.append(f"claims return {found} for whether all can end with {size} tokens")
    held = {id(req): tokens for req, tokens in claims.holders()}
    reqs = (*running, *waiting, *deferred)
    if held != {id(req): page_ceil(req.kv_allocated_len, page) for req in reqs}:
        problems.append(f"claims of {[*claims.holders()]}, not of {reqs}")
    return problems


def _claim(req: Any, step: int) -> Claim:
    return Claim(req.kv_allocated_len, final_length(req, step))


def _stages(decoder: Any) -> list[str]:
    """Return the requests with a stage that does not match their queue."""
    places = [
        (decoder.queued, {Stage.HANDSHAKE, Stage.IN_LINE}),
        (decoder.in_transfer, {Stage.TRANSFER}),
        (decoder.local, {Stage.LOCAL, Stage.COMMITTED}),
        (decoder.waiting_queue, {Stage.COMMITTED}),
        ([req for req in decoder.running_batch.reqs if not req.finished()], {Stage.RUNNING}),
        (decoder.retracted, {Stage.RETRACTED}),
        (decoder.disagg_decode_transfer_queue.deferred_requests, {Stage.DEFERRED}),
    ]
    found = [(req, record_of(req).stage, stages) for reqs, stages in places for req in reqs]
    return [f"request {req.rid} is at {at}" for req, at, stages in found if at not in stages]


def _tables(decoder: Any, held: list[Any]) -> list[str]:
    problems = []
    rows, metadata = decoder.req_to_token_pool, decoder.req_to_metadata_buffer_idx_allocator
    used = [req.req_pool_idx for req in held]
    if sorted([*rows.free_slots, *used]) != list(range(rows.size + rows.pre_alloc_size)):
        problems.append(f"request rows: {len(rows.free_slots)} free, {sorted(used)} used")
    queue = decoder.disagg_decode_transfer_queue
    entries = [*queue.queue, *(deferred.entry for deferred in queue.deferred)]
    slots = [entry.metadata_buffer_index for entry in entries]
    if sorted([*metadata.free_slots, *slots]) != list(range(metadata.size)):
        problems.append(f"metadata slots: {len(metadata.free_slots)} free, {sorted(slots)} used")
    if not decoder.token_to_kv_pool_allocator.is_not_in_free_group:
        problems.append("a free group was left open: what is freed from now on is lost")
    return problems


class Expected(NamedTuple):
    """Slots, the tags of their KV, and of the draft model's KV, if there is one."""

    name: str
    slots: torch.Tensor
    values: list[int]
    #: None if the KV is recomputed before any use.
    drafts: list[int | None]


def _content(decoder: Any, held: list[Any]) -> list[str]:
    """Return slots of the tree or of requests that do not hold their tokens' KV."""
    expected = [*_of_tree(decoder.tree_cache), *(_of_request(decoder, req) for req in held)]
    if not expected:
        return []
    # One read for all slots, because this runs after every step.
    slots = torch.cat([each.slots.to(torch.int64) for each in expected])
    found = kv.read(decoder.pool, slots)
    drafts = kv.read(decoder.draft_pool, slots) if decoder.draft_pool is not None else []
    problems, at = [], 0
    for each in expected:
        end = at + len(each.slots)
        if found[at:end] != each.values:
            problems.append(f"{each.name}: its slots hold other KV than its tokens'")
        if drafts and not _drafts_fit(decoder, drafts[at:end], each.drafts):
            problems.append(f"{each.name}: its slots hold other draft KV than its tokens'")
        at = end
    return problems


def _drafts_fit(decoder: Any, found: list[int], right: list[int | None]) -> bool:
    """Compare draft KV; a guess of the draft model is enough where an answer ended."""
    pairs = zip(found, right, strict=True)
    return all(
        tag is None or value == tag or (value == -tag and tag in decoder.guessed)
        for value, tag in pairs
    )


def _of_tree(tree: Any) -> Iterator[Expected]:
    """Yield the tree's KV: of the current weights, or of a retired node's own."""
    stack = [(node, 0) for node in tree.root_node.children.values()]
    while stack:
        node, start = stack.pop()
        key, weights = node.key.extra_key, tree.generation
        if isinstance(key, Retired):
            weights, key = key
        ids = node.key.token_ids
        behind = []
        if tree.is_eagle:  # pairs of tokens
            ids, behind = [first for first, _ in ids], [ids[-1][1]]
        tags = kv.tags([*ids, *behind], key, start, weights)
        values = tags[: len(ids)]
        yield Expected(f"node {node.id}", node.value, values, tags[1:])
        stack += [(child, values[-1]) for child in node.children.values()]


def _of_request(decoder: Any, req: Any) -> Expected:
    """Return the KV that has arrived for a request; none for a warm-up request."""
    arrived = req.cache_protected_len if req in decoder.in_transfer else req.kv_committed_len
    if req in decoder.local:
        arrived = decoder.computed.get(req.rid, req.cache_protected_len)
    visible = 0 if is_fake(req) else arrived
    # The draft model does not know the token behind a chunk before the last one.
    goes_on = req.cache_protected_len < visible < req.kv_committed_len
    ids = req.origin_input_ids + req.output_ids
    tags = kv.tags(ids[: visible + 1], req.extra_key, weights=record_of(req).generation)
    row = decoder.req_to_token_pool.req_to_token[req.req_pool_idx, :visible]
    drafts: list[int | None] = [*tags[1 : visible + 1 - goes_on], *[None] * goes_on]
    return Expected(f"request {req.rid}", row, tags[:visible], drafts)


def _announcement(decoder: Any, entry: Any) -> list[str]:
    """Check that the announced pages are those behind the prefix, in order, each once."""
    room, req, page = entry.kv_receiver, entry.req, decoder.page_size
    if isinstance(room, WarmUpRoom):
        return []
    length, prefix = len(req.origin_input_ids), room.prefix_len
    row = decoder.req_to_token_pool.req_to_token[req.req_pool_idx, prefix:length:page]
    expected = torch.div(row, page, rounding_mode="floor").tolist()
    wrong = (
        prefix % page
        or prefix != req.cache_protected_len
        or len(expected) != (page_ceil(length, page) - prefix) // page
        or room.pages.tolist() != expected
    )
    return [f"request {req.rid}: announced {room.pages}, not {expected}"] if wrong else []
