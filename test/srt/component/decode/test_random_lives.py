"""Long seeded lives of a decode server: everything that can happen, in any order, checked always.

After every action: each page has exactly one owner, each lock its holder, each announced page list
tiles what the tree lacked, and each slot that anybody can read holds the KV of its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from component.decode.actions import Life
from component.decode.decoder import Decoder
from component.decode.peer import Room
from sglang.srt.disaggregation.delta.decode import prealloc_queue as prealloc_module
from sglang.srt.disaggregation.delta.decode import prefix_tree as tree_module
from sglang.srt.disaggregation.delta.decode import record, retraction
from sglang.srt.disaggregation.delta.decode.prefix_tree import DecodeRadixTree, PrefixLease

# Waiting for an arriving prefix would hide concurrent misses of one prompt; it has its own tests.
WAIT = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS"


@pytest.mark.hazard("flush-while-held")
@pytest.mark.parametrize(
    ("page", "tokens", "wait", "seed"),
    [(1, 600, "0", 1), (16, 1024, "0", 2), (64, 2048, "0", 3), (16, 640, "32", 4)],
)
def test_random_life(
    monkeypatch: pytest.MonkeyPatch, page: int, tokens: int, wait: str, seed: int
) -> None:
    """Guards against any order of arrivals, evictions, retractions, failures and aborts that leaks
    a page or a lock, frees one twice, or lets a request read another one's KV."""
    monkeypatch.setenv(WAIT, wait)
    life = Life(Decoder(page, tokens), seed)
    life.run(1500, seed)
    assert len(life.decoder.submitted) > 100
    assert all(life.seen.values()), f"this seed does not reach everything: {life.seen}"


@pytest.mark.parametrize(
    ("page", "tokens", "wait", "steps", "seed", "latent"),
    [
        (1, 600, "0", 3, 1, False),
        (2, 640, "8", 1, 2, True),
        (16, 1024, "0", 3, 3, True),
        (16, 800, "32", 1, 4, False),
    ],
)
def test_random_life_with_speculation(
    monkeypatch: pytest.MonkeyPatch,
    page: int,
    tokens: int,
    wait: str,
    steps: int,
    seed: int,
    latent: bool,
) -> None:
    """Guards against the same with a draft model beside the target: slots of both pools, answers
    that grow by several tokens a step, drafts that are rejected; in pools of heads and of MLA."""
    monkeypatch.setenv(WAIT, wait)
    life = Life(Decoder(page, tokens, steps=steps, latent=latent), seed)
    life.run(1500, seed)
    assert len(life.decoder.submitted) > 100
    # The last slot of a prompt depends on the answer, so something is always moved.
    assert life.seen.pop("full_hits") == 0
    assert all(life.seen.values()), f"this seed does not reach everything: {life.seen}"


def _stock(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.delattr(DecodeRadixTree, name)


def _everything_may_insert(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tree_module, "may_insert", lambda req: True)


def _everything_is_inserted(patch: pytest.MonkeyPatch) -> None:
    def finished(self: Any, req: Any, is_insert: bool = True) -> None:
        self.claims.left(req)
        super(DecodeRadixTree, self).cache_finished_req(req, is_insert)

    patch.setattr(DecodeRadixTree, "cache_finished_req", finished)


def _leases_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixLease, "release", lambda self: None)


def _lease_without_lock(patch: pytest.MonkeyPatch) -> None:
    def take(cls: Any, tree: Any, ids: list[int], extra_key: str | None) -> PrefixLease:
        lease = original(tree, ids, extra_key)
        tree.dec_lock_ref(lease.node)
        return lease

    original = PrefixLease.take
    patch.setattr(PrefixLease, "take", classmethod(take))


def _extra_key_is_ignored(patch: pytest.MonkeyPatch) -> None:
    original = PrefixLease.take
    patch.setattr(PrefixLease, "take", lambda tree, ids, extra_key: original(tree, ids, None))


def _resume_ignores_the_prefix(patch: pytest.MonkeyPatch) -> None:
    def restore(req: Any, slots: Any, allocator: Any, draft_pool: Any) -> None:
        whole = [list(layer) for layer in req.kv_cache_cpu]
        allocator.load_cpu_copy(whole, slots)
        del req.kv_cache_cpu

    patch.setattr(prealloc_module, "restore_private", restore)


def _warm_up_is_a_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(record, "is_fake", lambda req: False)


def _pages_are_freed_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "defer_free", lambda self: None)


def _old_kv_is_inserted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeRadixTree, "_may_insert", lambda self, req: record.may_insert(req))


def _locked_nodes_keep_their_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeRadixTree, "_rename", lambda self, node: None)


OTHER_KV, LOCKS = "hold other KV", "lock_ref"


@pytest.mark.hazard("pages-written-after-release")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("break_it", "notice"),
    [
        pytest.param(_stock("match_prefix"), LOCKS, id="the prebuilt batch matches again"),
        pytest.param(_stock("cache_unfinished_req"), OTHER_KV, id="the last token is inserted"),
        pytest.param(_everything_is_inserted, OTHER_KV, id="warm-ups are inserted at the end"),
        pytest.param(_everything_may_insert, OTHER_KV, id="KV that did not arrive is inserted"),
        pytest.param(_warm_up_is_a_request, OTHER_KV, id="warm-up requests are inserted"),
        pytest.param(_leases_are_kept, LOCKS, id="a refused request keeps its lock"),
        pytest.param(_lease_without_lock, LOCKS, id="a prefix is not locked"),
        pytest.param(_extra_key_is_ignored, OTHER_KV, id="tenants share"),
        pytest.param(_pages_are_freed_at_once, OTHER_KV, id="an abort frees pages being written"),
        pytest.param(_old_kv_is_inserted, OTHER_KV, id="KV of old weights is inserted"),
        pytest.param(_locked_nodes_keep_their_name, None, id="locked nodes are hit after a flush"),
        pytest.param(_resume_ignores_the_prefix, None, id="a resumed request is restored from 0"),
    ],
)
def test_the_check_notices(
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch], None],
    notice: str | None,
) -> None:
    """Guards against a simulation that cannot fail: with one protection taken out it does, soon,
    and for that reason."""
    monkeypatch.setenv(WAIT, "0")
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match=notice):
        for seed in range(10):
            Life(Decoder(16, 640, rows=6), seed).run(300, seed)


@pytest.mark.nightly
def test_helpers_are_what_the_code_uses() -> None:
    """Guards against a negative control that patches a name which nobody reads any more."""
    assert prealloc_module.restore_private is retraction.restore_private
    assert tree_module.may_insert is record.may_insert
