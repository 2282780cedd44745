"""Admission's reserve and its decisions: two faults of stock 0.5.23 (change 3 of docs/upstream.md),
and the part ``admission``."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from current.environment import DRAFTS, MOONCAKE, REMAINING, SMALL, TOGETHER
from current.texts import text

if TYPE_CHECKING:
    from current.decode import Decode


def count_admitted_at_once(decode: Decode) -> int:
    """Return how many of eight requests with short answers are admitted at once.

    All answers must equal an aggregated server's.
    """
    prompts = [text(60, seed) for seed in range(8)]
    expected = decode.learn(prompts, 4)
    rids = [decode.ask(prompt, 4) for prompt in prompts]
    decode.step(3)
    admitted = len(decode.arriving())
    decode.finish()
    assert [decode.output(rid) for rid in rids] == expected
    return admitted


@pytest.mark.server(tokens=1024)
def test_stock_reserves_512_tokens_for_an_answer_of_4(decode: Decode) -> None:
    """The fault: 64 of 1,024 tokens are in use, and no other request is admitted."""
    assert count_admitted_at_once(decode) == 1


@pytest.mark.server(tokens=1024, env=REMAINING)
def test_a_request_reserves_what_it_can_still_generate(decode: Decode) -> None:
    """Guards against a reserve that ignores the request's max_new_tokens."""
    assert count_admitted_at_once(decode) == 8


def admit_beside_two(decode: Decode, tokens: int = 112) -> tuple[bool, list[bool]]:
    """Run two requests that share a prefix, and send a third of ``tokens`` with a long transfer.

    Return whether the third was admitted, and for each of the first two whether its answer was
    right and complete.
    """
    common = text(288, 1)
    shared = [text(16, seed, common) for seed in (2, 3)]
    late = text(tokens, 4)
    expected = [decode.learn([prompt], 112)[0] for prompt in shared]
    decode.learn([late], 4)
    rids = [decode.ask(prompt, 112) for prompt in shared]
    decode.step()
    decode.until(lambda: bool(decode.deliver()) or len(decode.scheduler.running_batch.reqs) == 2)
    other = decode.ask(late, 4)
    decode.step(2)
    is_in = other in decode.arriving()
    # Wait for an empty batch: stock gives a request aborted for memory no finish reason.
    decode.until(
        lambda: not (decode.scheduler.running_batch.reqs or decode.prealloc.retracted_queue)
    )
    right = [decode.output(rid) == want for rid, want in zip(rids, expected, strict=True)]
    decode.finish(other)
    return is_in, right


@pytest.mark.server(*SMALL, tokens=512)
def test_stock_admits_a_request_that_leaves_no_memory_for_a_running_one(decode: Decode) -> None:
    """The fault: the shared prefix counts twice, as memory that each of the two would free. Running
    requests are aborted because the transfer holds the memory for their answers."""
    is_in, right = admit_beside_two(decode)
    assert is_in and not all(right)


@pytest.mark.server(*SMALL, tokens=512, env=REMAINING)
def test_a_request_waits_if_a_running_one_could_not_finish(decode: Decode) -> None:
    """Guards against transfers that take the last memory: only running requests are retracted."""
    assert admit_beside_two(decode) == (False, [True] * 2)


@pytest.mark.server(*SMALL, *DRAFTS, tokens=512, env=REMAINING)
def test_the_tokens_of_a_speculative_step_count(decode: Decode) -> None:
    """Guards against a last step without pages for its drafts: SGLang aborts the request. A third
    request of 96 tokens leaves the other two exactly the pages of their texts."""
    assert admit_beside_two(decode, 96) == (False, [True] * 2)


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(6, marks=pytest.mark.server(*SMALL, tokens=640, env=REMAINING), id="plain"),
        pytest.param(
            2,
            marks=pytest.mark.server(*SMALL, *DRAFTS, *MOONCAKE, tokens=640, env=REMAINING),
            id="drafts, mooncake",
        ),
        pytest.param(
            6,
            marks=pytest.mark.server(*SMALL, *TOGETHER, tokens=640, env=REMAINING),
            id="settings",
        ),
    ],
)
def test_the_pool_balances_after_each_step(decode: Decode, rounds: int) -> None:
    """Guards against pages and locks that are counted twice or leaked. Requests with two prefixes
    come, arrive, fail, are aborted and retracted in any order."""
    prefixes = [text(160, 1), text(208, 2)]
    prompts = [text(20 + 9 * i, 10 + i, prefixes[i % 2]) for i in range(6)]
    answers = {tuple(prompt): decode.learn([prompt], 60)[0] for prompt in prompts}
    has_priorities = decode.scheduler.enable_priority_scheduling
    whole = retracted = 0
    for seed in range(rounds):
        rng = random.Random(seed)
        left, rids = 10, []
        while left or not (decode.ended(*rids) and decode.is_idle()):
            for rid in decode.arriving():
                if rng.random() < 0.3:
                    decode.deliver(rid)
                elif rng.random() < 0.02:
                    decode.fail(rid)
            if left and rng.random() < 0.3:
                left -= 1
                more = {"priority": left % 3} if has_priorities else {}
                rids.append(decode.ask(rng.choice(prompts), rng.randint(2, 60), **more))
            if rids and rng.random() < 0.02:
                decode.abort(rng.choice(rids))
            for entry, *_ in decode.transfer._deferred_releases:
                decode.confirm(entry.req.rid)
            decode.step()
            assert decode.call(lambda: held(decode)) == 640, (seed, decode.state())
        assert decode.balance()["locked"] == 0, "no request is left"
        for rid in rids:
            req, got = decode.requests[rid], decode.output(rid)
            assert got == answers[tuple(req.origin_input_ids)][: len(got)], (seed, rid)
            whole += len(got) == req.sampling_params.max_new_tokens
            retracted += req.retraction_count
    assert whole > 5 * rounds and retracted, "of 10 a round"


def held(decode: Decode) -> int:
    """Return the sum of free tokens, tokens in the tree, and requests' tokens outside the tree."""
    scheduler, transfer = decode.scheduler, decode.transfer
    entries = [*transfer.queue, *(release[0] for release in transfer._deferred_releases)]
    reqs = {id(req): req for req in scheduler.running_batch.reqs + scheduler.waiting_queue}
    reqs |= {id(entry.req): entry.req for entry in entries}
    private_tokens = (
        -(-req.kv.kv_allocated_len // 16) * 16 - req.kv.cache_protected_len
        for req in reqs.values()
        if req.kv.holds_kv
    )
    tree = scheduler.tree_cache
    free = scheduler.token_to_kv_pool_allocator.available_size()
    return free + tree.evictable_size() + tree.protected_size() + sum(private_tokens)
