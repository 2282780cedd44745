"""Long seeded lives of a decode server: all events, in any order, with checks after each.

After every action: each page has exactly one owner, each lock its holder, each announced page list
covers exactly the tokens that the tree lacked, and each readable slot holds the KV of its tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from component.decode.actions import Life, RankLife, drawn
from component.decode.checks import check_idle
from component.decode.decoder import Decoder
from component.decode.pair import Diverged, Pair, RankGroup, ranks_reduce
from component.decode.peer import Room
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.delta import rank_agreement
from sglang.srt.disaggregation.delta.decode import admission, request
from sglang.srt.disaggregation.delta.decode import queue as queue_module
from sglang.srt.disaggregation.delta.decode.tree import DecodeRadixTree, PrefixLease
from sglang.srt.disaggregation.policy.pace import Limits

EVERYTHING = ("hits", "full_hits", "retracted", "resumed", "pool_full", "late_writes")
EVERYTHING += ("updates_under_way",)
#: With a draft model, a prompt's last slot depends on the answer, so some pages are always moved.
WITH_DRAFTS = tuple(name for name in EVERYTHING if name != "full_hits")
#: Side and reason of turns: on a server that computes some itself, and on one that often loses its
#: prefill servers.
HERE, LOST = ("local short", "remote long"), ("local transfer_failed", "local no_prefill")
COMPUTES: dict[str, Any] = {"local": 60, "chunk": 24}
LOSES: dict[str, Any] = {"local": 20, "lost": 60, "chunk": 24}
OFTEN_LOST: dict[str, float] = {
    "batch": 40, "fail_handshake": 6, "fail_transfer": 10, "write_late": 6
}  # fmt: skip
INDEX: dict[str, Any] = {"sparse": True}
NIGHTLY = pytest.mark.nightly


def life(
    name: str,
    page: int,
    tokens: int,
    seed: int,
    reaches: tuple[str, ...],
    often: dict[str, float] | None = None,
    marks: Any = (),
    **options: Any,
) -> Any:
    """Return a long life; ``reaches``: cases that must occur; ``often``: weights of actions."""
    row = (page, tokens, seed, reaches, often or {}, options)
    return pytest.param(*row, id=f"{name} {seed}", marks=marks)


@pytest.mark.hazard("flush-while-held")
@pytest.mark.parametrize(
    ("page", "tokens", "seed", "reaches", "often", "options"),
    [
        life("plain", 1, 600, 1, (*EVERYTHING, "updates_while_held")),
        life("plain", 16, 1024, 2, EVERYTHING),
        life("plain", 64, 2048, 3, EVERYTHING),
        life("plain", 16, 640, 4, EVERYTHING),
        life("drafts", 1, 600, 1, WITH_DRAFTS, steps=3),
        life("drafts", 2, 640, 2, WITH_DRAFTS, steps=1, latent=True),
        life("drafts", 16, 1024, 3, WITH_DRAFTS, steps=3, latent=True),
        life("drafts", 16, 800, 4, WITH_DRAFTS, steps=1),
        life("index", 64, 1536, 1, ("hits", "full_hits", "resumed"), marks=NIGHTLY, **INDEX),
        life("index", 64, 1536, 2, ("hits", "full_hits", "resumed"), **INDEX),
        life("states", 1, 600, 1, EVERYTHING, states=12),
        life("states", 16, 1024, 2, EVERYTHING, states=5),
        life("computed here, index", 64, 2048, 3, ("local short",), local=60, chunk=64, **INDEX),
        life("computed here", 1, 600, 1, HERE, often={"batch": 44}, **COMPUTES),
        life("computed here", 16, 1024, 2, HERE, often={"batch": 44}, **COMPUTES),
        life("computed here", 64, 2048, 3, HERE, often={"batch": 44}, **COMPUTES),
        life("computed here, drafts", 1, 600, 4, HERE, steps=3, often={"batch": 44}, **COMPUTES),
        life("computed here, drafts", 16, 1024, 5, HERE, steps=1, often={"batch": 44}, **COMPUTES),
        life("prefill lost", 1, 600, 1, LOST, often=OFTEN_LOST, **LOSES),
        life("prefill lost", 16, 1024, 2, LOST, often=OFTEN_LOST, **LOSES),
        life("prefill lost", 64, 2048, 3, LOST, often=OFTEN_LOST, **LOSES),
    ],
)
def test_random_life(
    page: int,
    tokens: int,
    seed: int,
    reaches: tuple[str, ...],
    often: dict[str, float],
    options: dict[str, Any],
) -> None:
    """Guards against any order of arrivals, chunks, evictions, retractions, failures and aborts
    that leaks a page or a lock, frees one twice, or lets a request read another one's KV."""
    life = Life(Decoder(page, tokens, **options), seed, **often)
    life.run(1200, seed)
    assert len(life.decoder.submitted) > 100
    reached: Counter[str] = Counter(life.seen)
    if life.decoder.local_turns is not None:
        turns = life.decoder.local_turns.telemetry.by("decode_turns")
        reached.update({f"{where} {reason}": count for (where, reason), count in turns.items()})
    assert all(reached[what] > 0 for what in reaches), f"not all is reached: {reached}"


