"""Every way out of a decode server, with every kind of prefix: nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from component.decode.checks import check, check_idle, holders
from component.decode.decoder import Decoder
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

PROMPT = [token % 50 for token in range(3, 83)]  # 80 tokens: 5 pages of 16
PREFIXES = [0, 32, 80]


@pytest.fixture(params=[1, 16])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A decode server with room for everybody."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS", "0")
    return Decoder(request.param, 1024)


def warm(decoder: Decoder, length: int) -> None:
    """Let the tree hold the first ``length`` tokens of the prompt."""
    if length:
        decoder.submit(PROMPT[:length], new=1)
        decoder.drain()


def step(decoder: Decoder, action: Callable[[], None]) -> None:
    """One action, checked."""
    action()
    check(decoder)


STAGES = ["pending", "handshake", "queued", "transfer", "waiting", "running", "retracted"]
#: Stages of a request that prefill was not told of.
UNANNOUNCED = STAGES[:3]


def bring_to(decoder: Decoder, stage: str) -> Any:
    """A request in ``stage``; a second one of another text runs beside it."""
    other = decoder.submit([60, 61, 62], new=40)
    step(decoder, decoder.tick_queues)
    if stage == "queued":  # nothing but the prompt's prefix and a few tokens are left
        room = min(decoder.token_to_kv_pool_allocator.available_size() - 16, 960)
        filler = decoder.submit([1] * (room // 16 * 16), new=1)
        step(decoder, decoder.tick_queues)
        assert decoder.in_transfer == [other, filler]
    ready = stage not in ("pending", "handshake")
    req = decoder.submit(PROMPT, new=30, ready=ready, pending=stage == "pending")
    step(decoder, decoder.tick_queues)
    assert (req in decoder.queued) == (stage in UNANNOUNCED)
    decoder.deliver(other)
    if stage in ("waiting", "running", "retracted"):
        decoder.deliver(req)
    step(decoder, decoder.tick_queues)
    if stage in ("running", "retracted"):
        for _ in range(3):
            step(decoder, decoder.tick_batch)
    if stage == "retracted":
        step(decoder, decoder.retract)
        assert decoder.disagg_decode_prealloc_queue.retracted_queue == [req]
    return req


def in_tree(decoder: Decoder, ids: list[int]) -> int:
    """How much of ``ids`` the tree holds."""
    match = decoder.tree_cache.match_prefix(MatchPrefixParams(key=RadixKey(ids, None)))
    return len(match.device_indices)


@pytest.mark.hazard("lost-lock", "abort-leaves-something")
@pytest.mark.parametrize("everybody", [False, True], ids=["one request", "abort all"])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("stage", STAGES)
def test_abort(decoder: Decoder, stage: str, prefix: int, everybody: bool) -> None:
    """Guards against a lock, a row, a metadata slot, a copy on the CPU or an answer that an abort
    forgets, or gives twice. The checks run after every step; at the end the client was told once,
    the room was forgotten once, and prefill knows, once, that no announcement will come."""
    warm(decoder, prefix)
    req = bring_to(decoder, stage)
    other, room = decoder.submitted[int(prefix > 0)], decoder.rooms[-1]
    assert decoder.submitted[-1] is req and not decoder.is_fully_idle()
    abort = AbortReq(abort_all=True) if everybody else AbortReq(rid=req.rid)
    step(decoder, lambda: decoder.abort_request(abort))
    for _ in range(3):
        step(decoder, decoder.tick_queues)
        step(decoder, decoder.tick_batch)
    if stage == "transfer":  # its pages stay its own until prefill has stopped writing
        assert req in holders(decoder) and not decoder._nothing_waits
        step(decoder, lambda: decoder.write_late(room))
        step(decoder, decoder.tick_queues)
    assert req not in [*holders(decoder), *decoder.queued]
    queue = decoder.disagg_decode_prealloc_queue
    assert queue.pending_reqs == [] and req not in queue.retracted_queue
    assert req.req_pool_idx is None and not hasattr(req, "kv_cache_cpu")
    assert decoder.mailbox.ends[req.rid] == 1
    assert room.clears == 1 and len(room.withdrawn) == (stage in UNANNOUNCED)
    decoder.drain()
    assert room.clears == 1 and len(room.withdrawn) == (stage in UNANNOUNCED)
    check_idle(decoder)
    assert (len(other.output_ids) < 40) == everybody


@pytest.mark.parametrize("prefix", PREFIXES)
def test_abort_from_the_waiting_queue_shares_what_arrived(decoder: Decoder, prefix: int) -> None:
    """Guards against the first token, whose KV does not exist yet, in the tree: SGLang releases a
    waiting request as if it had run. What prefill sent is complete, and stays."""
    warm(decoder, prefix)
    req = bring_to(decoder, "waiting")
    assert len(req.output_ids) == 1
    step(decoder, lambda: decoder.abort(req.rid))
    assert in_tree(decoder, [*PROMPT, *req.output_ids]) == 80
    decoder.drain()
    check_idle(decoder)


@pytest.mark.hazard("bad-kv-in-tree")
def test_abort_of_a_waiting_warm_up_shares_nothing(decoder: Decoder) -> None:
    """Guards against the garbage of a warm-up request that is aborted before it runs."""
    req = decoder.submit([10, 11, 12, 13] * 8, new=4, warm_up=True)
    step(decoder, decoder.tick_queues)
    assert decoder.waiting_queue == [req]
    step(decoder, lambda: decoder.abort(req.rid))
    assert decoder.tree_cache.total_size() == 0 and decoder.mailbox.ends[req.rid] == 1
    check_idle(decoder)


@pytest.mark.hazard("bad-kv-in-tree")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_failed_transfer(decoder: Decoder, prefix: int) -> None:
    """Guards against KV of a failed transfer answering a later prompt."""
    warm(decoder, prefix)
    before = decoder.tree_cache.total_size()
    req = bring_to(decoder, "transfer")
    decoder.room(req).state = KVPoll.Failed
    step(decoder, decoder.tick_queues)
    assert decoder.mailbox.ends[req.rid] == 1
    assert in_tree(decoder, PROMPT) == prefix
    assert decoder.tree_cache.total_size() <= before + 3
    decoder.drain()
    check_idle(decoder)


def test_failed_handshake(decoder: Decoder) -> None:
    """Guards against a request without pages that stays in the queue for ever."""
    req = bring_to(decoder, "handshake")
    room = decoder.room(req)
    room.state = KVPoll.Failed
    step(decoder, decoder.tick_queues)
    assert decoder.mailbox.ends[req.rid] == 1 and req not in decoder.queued
    assert room.clears == 1 and len(room.withdrawn) == 1
    decoder.drain()
    check_idle(decoder)


def test_abort_after_the_handshake_gets_no_pages(decoder: Decoder) -> None:
    """Guards against an aborted request that is admitted once there is room, because its receiver
    is not looked at again after the handshake."""
    filler = decoder.submit([1] * 1000, new=2)
    step(decoder, decoder.tick_queues)
    req = decoder.submit(PROMPT, new=30)
    step(decoder, decoder.tick_queues)
    assert decoder.queued == [req]
    decoder.abort(req.rid)
    step(decoder, decoder.tick_queues)
    assert decoder.queued == [] and decoder.mailbox.ends[req.rid] == 1
    assert decoder.rooms[-1].pages is None and decoder.rooms[-1].cleared
    assert decoder.in_transfer == [filler]
    decoder.drain()
    check_idle(decoder)


@pytest.mark.hazard("retracted-without-node", "retraction-of-shared-pages")
@pytest.mark.parametrize("evict", [False, True], ids=["tree kept", "tree evicted"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_retracted_request_comes_back(decoder: Decoder, prefix: int, evict: bool) -> None:
    """Guards against a resumed request that reads other KV than it left, whether its prefix is
    still there or not; the content of every slot is checked after each step."""
    warm(decoder, prefix)
    req = bring_to(decoder, "retracted")
    held = len(req.origin_input_ids) + len(req.output_ids) - 1
    if evict:
        decoder.tree_cache.evict(EvictParams(num_tokens=10_000))
    page = decoder.page_size
    shared = min(in_tree(decoder, (req.origin_input_ids + req.output_ids)[:held]), held)
    assert (shared == 0) == evict
    step(decoder, decoder.tick_queues)
    assert req in decoder.waiting_queue and req.cache_protected_len == shared // page * page
    assert not hasattr(req, "kv_cache_cpu")
    decoder.drain()
    assert len(req.output_ids) == 30
    check_idle(decoder)


@pytest.mark.hazard("retracted-without-node")
def test_retracted_twice_then_aborted(decoder: Decoder) -> None:
    """Guards against what a first retraction leaves in the request for the second one."""
    req = bring_to(decoder, "retracted")
    step(decoder, decoder.tick_queues)
    for _ in range(3):
        step(decoder, decoder.tick_batch)
    step(decoder, decoder.retract)
    assert req.retraction_count == 2
    step(decoder, lambda: decoder.abort(req.rid))
    decoder.drain()
    assert decoder.mailbox.ends[req.rid] == 1
    check_idle(decoder)


@pytest.mark.hazard("retraction-of-shared-pages")
def test_a_retracted_request_survives_a_flush(decoder: Decoder) -> None:
    """Guards against a flush that a retracted request prevents, which owns nothing but a copy on
    the CPU; and against that copy, which may be of other weights, entering the new tree."""
    req = bring_to(decoder, "retracted")
    decoder.abort(decoder.submitted[0].rid)
    for _ in range(2):
        step(decoder, decoder.tick_batch)
    assert holders(decoder) == [] and not decoder._nothing_waits
    assert decoder.flush_cache() and decoder.tree_cache.total_size() == 0
    decoder.drain()
    assert len(req.output_ids) == 30 and decoder.tree_cache.total_size() == 0
    check_idle(decoder)


@pytest.mark.hazard("bad-kv-in-tree", "receivers-without-prefix")
@pytest.mark.parametrize("ids", [[10, 11, 12, 13], [0]])
def test_warm_up_leaves_nothing(decoder: Decoder, ids: list[int]) -> None:
    """Guards against a warm-up or health request, whose KV is garbage, answering a prompt that
    begins with the same tokens."""
    for _ in range(2):
        decoder.submit(ids * 16, new=4, warm_up=True)
        decoder.drain()
        check_idle(decoder)
    assert decoder.tree_cache.total_size() == 0
    decoder.submit(ids * 16, new=4)
    step(decoder, decoder.tick_queues)
    assert decoder.rooms[-1].prefix_len == 0


@pytest.mark.hazard("tenants-share")
def test_namespaces_do_not_share(decoder: Decoder) -> None:
    """Guards against one tenant's KV, or one adapter's, answering another one's prompt."""
    for extra_key in (None, "a", "b"):
        for expected in (0, 80):
            decoder.submit(PROMPT, new=1, extra_key=extra_key)
            decoder.drain()
            assert decoder.rooms[-1].prefix_len == expected
    check_idle(decoder)


def test_finished_at_the_first_token(decoder: Decoder) -> None:
    """Guards against a request that ends in the prebuilt batch, before it ever decodes."""
    decoder.submit(PROMPT, new=1)
    decoder.drain()
    assert in_tree(decoder, PROMPT) == 80
    check_idle(decoder)
