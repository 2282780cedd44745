"""Events of a decode server, as actions that seeded runs and a state machine share.

Every action takes one number and derives its choices from it; it does nothing if it does not apply.
After each action, everything in ``checks`` must hold.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, ClassVar

from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from component.decode.peer import Room
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode.invariants import tree_nodes
from sglang.srt.disaggregation.delta.decode.tree import Retired
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.policy.memory import page_floor
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

TOKENS = 50


def drawn(weights: dict[str, float], steps: int, seed: int) -> Iterator[tuple[str, int]]:
    """Yield ``steps`` actions, each with its number."""
    rng = random.Random(seed)
    for _ in range(steps):
        (action,) = rng.choices(list(weights), list(weights.values()))
        yield action, rng.getrandbits(30)


class Life:
    """One decode server and its clients."""

    #: Relative frequency of each action in a random run.
    WEIGHTS: ClassVar[dict[str, float]] = {
        "arrive": 24,
        "handshake": 16,
        "deliver": 24,
        "queues": 22,
        "batch": 22,
        "fail_handshake": 1,
        "fail_transfer": 2,
        "write_late": 3,
        "abort_queued": 1,
        "abort_transfer": 1,
        "abort_waiting": 1,
        "abort_running": 1,
        "abort_retracted": 1,
        "abort_local": 1,
        "retract": 1,
        "flush": 1,
        "update_weights": 0.2,
        "pause_and_update": 0.2,
    }

    def __init__(self, decoder: Decoder, seed: int = 0, **weights: float) -> None:
        """``weights``: of actions with another frequency in this life."""
        self.decoder = decoder
        self.weights = self.WEIGHTS | weights
        rng = random.Random(seed)
        limit = min(260, decoder.max_total_num_tokens // 4)
        self.bank = [
            [rng.randrange(TOKENS) for _ in range(rng.randrange(20, limit))] for _ in range(6)
        ]
        # A real server's warm-up requests begin like these prompts.
        self.bank += [[10, 11, 12, 13] * 8, [0] * 30]
        self._bytes = STATS.totals["kv_transfer_requested_bytes",]
        #: Number of times that the interesting cases were reached.
        self.seen = dict.fromkeys(
            (
                "hits",
                "full_hits",
                "retracted",
                "resumed",
                "pool_full",
                "late_writes",
                "updates_under_way",
                "updates_while_held",
            ),
            0,
        )

    def step(self, action: str, number: int) -> None:
        """Take one action, and check everything."""
        getattr(self, action)(number)
        check(self.decoder)
        free = self.decoder.token_to_kv_pool_allocator.available_size()
        self.seen["pool_full"] += free < self.decoder.page_size

    def serve(self) -> None:
        """Serve one normal turn as one step, checked at its end."""
        for action in ("handshake", "queues", "deliver", "queues"):
            getattr(self, action)(2**30 - 1)
        self.step("batch", 2**30 - 1)

    def run(self, steps: int, seed: int) -> None:
        """Run a long life: ``steps`` actions, then let everything end."""
        for action, number in drawn(self.weights, steps, seed):
            self.step(action, number)
        self.end()

    def end(self) -> None:
        """Let every request end, and check that nothing is left."""
        self.decoder.drain()
        check_idle(self.decoder)
        admitted = [room for room in self.decoder.rooms if room.pages is not None]
        self.seen["hits"] = sum(room.prefix_len > 0 for room in admitted)
        self.seen["full_hits"] = sum(len(room.pages) == 0 for room in admitted)
        pages = sum(len(room.pages) for room in admitted)
        asked = STATS.totals["kv_transfer_requested_bytes",] - self._bytes
        manager = self.decoder.kv_manager
        states = sum(len(room.state_pages) for room in admitted if room.state_pages is not None)
        assert asked == pages * sum(manager.item_lens) + states * sum(manager.state_lens)

    # ---- requests come and go ----

    def arrive(self, number: int) -> None:
        if len(self.decoder.queued) >= 6:
            return
        rng = random.Random(number)
        base = rng.choice(self.bank + self.decoder.finished_texts[-6:])
        ids = base[: rng.randrange(1, len(base) + 1)]
        ids += [rng.randrange(TOKENS) for _ in range(rng.choice([0, 0, 5, 40]))]
        if rng.random() < 0.4:  # whole pages, as a full prefix hit needs them
            ids = ids[: max(1, page_floor(len(ids), self.decoder.page_size))]
        self.decoder.submit(
            ids[: self.decoder.max_total_num_tokens // 3],
            new=rng.choice([1, 2, 8, 30]),
            extra_key=rng.choice([None, None, None, "tenant"]),
            warm_up=rng.random() < 0.06,
            ready=rng.random() < 0.5,
        )

    def handshake(self, number: int) -> None:
        for room in self._rooms(KVPoll.Bootstrapping):
            room.state = KVPoll.WaitingForInput

    def fail_handshake(self, number: int) -> None:
        self._fail(KVPoll.Bootstrapping, number)

    def deliver(self, number: int) -> None:
        for req in self._some(self.decoder.in_transfer, number):
            self.decoder.deliver(req, first_token=number % TOKENS)

    def fail_transfer(self, number: int) -> None:
        self._fail(KVPoll.Transferring, number)

    def write_late(self, number: int) -> None:
        rooms = [room for room in self.decoder.rooms if room.writing and room.cleared]
        self.seen["late_writes"] += len(rooms[:1])
        if rooms:
            self.decoder.write_late(rooms[number % len(rooms)])

    # ---- the scheduler ----

    def queues(self, number: int) -> None:
        retracted = len(self.decoder.retracted)
        self.decoder.tick_queues()
        self.seen["resumed"] += retracted - len(self.decoder.retracted)

    def batch(self, number: int) -> None:
        rng = random.Random(number)
        self.decoder.tick_batch(lambda req: rng.randrange(TOKENS), lambda req: rng.randrange(8))

    def retract(self, number: int) -> None:
        self.decoder.retract()
        self.seen["retracted"] += len(self.decoder.retracted)

    def flush(self, number: int) -> None:
        idle = self.decoder.is_fully_idle()
        assert self.decoder.flush_cache_wrapped(FlushCacheReqInput()).success == idle
        assert not idle or self._nothing_can_be_hit()

    def update_weights(self, number: int) -> None:
        """Update weights at any time, whether the server is paused or not."""
        self.seen["updates_under_way"] += not self.decoder.is_fully_idle()
        self.seen["updates_while_held"] += bool(self.decoder.held)
        self.decoder.update_weights()
        assert self._nothing_can_be_hit()

    def pause_and_update(self, number: int) -> None:
        self.decoder.pause_generation(PauseGenerationReqInput(mode="retract"))
        self.update_weights(number)
        self.decoder.continue_generation(ContinueGenerationReqInput())

    def _nothing_can_be_hit(self) -> bool:
        tree = self.decoder.tree_cache
        return all(isinstance(node.key.extra_key, Retired) for node in tree_nodes(tree))

    # ---- clients go away ----

    def abort_queued(self, number: int) -> None:
        self._abort(self.decoder.queued, number)

    def abort_transfer(self, number: int) -> None:
        self._abort(self.decoder.in_transfer, number)

    def abort_waiting(self, number: int) -> None:
        self._abort(self.decoder.waiting_queue, number)

    def abort_running(self, number: int) -> None:
        self._abort(self.decoder.running_batch.reqs, number)

    def abort_retracted(self, number: int) -> None:
        self._abort(self.decoder.retracted, number)

    def abort_local(self, number: int) -> None:
        self._abort(self.decoder.local, number)

    # ---- helpers ----

    def _abort(self, reqs: list[Any], number: int) -> None:
        if reqs:
            self.decoder.abort(reqs[number % len(reqs)].rid)

    def _rooms(self, state: int) -> list[Room]:
        decoder = self.decoder
        rooms = [decoder.room(req) for req in [*decoder.queued, *decoder.in_transfer]]
        return [room for room in rooms if isinstance(room, Room) and room.state == state]

    def _fail(self, state: int, number: int) -> None:
        rooms = self._rooms(state)
        if rooms:
            room = rooms[number % len(rooms)]
            room.state = KVPoll.Failed
            # Prefill reports a failure once it has stopped; a lost peer reports nothing.
            room.writing = room.writing and number % 2 == 0

    @staticmethod
    def _some(items: list[Any], number: int) -> list[Any]:
        """Return the items that the bits of ``number`` select."""
        return [item for bit, item in enumerate(items) if number >> bit & 1]


class RankLife(Life):
    """The life of one rank of two: one of them may see an event later than the other or never.

    Every action is taken on both ranks, with possibly different effects."""

    WEIGHTS: ClassVar[dict[str, float]] = Life.WEIGHTS | {
        "fail_on_one_rank": 2,
        "late_metadata": 4,
        "skew": 2,
        "evict_one": 2,
        "pass_time": 4,
    }

    def __init__(self, decoder: Decoder, rank: int, seed: int = 0, **weights: float) -> None:
        super().__init__(decoder, seed, **weights)
        self.rank = rank
        mine = ("trees_differed", "queued_failed", "transfer_failed", "late_metadata", "skewed")
        self.seen |= dict.fromkeys((*mine, "expired"), 0)

    def _mine(self, number: int) -> bool:
        """Return True if this rank sees the event."""
        return number >> 20 & 1 == self.rank

    def deliver(self, number: int) -> None:
        # One rank's KV arrives earlier than the other's.
        super().deliver(number >> 7 if self.rank else number)

    def late_metadata(self, number: int) -> None:
        """Complete the KV on both ranks, but the metadata on only one."""
        for req in self._some(self.decoder.in_transfer, number):
            self.decoder.deliver(req, first_token=number % 50, metadata=self._mine(number))
            self.seen["late_metadata"] += not self._mine(number)

    def fail_handshake(self, number: int) -> None:
        if self._mine(number):
            super().fail_handshake(number)

    def fail_transfer(self, number: int) -> None:
        if self._mine(number):
            super().fail_transfer(number)

    def fail_on_one_rank(self, number: int) -> None:
        """Fail a heartbeat: any room, in any stage, on one rank."""
        decoder = self.decoder
        reqs = [*decoder.queued, *decoder.in_transfer]
        if not reqs or not self._mine(number):
            return
        req = reqs[number % len(reqs)]
        room = decoder.room(req)
        if isinstance(room, Room):
            room.state = KVPoll.Failed
            self.seen["queued_failed" if req in decoder.queued else "transfer_failed"] += 1

    def pass_time(self, number: int) -> None:
        self.decoder.now += number % 8

    def skew(self, number: int) -> None:
        """Let this rank's clock jump ahead of the other's."""
        if self._mine(number):
            self.decoder.now += number % 70
            self.seen["skewed"] += 1

    def queues(self, number: int) -> None:
        before = self.decoder.mailbox.expired
        super().queues(number)
        self.seen["expired"] += self.decoder.mailbox.expired - before

    def evict_one(self, number: int) -> None:
        """Evict something from this rank's tree only."""
        if self._mine(number):
            self.decoder.tree_cache.evict(EvictParams(num_tokens=number % 200))
