"""Random sequences of events in long lives, with all checks after each event."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.ranks import Ranks
from effort import tries

#: Prompts that share prefixes in several ways; some have more pages than the smallest stage.
TRUNKS = [prompt(1, 5), prompt(2, 12)]
BANK = [
    *TRUNKS,
    *(prompt(10 + n, n, base=TRUNKS[n % 2]) for n in range(1, 5)),
    *(prompt(20 + n, n, base=TRUNKS[n % 2][: 3 * PAGE]) for n in range(1, 5)),
]
METHODS = ("batch_exists", "batch_get_v1", "batch_set_v1")

#: Every event, with its relative frequency.
WEIGHTS = {
    "arrive": 8, "admit": 12, "abort": 2, "retract": 1, "reorder": 2, "compute": 4, "evict": 4,
    "split": 3, "step": 6, "live": 14, "work": 8, "slow": 2, "fast": 4, "fail": 2, "partly": 2,
    "lose": 1, "hang": 0.5, "open_gates": 1, "time": 2, "flush": 1, "clear": 0.3,
}  # fmt: skip


class Life:
    """One server of ``ranks`` ranks. An event's details are drawn from its number."""

    def __init__(self, ranks: int, seed: int) -> None:
        rng = random.Random(seed)
        self.ranks = Ranks(
            ranks,
            pages=rng.randint(2, 20),
            tokens=rng.randint(14, 40) * PAGE,
            batch_pages=rng.choice((2, 100)),
        )
        self.requests: dict[str, tuple[list[int], str | None]] = {}
        #: Events that really happened, as counts.
        self.taken: Counter[str] = Counter()
        self._count = 0

    def take(self, event: str, number: int) -> None:
        """Carry out one event."""
        rng = random.Random(number)
        if event in ("admit", "abort", "retract") and not self.requests:
            return
        getattr(self, f"_{event}")(rng)
        self.ranks.check()
        self.taken[event] += 1
        self.taken["stranded"] += self.ranks.caches[0].stage.stranded > 0

    def finish(self) -> None:
        """Let every request end, and check that the caches are idle."""
        for cache in self.ranks.caches:
            cache.slow = False
            cache.open_gates()
        for _ in range(100):
            self._live_once()
            for cache in self.ranks.caches:
                cache.now += 0.2 if self.requests else 30.0
            for rid in list(self.requests):
                self._try(rid)
            held = self.ranks.caches[0].stage.used()
            if not (self.requests or held or self.ranks.caches[0].buffer.busy):
                break
        assert not self.requests, "a request was never admitted"
        self.ranks.end()

    # ---- requests ----

    def _arrive(self, rng: random.Random) -> None:
        self._count += 1
        rid = f"r{self._count}"
        tokens, extra_key = self.requests[rid] = request(rng)
        self.ranks.on_all(lambda cache: cache.want(rid, tokens, extra_key))

    def _admit(self, rng: random.Random) -> None:
        self._try(self._pick(rng))

    def _try(self, rid: str) -> None:
        """Check a request, and run it if it is ready."""
        if self.ranks.on_all(lambda cache: cache.tree.check_prefetch_progress(rid)):
            tokens, extra_key = self.requests[rid]
            if self.ranks.on_all(lambda cache: run(cache, tokens, extra_key, rid)) < 0:
                self.taken["no room"] += 1
                if len(tokens) >= self.ranks.caches[0].device.size:
                    self._abort_one(rid)
                return
            del self.requests[rid]
            self.taken["from store"] += (
                self.ranks.on_all(lambda c: c.tree.take_storage_hit(rid)) > 0
            )
            self.taken["admitted"] += 1

    def _abort(self, rng: random.Random) -> None:
        self._abort_one(self._pick(rng))

    def _abort_one(self, rid: str) -> None:
        del self.requests[rid]
        self.ranks.on_all(lambda cache: cache.tree.release_aborted_request(rid))

    def _reorder(self, rng: random.Random) -> None:
        """Change the order of the queue."""
        rids = list(self.requests)
        rng.shuffle(rids)
        self.requests = {rid: self.requests[rid] for rid in rids}
        self.ranks.on_all(lambda cache: cache.buffer.prefetches.in_line(rids))

    def _retract(self, rng: random.Random) -> None:
        """Send a prefetch for the same request again."""
        rid = self._pick(rng)
        self.ranks.on_all(lambda cache: cache.want(rid, *self.requests[rid]))

    def _compute(self, rng: random.Random) -> None:
        """Run a request without a prefetch."""
        tokens, extra_key = request(rng)
        self.ranks.on_all(lambda cache: run(cache, tokens, extra_key))

    # ---- the tree ----

    def _evict(self, rng: random.Random) -> None:
        pages = rng.randint(1, 12)
        self.ranks.on_all(lambda cache: cache.evict(pages * PAGE))

    def _split(self, rng: random.Random) -> None:
        (tokens, extra_key), pages = request(rng), rng.randint(1, 12)
        self.ranks.on_all(lambda cache: cache.held_tokens(tokens[: pages * PAGE], extra_key))

    def _flush(self, rng: random.Random) -> None:
        """Flush at any time: SGLang refuses it while busy, but other code also resets the tree."""
        self.ranks.on_all(lambda cache: cache.flush())
        self.requests.clear()

    # ---- time ----

    def _step(self, rng: random.Random) -> None:
        self.ranks.step()

    def _live(self, rng: random.Random) -> None:
        """Run normal steps, so that short sequences make progress."""
        for _ in range(rng.randint(1, 5)):
            self._live_once()

    def _live_once(self) -> None:
        for cache in self.ranks.caches:
            cache.work()
        self.ranks.step()
        self.ranks.check(content=False)

    def _work(self, rng: random.Random) -> None:
        cache = self._one(rng)
        cache.threads[rng.choice(("query", "fetch", "backup", "touch"))].run(rng.randint(1, 2))
        cache.calm()

    def _slow(self, rng: random.Random) -> None:
        self._one(rng).slow = True

    def _fast(self, rng: random.Random) -> None:
        self._one(rng).slow = False

    def _time(self, rng: random.Random) -> None:
        self._one(rng).now += rng.choice((0.5, 5.0, 11.0))

    # ---- the store ----

    def _fail(self, rng: random.Random) -> None:
        self._one(rng).store.fail(rng.choice(METHODS))

    def _hang(self, rng: random.Random) -> None:
        self._one(rng).store.hang(rng.choice(METHODS))

    def _open_gates(self, rng: random.Random) -> None:
        self._one(rng).open_gates()

    def _partly(self, rng: random.Random) -> None:
        """Let the next call miss a page behind some good ones, or report fewer pages."""
        method, good = rng.choice(METHODS), rng.randint(0, 3)
        change: Any = (
            (lambda pages: min(pages, good))
            if method == "batch_exists"
            else (lambda results: [index != good for index in range(len(results))])
        )
        self._one(rng).store.answer(method, change)

    def _lose(self, rng: random.Random) -> None:
        """Evict pages from the store."""
        store = self._one(rng).store
        keys = list(store.content)
        store.drop(*rng.sample(keys, rng.randint(0, min(3, len(keys)))))

    def _clear(self, rng: random.Random) -> None:
        """Clear the stores; all ranks forget the stored pages, even if one store is down."""
        for cache in self.ranks.caches:
            cache.tree.clear_storage_backend()

    # ---- drawing ----

    def _one(self, rng: random.Random) -> Cache:
        return rng.choice(self.ranks.caches)

    def _pick(self, rng: random.Random) -> str:
        return rng.choice(sorted(self.requests))


def request(rng: random.Random) -> tuple[list[int], str | None]:
    """Return a prompt and its namespace."""
    return rng.choice(BANK), rng.choice((None, None, "tenant"))


def run(cache: Cache, tokens: list[int], extra_key: str | None, rid: str | None = None) -> int:
    """Run a request; return its hit tokens, or -1 if the device has no room."""
    try:
        return cache.compute(tokens, extra_key, rid=rid)
    except MemoryError:
        return -1


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
@pytest.mark.hazard("ranks-part-in-collective")
@pytest.mark.parametrize("ranks", [1, 2])
def test_random_lives(ranks: int) -> None:
    """Guards against staging pages, device slots, locks or references that do not balance after
    every event on every rank, wrong content, requests that never end, and leftovers of an idle
    cache. The lives must include many hits and many faults."""
    counts: Counter[str] = Counter()
    for seed in range(tries(25)):
        rng = random.Random(seed)
        life = Life(ranks, seed)
        for _ in range(250):
            event = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            life.take(event, rng.randrange(2**30))
        life.finish()
        counts += life.taken
    assert counts["admitted"] > 100 and counts["from store"] > 20 and counts["stranded"] > 20
    assert all(counts[event] > 10 for event in WEIGHTS), counts
