"""Two ranks of one decode server: their trees evict differently, their decisions never differ.

Each rank is a thread with its own pool, tree and queues; they share a real gloo group. After every
action both say what they see.
"""

from __future__ import annotations

import datetime
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from component.decode_radix.actions import Life
from component.decode_radix.checks import check_idle
from component.decode_radix.decoder import Decoder
from component.decode_radix.peer import Room
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode_radix import agreement

POLICIES = ("lru", "mru")
WAIT_TOKENS = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS"


class Diverged(AssertionError):
    """The ranks no longer agree."""


class RankLife(Life):
    """The life of one rank; transfers end at different times on the two."""

    WEIGHTS = Life.WEIGHTS | {"fail_handshake": 0, "fail_transfer": 0, "fail_on_one_rank": 2}

    def __init__(self, decoder: Decoder, rank: int, seed: int) -> None:
        super().__init__(decoder, seed)
        self.rank = rank

    def deliver(self, number: int) -> None:
        # One rank's KV lands earlier than the other's.
        super().deliver(number >> 7 if self.rank else number)

    def fail_on_one_rank(self, number: int) -> None:
        reqs = self.decoder.in_transfer
        if reqs and number >> 20 & 1 == self.rank:
            room = self.decoder.room(reqs[number % len(reqs)])
            if isinstance(room, Room):
                room.state = KVPoll.Failed

    def view(self) -> tuple[Any, ...]:
        """What has to be equal on all ranks."""
        decoder = self.decoder
        allocator, tree = decoder.token_to_kv_pool_allocator, decoder.tree_cache
        return (
            allocator.available_size() + tree.evictable_size(),
            tree.protected_size(),
            tree.inserts,
            [(req.rid, req.cache_protected_len) for req in decoder.in_transfer],
            [req.rid for req in decoder.queued],
            [req.rid for req in decoder.waiting_queue],
            [(req.rid, len(req.output_ids)) for req in decoder.running_batch.reqs],
            [req.rid for req in decoder.disagg_decode_prealloc_queue.retracted_queue],
        )


class Pair:
    """Runs both ranks in step."""

    def __init__(self, seed: int, timeout_s: float) -> None:
        self.seed = seed
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self.store = dist.HashStore()
        self.views: list[Any] = [None, None]
        self.barrier = threading.Barrier(2, timeout=timeout_s)
        #: How often one rank held more of a prompt than the other.
        self.trees_differed = 0

    def run(self, steps: int) -> None:
        """Run both to the end; raise what the first one raised."""
        with ThreadPoolExecutor(2) as executor:
            futures = [executor.submit(self._rank, rank, steps) for rank in (0, 1)]
        self._raise_first(futures)

    @staticmethod
    def _raise_first(futures: list[Future[None]]) -> None:
        errors = [error for future in futures if (error := future.exception())]
        # A broken barrier is what the other rank sees.
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error

    def _rank(self, rank: int, steps: int) -> None:
        try:
            group = dist.ProcessGroupGloo(self.store, rank, 2, self.timeout)
            life = RankLife(Decoder(16, 640, policy=POLICIES[rank], group=group), rank, self.seed)
            rng = random.Random(self.seed)
            names, weights = list(life.WEIGHTS), list(life.WEIGHTS.values())
            for _ in range(steps):
                (action,) = rng.choices(names, weights)
                life.step(action, rng.getrandbits(30))
                self._compare(rank, life)
            life.decoder.drain()
            check_idle(life.decoder)
        except BaseException:
            self.barrier.abort()
            raise

    def _compare(self, rank: int, life: RankLife) -> None:
        self.views[rank] = (life.view(), life.decoder.tree_cache.total_size())
        self.barrier.wait()
        (ours, size), (theirs, other_size) = self.views
        self.trees_differed += rank == 0 and size != other_size
        if ours != theirs:
            raise Diverged(f"rank 0: {ours}\nrank 1: {theirs}")
        self.barrier.wait()


@pytest.mark.parametrize(("wait", "seed"), [("0", 1), ("32", 2)])
def test_ranks_stay_in_step(monkeypatch: pytest.MonkeyPatch, wait: str, seed: int) -> None:
    """Guards against ranks that match different prefixes, admit different requests, or commit a
    transfer at different steps: prefill would write into wrong offsets, and the next collective
    would hang the server."""
    monkeypatch.setenv(WAIT_TOKENS, wait)
    pair = Pair(seed, timeout_s=100)
    pair.run(800)
    assert pair.trees_differed > 5, "the trees were equal all the time: this shows nothing"


def test_without_agreement_they_diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a pair of ranks that would agree in any case."""
    monkeypatch.setenv(WAIT_TOKENS, "0")
    monkeypatch.setattr(agreement, "minimum", lambda values, group: values)
    with pytest.raises(Diverged):
        Pair(1, timeout_s=30).run(800)
