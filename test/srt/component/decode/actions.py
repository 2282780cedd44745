"""What can happen to a decode server, as steps that a seeded run and a state machine share.

Every action takes one number and derives its choices from it; it does nothing where it does not
apply. After each, everything in ``checks`` must hold.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from component.decode.peer import Room
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode.invariants import tree_nodes
from sglang.srt.disaggregation.delta.decode.prefix_tree import Retired
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.pages import page_floor
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

TOKENS = 50


class Life:
    """One decode server and its clients."""

    #: How often each action is taken in a random run.
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
        "retract": 1,
        "flush": 1,
        "update_weights": 0.2,
        "pause_and_update": 0.2,
    }

    def __init__(self, decoder: Decoder, seed: int = 0) -> None:
        self.decoder = decoder
        rng = random.Random(seed)
        limit = min(260, decoder.max_total_num_tokens // 4)
        self.bank = [
            [rng.randrange(TOKENS) for _ in range(rng.randrange(20, limit))] for _ in range(6)
        ]
        # Warm-up requests of a real server begin like these prompts.
        self.bank += [[10, 11, 12, 13] * 8, [0] * 30]
        self._bytes = STATS.totals["kv_transfer_requested_bytes"]
        #: How often the interesting cases were reached.
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
        """The usual way of things as one step: checked at its end."""
        for action in ("handshake", "queues", "deliver", "queues"):
            getattr(self, action)(2**30 - 1)
        self.step("batch", 2**30 - 1)

    def run(self, steps: int, seed: int) -> None:
        """A long life: ``steps`` actions, then everything ends."""
        rng = random.Random(seed)
        names, weights = list(self.WEIGHTS), list(self.WEIGHTS.values())
        for _ in range(steps):
            (action,) = rng.choices(names, weights)
            self.step(action, rng.getrandbits(30))
        self.end()

    def end(self) -> None:
        """Let every request end; nothing may be left."""
        self.decoder.drain()
        check_idle(self.decoder)
        admitted = [room for room in self.decoder.rooms if room.pages is not None]
        self.seen["hits"] = sum(room.prefix_len > 0 for room in admitted)
        self.seen["full_hits"] = sum(len(room.pages) == 0 for room in admitted)
        pages = sum(len(room.pages) for room in admitted)
        asked = STATS.totals["kv_transfer_requested_bytes"] - self._bytes
        assert asked == pages * sum(self.decoder.kv_manager.item_lens)

    # ---- requests come and go ----

    def arrive(self, number: int) -> None:
        if len(self.decoder.queued) >= 6:
            return
        rng = random.Random(number)
        base = rng.choice(self.bank + self.decoder.finished_texts[-6:])
        ids = base[: rng.randrange(1, len(base) + 1)]
        ids += [rng.randrange(TOKENS) for _ in range(rng.choice([0, 0, 5, 40]))]
        if rng.random() < 0.4:  # whole pages: what a full prefix hit takes
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
        retracted = len(self.decoder.disagg_decode_prealloc_queue.retracted_queue)
        self.decoder.tick_queues()
        left = len(self.decoder.disagg_decode_prealloc_queue.retracted_queue)
        self.seen["resumed"] += retracted - left

    def batch(self, number: int) -> None:
        rng = random.Random(number)
        self.decoder.tick_batch(lambda req: rng.randrange(TOKENS), lambda req: rng.randrange(8))

    def retract(self, number: int) -> None:
        self.decoder.retract()
        self.seen["retracted"] += len(self.decoder.disagg_decode_prealloc_queue.retracted_queue)

    def flush(self, number: int) -> None:
        idle = self.decoder.is_fully_idle()
        assert self.decoder.flush_cache() == idle
        assert not idle or self._nothing_can_be_hit()

    def update_weights(self, number: int) -> None:
        """At any time: SGLang lets nobody in between only if it is not paused."""
        self.seen["updates_under_way"] += not self.decoder.is_fully_idle()
        self.seen["updates_while_held"] += bool(self.decoder._deferred)
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
        self._abort(self.decoder.disagg_decode_prealloc_queue.retracted_queue, number)

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
            # Prefill says that it failed once it has stopped; a lost peer says nothing.
            room.writing = room.writing and number % 2 == 0

    @staticmethod
    def _some(items: list[Any], number: int) -> list[Any]:
        """Those that the bits of ``number`` select."""
        return [item for bit, item in enumerate(items) if number >> bit & 1]
