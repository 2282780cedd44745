"""KV in host memory on a decode server: HiCache, and the pool of retracted requests."""

from __future__ import annotations

import pytest

from current.decode import Decode
from current.test_local_turns import Peers
from current.test_resume import REMAINING, SMALL, resumes_early
from current.texts import text

#: Other backends copy by kernels of a GPU.
COPIES = ("--hicache-io-backend", "direct")
HICACHE = (*SMALL, "--enable-hierarchical-cache", "--enable-session-radix-cache", *COPIES)
LEAD = REMAINING | {"SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS": "100"}
hicache = pytest.mark.server(*HICACHE, tokens=640, env=LEAD)


@hicache
def test_a_turn_behind_kv_in_host_memory_is_left_to_prefill(decode: Decode) -> None:
    """Guards against a prefix in host memory that counts as one in the pool, and against answers
    from KV that has not been copied back. The pool holds two of four sessions."""
    decode.scheduler.lead_turns.peers = Peers()
    first = [text(200 + 16 * i, i) for i in range(4)]
    answers = [decode.learn([prompt], 12)[0] for prompt in first]
    second = [[*p, *a, *text(30, 9)] for p, a in zip(first, answers, strict=True)]
    expected = [decode.learn([prompt], 12)[0] for prompt in second]
    hits = {True: 0, False: 0}
    for prompt, answer in zip(
        [*first, *second, second[-1]], [*answers, *expected, expected[-1]], strict=True
    ):
        rid = decode.ask(prompt, 12, session_id="one")
        decode.finish()
        assert decode.output(rid) == answer
        is_local = decode.room(rid).announced is None
        hits[is_local] += is_local or decode.requests[rid].host_hit_length > 0
    assert hits[True] and hits[False], hits


@hicache
def test_a_retracted_request_shares_the_prefix_in_the_tree(decode: Decode) -> None:
    """Guards against a resume that ignores the tree, or that counts host memory as free."""
    assert resumes_early(decode, spoil=True)


@pytest.mark.server(*COPIES, "--disaggregation-decode-retraction-backup", "host_pool")
def test_stock_never_unlocks_what_it_copies_to_the_pool_of_retracted_requests(
    decode: Decode,
) -> None:
    """The reason of a refused setting: without HiCache no code reads that a copy has ended."""
    prompt = text(96, 1)
    (answer,) = decode.learn([prompt], 4)
    rid = decode.ask(prompt, 4)
    decode.finish()
    decode.step(5)
    assert decode.output(rid) == answer and decode.balance()["locked"] == 96
    decode.scheduler.tree_cache.check_hicache_events()
