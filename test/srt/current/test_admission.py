"""What admission reserves, and whom it lets in: stock 0.5.23's two faults of change 3 of
docs/upstream.md, and the part ``admission``."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from current.environment import DRAFTS
from current.texts import text

if TYPE_CHECKING:
    from current.decode import Decode

SMALL = ("--num-reserved-decode-tokens", "16")
REMAINING = {"SGLANG_DISAGGREGATION_DECODE_ADMISSION": "remaining"}


def let_in_at_once(decode: Decode) -> int:
    """Of eight requests with short answers; all are answered as an aggregated server does."""
    prompts = [text(60, seed) for seed in range(8)]
    expected = decode.learn(prompts, 4)
    rids = [decode.ask(each, 4) for each in prompts]
    decode.step(3)
    found = len(decode.arriving())
    decode.finish()
    assert [decode.output(rid) for rid in rids] == expected
    return found


@pytest.mark.server(tokens=1024)
def test_stock_reserves_512_tokens_for_an_answer_of_4(decode: Decode) -> None:
    """The fault: 64 of 1,024 tokens are in use, and nobody else is let in."""
    assert let_in_at_once(decode) == 1


@pytest.mark.server(tokens=1024, env=REMAINING)
def test_a_request_reserves_what_it_can_still_generate(decode: Decode) -> None:
    """Guards against a reserve that does not look at the request."""
    assert let_in_at_once(decode) == 8


def one_beside_two(decode: Decode, tokens: int = 112) -> tuple[bool, list[bool]]:
    """Two requests that share a prefix run when another one of so many tokens comes, whose transfer
    lasts. Whether it was let in; and of which of the two the answer was right and whole."""
    common = text(288, 1)
    shared = [text(16, seed, common) for seed in (2, 3)]
    late = text(tokens, 4)
    expected = [decode.learn([each], 112)[0] for each in shared]
    decode.learn([late], 4)
    rids = [decode.ask(each, 112) for each in shared]
    decode.step()
    decode.until(lambda: bool(decode.deliver()) or len(decode.scheduler.running_batch.reqs) == 2)
    other = decode.ask(late, 4)
    decode.step(2)
    is_in = other in decode.arriving()
    # Not until they have ended: stock gives a request that it aborts for memory no finish reason.
    decode.until(
        lambda: not (decode.scheduler.running_batch.reqs or decode.prealloc.retracted_queue)
    )
    right = [decode.output(rid) == want for rid, want in zip(rids, expected, strict=True)]
    decode.finish(other)
    return is_in, right


@pytest.mark.server(*SMALL, tokens=512)
def test_stock_lets_one_in_after_whom_another_cannot_end(decode: Decode) -> None:
    """The fault: the shared prefix counts as memory that each of the two would give back. Running
    requests are aborted because the transfer has the memory for their answers."""
    is_in, right = one_beside_two(decode)
    assert is_in and not all(right)


@pytest.mark.server(*SMALL, tokens=512, env=REMAINING)
def test_nobody_is_let_in_after_whom_another_cannot_end(decode: Decode) -> None:
    """Guards against transfers that take the last memory: what does not run is not retracted."""
    assert one_beside_two(decode) == (False, [True] * 2)


@pytest.mark.server(*SMALL, *DRAFTS, tokens=512, env=REMAINING)
def test_the_tokens_of_a_speculative_step_count(decode: Decode) -> None:
    """Guards against a last step for whose drafts there is no page: SGLang aborts the request. A
    late one of 96 tokens leaves both just the pages of their texts."""
    assert one_beside_two(decode, 96) == (False, [True] * 2)


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(6, marks=pytest.mark.server(*SMALL, tokens=640, env=REMAINING), id="plain"),
        pytest.param(
            2, marks=pytest.mark.server(*SMALL, *DRAFTS, tokens=640, env=REMAINING), id="drafts"
        ),
    ],
)
def test_the_pool_balances_after_each_step(decode: Decode, rounds: int) -> None:
    """Guards against pages and locks that are counted twice or left behind, over requests of two
    prefixes that come, arrive, fail, are aborted and retracted in any order."""
    prefixes = [text(160, 1), text(208, 2)]
    prompts = [text(20 + 9 * i, 10 + i, prefixes[i % 2]) for i in range(6)]
    answers = {tuple(each): decode.learn([each], 60)[0] for each in prompts}
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
                rids.append(decode.ask(rng.choice(prompts), rng.randint(2, 60)))
            if rids and rng.random() < 0.02:
                decode.abort(rng.choice(rids))
            for entry, *_ in decode.transfer._deferred_releases:
                decode.confirm(entry.req.rid)
            decode.step()
            assert decode.call(lambda: held(decode)) == 640, (seed, decode.state())
        assert decode.balance()["locked"] == 0, "nobody is here any more"
        for rid in rids:
            req, got = decode.requests[rid], decode.output(rid)
            assert got == answers[tuple(req.origin_input_ids)][: len(got)], (seed, rid)
            whole += len(got) == req.sampling_params.max_new_tokens
            retracted += req.retraction_count
    assert whole > 5 * rounds and retracted, "of 10 a round"


def held(decode: Decode) -> int:
    """Tokens of the pool: free, in the tree, and of requests outside the tree."""
    made, transfer = decode.scheduler, decode.transfer
    entries = [*transfer.queue, *(each[0] for each in transfer._deferred_releases)]
    reqs = {id(req): req for req in made.running_batch.reqs + made.waiting_queue}
    reqs |= {id(entry.req): entry.req for entry in entries}
    own = (
        -(-req.kv.kv_allocated_len // 16) * 16 - req.kv.cache_protected_len
        for req in reqs.values()
        if req.kv.holds_kv
    )
    tree = made.tree_cache
    free = made.token_to_kv_pool_allocator.available_size()
    return free + tree.evictable_size() + tree.protected_size() + sum(own)