# ---- two ranks ----


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set short deadlines, so that a life meets them."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_ADMISSION_TIMEOUT", "60")
    with ranks_reduce():
        yield


def live(
    seed: int,
    steps: int = 500,
    *,
    gloo: bool = False,
    limits: Limits | None = None,
    draft_steps: int = 0,
    states: int = 0,
    **weights: float,
) -> list[Any]:
    """Run both ranks through ``steps`` random actions to the end; return their lives. ``limits``:
    of the turns that they compute, with separate clocks; ``states``: of the ``Decoder``."""

    def build(rank: int, group: RankGroup) -> RankLife:
        def clock() -> float:  # one rank is slower than the other
            return time.monotonic() * (1 + 2 * rank)

        policy = ("lru", "mru")[rank]
        more = {"limits": limits, "costs": None, "clock": clock, "states": states}
        decoder = Decoder(16, 640, policy=policy, group=group, steps=draft_steps, **more)
        return RankLife(decoder, rank, seed, **weights)

    pair = Pair(build, gloo=gloo)
    ours, theirs = pair.sides
    try:
        for action, number in drawn(ours.weights, steps, seed):
            pair.run(lambda life, name=action, bits=number: life.step(name, bits))
            sizes = {life.decoder.tree_cache.total_size() for life in pair.sides}
            ours.seen["trees_differed"] += len(sizes) == 2
            # Resuming, handshakes, admission, transfers: at most one each.
            assert len(pair.collectives()) <= (4 if action == "queues" else 0)
        pair.run(lambda life: life.decoder.drain())
        pair.run(lambda life: check_idle(life.decoder))
        return pair.sides
    finally:
        pair.close()


@pytest.mark.hazard("ranks-commit-apart")
@pytest.mark.parametrize(
    ("checked", "seed", "gloo"),
    [
        pytest.param(128, 5, True, id="gloo"),
        pytest.param(2, 2, False, id="threads, a part of the line a step"),
        pytest.param(128, 5, False, id="threads", marks=NIGHTLY),
        pytest.param(2, 2, True, id="gloo, a part of the line a step", marks=NIGHTLY),
    ],
)
def test_ranks_stay_in_step(
    monkeypatch: pytest.MonkeyPatch, two_ranks: None, checked: int, seed: int, gloo: bool
) -> None:
    """Guards against ranks that match different prefixes, admit or answer different requests, or
    commit a transfer at different steps: prefill would write at wrong offsets, and the next
    collective would hang the server. Rooms fail, metadata arrive and deadlines pass on one rank
    before the other, and each rank's tree evicts other prefixes."""
    monkeypatch.setattr(admission, "MAX_CHECKED", checked)
    lives = live(seed, 1000, gloo=gloo)
    assert lives[0].seen["trees_differed"] > 5, "the trees were equal, so the test shows nothing"
    for what in ("queued_failed", "transfer_failed", "late_metadata", "skewed", "expired"):
        assert any(life.seen[what] for life in lives), f"this seed does not reach {what}"


def test_ranks_with_recurrent_state(two_ranks: None) -> None:
    """Guards against ranks of which only one has a free state slot: it would admit a request that
    the other keeps queued."""
    lives = live(1, 400, states=4, retract=3)
    assert lives[0].seen["resumed"] and any(life.seen["transfer_failed"] for life in lives)
    ours, theirs = (life.decoder.telemetry.by("decode_admission_refused") for life in lives)
    assert ours == theirs and ours["no_state_slot",]


