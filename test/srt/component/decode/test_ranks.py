"""Two ranks of one decode server: they see different things, their decisions never differ."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from component.decode.actions import Life
from component.decode.checks import check_idle
from component.decode.decoder import Decoder
from component.decode.pair import Diverged, Pair, RankGroup, ranks_reduce
from component.decode.rank_life import RankLife
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.delta import rank_agreement
from sglang.srt.disaggregation.delta.decode import candidates

WAIT_TOKENS = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS"
TIMEOUT = "SGLANG_DISAGGREGATION_DECODE_ADMISSION_TIMEOUT"


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short deadlines, so that they are met in a life."""
    monkeypatch.setenv(WAIT_TOKENS, "0")
    monkeypatch.setenv(TIMEOUT, "60")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TIMEOUT", "20")
    with ranks_reduce():
        yield


def live(seed: int, steps: int, *, gloo: bool = False, without: tuple[str, ...] = ()) -> list[Any]:
    """Both ranks through ``steps`` random actions, to the end; their lives."""

    def build(rank: int, group: RankGroup) -> RankLife:
        policy = ("lru", "mru")[rank]
        return RankLife(Decoder(16, 640, policy=policy, group=group), rank, seed)

    pair = Pair(build, gloo=gloo)
    rng = random.Random(seed)
    weights = {name: weight for name, weight in RankLife.WEIGHTS.items() if name not in without}
    try:
        for _ in range(steps):
            (action,) = rng.choices(list(weights), list(weights.values()))
            number = rng.getrandbits(30)
            pair.run(lambda life, name=action, bits=number: life.step(name, bits))
            ours, theirs = pair.sides
            sizes = {life.decoder.tree_cache.total_size() for life in pair.sides}
            ours.seen["trees_differed"] += len(sizes) == 2
            # Resuming, handshakes, admission, transfers: at most one each.
            assert len(pair.collectives()) <= (4 if action == "queues" else 0)
        pair.run(lambda life: life.decoder.drain())
        pair.run(lambda life: check_idle(life.decoder))
        return pair.sides
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("wait", "seed", "gloo"),
    [
        pytest.param("0", 5, True, id="gloo"),
        pytest.param("32", 2, False, id="threads, prefixes waited for"),
        pytest.param("0", 5, False, id="threads", marks=pytest.mark.nightly),
        pytest.param("32", 2, True, id="gloo, prefixes waited for", marks=pytest.mark.nightly),
    ],
)
def test_ranks_stay_in_step(
    monkeypatch: pytest.MonkeyPatch, wait: str, seed: int, gloo: bool
) -> None:
    """Guards against ranks that match different prefixes, admit or answer different requests, or
    commit a transfer at different steps: prefill would write into wrong offsets, and the next
    collective would hang the server. Rooms fail, metadata land and deadlines pass on one rank
    before the other, and each rank's tree evicts other prefixes. Where prefixes are waited for, a
    step checks less than the line."""
    monkeypatch.setenv(WAIT_TOKENS, wait)
    if wait != "0":
        monkeypatch.setattr(candidates, "CHECKED", 2)
    lives = live(seed, 1000, gloo=gloo)
    assert lives[0].seen["trees_differed"] > 5, "the trees were equal: this shows nothing"
    for what in ("queued_failed", "transfer_failed", "late_metadata", "skewed", "expired"):
        assert any(life.seen[what] for life in lives), f"this seed does not reach {what}"


EVENTS = ("fail_on_one_rank", "skew", "late_metadata", "evict_one")


@pytest.mark.hazard("ranks-disagree-on-prefix")
@pytest.mark.nightly
@pytest.mark.parametrize("cause", ["evict_one", "fail_on_one_rank", "skew"])
def test_without_agreement_they_diverge(monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    """Guards against a pair of ranks that would agree in any case: with admission's reduction
    replaced by the rank's own values, each cause alone makes them part."""
    monkeypatch.setattr(rank_agreement, "minimum", lambda values, group: values)
    with pytest.raises(Diverged):
        for seed in range(5):
            live(seed, 1000, without=tuple(event for event in EVENTS if event != cause))


@pytest.mark.nightly
@pytest.mark.parametrize("cause", ["fail_on_one_rank", "late_metadata"])
def test_without_a_common_poll_they_diverge(monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    """Guards against the same of transfers: each rank's own polls make the ranks part."""

    def own(pollers: Any, group: Any) -> list[int]:
        return [int(poller.poll()) for poller in pollers]

    monkeypatch.setattr(utils, "poll_and_all_reduce", own)
    with pytest.raises(Diverged):
        for seed in range(5):
            live(seed, 1000, without=tuple(event for event in EVENTS if event != cause))


def test_every_action_of_a_life_is_one_of_the_ranks() -> None:
    """Guards against an action that only single ranks are tested with."""
    assert set(Life.WEIGHTS) <= set(RankLife.WEIGHTS)
