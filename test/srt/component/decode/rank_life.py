"""The life of one rank of two: what one of them sees, the other may see later or not at all."""

from __future__ import annotations

from typing import ClassVar

from component.decode.actions import Life
from component.decode.decoder import Decoder
from component.decode.peer import Room
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.mem_cache.base_prefix_cache import EvictParams


class RankLife(Life):
    """Every action is taken on both ranks; what it does may differ."""

    WEIGHTS: ClassVar[dict[str, float]] = Life.WEIGHTS | {
        "fail_on_one_rank": 2,
        "late_metadata": 4,
        "skew": 2,
        "evict_one": 2,
        "pass_time": 4,
    }

    def __init__(self, decoder: Decoder, rank: int, seed: int = 0) -> None:
        super().__init__(decoder, seed)
        self.rank = rank
        self.time = 1000.0
        self.seen |= dict.fromkeys(
            ("trees_differed", "queued_failed", "transfer_failed", "late_metadata", "skewed"), 0
        )
        self.seen["expired"] = 0
        decoder.disagg_decode_prealloc_queue.clock = lambda: self.time

    def _mine(self, number: int) -> bool:
        """Whether it is this rank that sees it."""
        return number >> 20 & 1 == self.rank

    def deliver(self, number: int) -> None:
        # One rank's KV lands earlier than the other's.
        super().deliver(number >> 7 if self.rank else number)

    def late_metadata(self, number: int) -> None:
        """KV is complete on both ranks, the metadata on one of them only."""
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
        """A heartbeat that failed: any room, in any stage, on one rank."""
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
        self.time += number % 8

    def skew(self, number: int) -> None:
        """This rank's clock jumps ahead; later the other one's will."""
        if self._mine(number):
            self.time += number % 70
            self.seen["skewed"] += 1

    def queues(self, number: int) -> None:
        before = self.decoder.mailbox.expired
        super().queues(number)
        self.seen["expired"] += self.decoder.mailbox.expired - before

    def evict_one(self, number: int) -> None:
        """Only this rank's tree forgets something."""
        if self._mine(number):
            self.decoder.tree_cache.evict(EvictParams(num_tokens=number % 200))