@pytest.mark.parametrize(("seed", "draft_steps"), [(1, 0), (2, 0), (3, 3)])
def test_ranks_that_measure(two_ranks: None, seed: int, draft_steps: int) -> None:
    """Guards against ranks that choose by their own measurements, and then run other batches."""
    limits = Limits(tokens=60, chunk=24, share=0.3)
    sides = live(seed, limits=limits, draft_steps=draft_steps, batch=44)
    ours, theirs = (life.decoder.local_turns for life in sides)
    assert ours.telemetry.by("decode_turns") == theirs.telemetry.by("decode_turns")
    assert {where for where, _ in ours.telemetry.by("decode_turns")} == {"local", "remote"}
    assert ours.measured.votes() != theirs.measured.votes(), "they measured the same"


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_that_lose_prefill(two_ranks: None, seed: int) -> None:
    """Guards against ranks of which one saves a request that the other fails, because one learns of
    the loss before the other does."""
    limits = Limits(tokens=20, chunk=24, when_lost=60)
    sides = live(seed, limits=limits, batch=40, fail_handshake=4, fail_transfer=6)
    ours, theirs = (life.decoder.local_turns.telemetry.by("decode_turns") for life in sides)
    assert ours == theirs and ours["local", "transfer_failed"] > 0


# ---- controls: each fails with one protection removed ----

EVENTS = ("fail_on_one_rank", "skew", "late_metadata", "evict_one")


def _own_values(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rank_agreement, "minimum", lambda values, group: values)


def _own_polls(patch: pytest.MonkeyPatch) -> None:
    def own(pollers: Any, group: Any) -> list[int]:
        return [int(poller.poll()) for poller in pollers]

    patch.setattr(utils, "poll_and_all_reduce", own)


@pytest.mark.hazard("ranks-disagree-on-prefix")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("break_it", "cause"),
    [
        (_own_values, "evict_one"),
        (_own_values, "fail_on_one_rank"),
        (_own_values, "skew"),
        (_own_polls, "fail_on_one_rank"),
        (_own_polls, "late_metadata"),
    ],
)
def test_without_agreement_they_diverge(
    monkeypatch: pytest.MonkeyPatch,
    two_ranks: None,
    break_it: Callable[[pytest.MonkeyPatch], None],
    cause: str,
) -> None:
    """Guards against a pair of ranks that would agree in any case: if admission's reduction, or
    that of transfers, is replaced by the rank's own values, each cause alone makes them diverge."""
    break_it(monkeypatch)
    with pytest.raises(Diverged):
        for seed in range(5):
            live(seed, 1000, **{event: 0 for event in EVENTS if event != cause})


def _stock(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.delattr(DecodeRadixTree, name)


def _everything_may_insert(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        DecodeRadixTree,
        "_may_insert",
        lambda self, req: request.record_of(req).generation == self.generation,
    )


def _everything_is_inserted(patch: pytest.MonkeyPatch) -> None:
    def finished(self: Any, req: Any, is_insert: bool = True) -> None:
        self.claims.left(req)
        retracts = hasattr(req, "kv_cache_cpu")
        request.record_of(req).enter(request.Stage.RETRACTED if retracts else request.Stage.ENDED)
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
    def restore(req: Any, slots: Any, allocator: Any, rows: Any, draft_pool: Any) -> None:
        whole = [list(layer) for layer in req.kv_cache_cpu]
        allocator.load_cpu_copy(whole, slots)
        del req.kv_cache_cpu

    patch.setattr(queue_module, "restore_private", restore)


def _warm_up_is_a_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "is_fake", lambda req: False)


def _pages_are_freed_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "defer_free", lambda self: None)


def _old_kv_is_inserted(patch: pytest.MonkeyPatch) -> None:
    arrived = request.Stage.COMMITTED, request.Stage.RUNNING
    patch.setattr(
        DecodeRadixTree,
        "_may_insert",
        lambda self, req: request.may_match(req) and request.record_of(req).stage in arrived,
    )


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
    """Guards against a simulation that cannot fail: with one protection removed it fails, soon, and
    for that reason."""
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match=notice):
        for seed in range(10):
            Life(Decoder(16, 640, rows=6), seed).run(300, seed)


@pytest.mark.nightly
def test_helpers_are_what_the_code_uses() -> None:
    """Guards against a negative control that patches an unused name."""
    assert queue_module.restore_private is request.restore_private
