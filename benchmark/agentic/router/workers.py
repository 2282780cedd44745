"""What the router believes about one worker, and what each request in flight adds to it."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

from benchmark.agentic.router.body import Ask
from benchmark.agentic.router.policies import View, Work
from benchmark.traces.sessions import Recent

logger = logging.getLogger(__name__)

AGGREGATED, PREFILL, DECODE = "aggregated", "prefill", "decode"
_FAILED = re.compile(rb'"error": ?[{"]|"(?:type|finish_reason)": ?"abort"')
"""In an answer. Quotes that a text has are escaped in it, so that no text looks like it."""


class PrefixIndex(Recent[int, None]):
    """The blocks that one worker is believed to hold, by their hashes, at most ``entries``.

    A block is never older than those behind it, so the end of the least recently used prompt goes
    first, as in a radix tree.
    """

    def match(self, hashes: Sequence[int]) -> int:
        """How many leading blocks are held. Changes nothing: most candidates are not chosen."""
        return next((n for n, block in enumerate(hashes) if block not in self), len(hashes))

    def learn(self, hashes: Sequence[int]) -> None:
        """The worker holds this prompt now, and used it last."""
        for block in reversed(hashes[: self.entries]):
            self.note(block, None)


class Worker:
    """The one owner of a worker's state. Not up until its first health check has passed."""

    def __init__(
        self,
        role: str,
        url: str,
        bootstrap_port: int = 0,
        *,
        block_tokens: int = 16,
        pool_tokens: int = 100_000,
        fall: int = 3,
    ) -> None:
        """``fall``: failed checks in a row that take it out."""
        self.role, self.url = role, url.rstrip("/")
        host = urlsplit(self.url).hostname or ""
        self.bootstrap = (f"[{host}]" if ":" in host else host, bootstrap_port)
        self.block_tokens, self.pool_tokens = block_tokens, pool_tokens
        self.index = PrefixIndex(pool_tokens // block_tokens)
        self.up = False
        self.checked = False
        """Whether a health check has ended, well or not."""
        self._fall, self._failed = fall, 0
        self.counts: Counter[str] = Counter()
        """Requests by how they ended."""
        self.requests = self.pending_tokens = self.ongoing_tokens = self.added_tokens = 0

    def view(self, hashes: Sequence[int], work: Work) -> View:
        matched = min(self.index.match(hashes) * self.block_tokens, work.tokens)
        load = (self.requests, self.pending_tokens, self.ongoing_tokens, self.added_tokens)
        return View(self.url, *load, self.pool_tokens, matched)

    def state(self) -> dict[str, object]:
        """All of it, for people."""
        shown = ("role", "url", "up", "requests", "pending_tokens", "ongoing_tokens")
        shown += ("added_tokens", "pool_tokens", "counts")
        return {name: getattr(self, name) for name in shown} | {"believed_blocks": len(self.index)}

    def passed(self, pool_tokens: int | None = None) -> None:
        """A health check passed. ``pool_tokens``: the worker's own word on its KV pool, which also
        bounds what it can remember."""
        if pool_tokens is not None:
            self.pool_tokens, self.index.entries = pool_tokens, pool_tokens // self.block_tokens
        if not self.up:
            logger.info("%s worker %s is up, pool %d tokens", self.role, self.url, self.pool_tokens)
        self.up = self.checked = True
        self._failed = 0

    def failed(self, why: str, gone: bool = False) -> None:
        """A check, or a request's connection, failed.

        ``gone``: nothing listens there, so the process and its cache are gone; the one that comes
        back, however soon, has an empty one.
        """
        self.checked = True
        self._failed += 1
        out = self.up and self._failed >= self._fall
        if out:
            self.up = False
            logger.warning("%s worker %s gets no more requests: %s", self.role, self.url, why)
        if out or gone:
            self.index.clear()


class Half:
    """A request at one of its workers: what it adds to the worker's load until it ends."""

    def __init__(self, worker: Worker, ask: Ask, matched_tokens: int) -> None:
        self.worker, self.ask = worker, ask
        self.sent = self.begun = self.failed = self.done = False
        """Whether the request was sent; its answer has begun, so that the worker has the prompt's
        KV; the answer says that it failed; a stream's last event has come."""
        self.outcome: str | None = None
        """``ok``, ``error`` (its own answer), ``lost``, ``unreached``, ``abandoned`` (the client
        has gone, or the other half has failed); None while it runs."""
        work = ask.work
        self._pending = work.tokens - matched_tokens
        self._added = self._pending + work.reserve_tokens
        self._total = work.tokens + work.reserve_tokens
        worker.requests += 1
        worker.pending_tokens += self._pending
        worker.added_tokens += self._added
        worker.ongoing_tokens += self._total

    def take(self, data: bytes) -> bool:
        """Some of its answer: whole events, or all of it. Returns whether it shows for the first
        time that the worker has the prompt's KV."""
        self.failed = self.failed or _FAILED.search(data) is not None
        self.done = self.done or b"data: [DONE]" in data
        self.worker.pending_tokens -= self._pending
        self._pending = 0
        first, self.begun = not self.begun, True
        return first and not self.failed

    def end(self, outcome: str) -> bool:
        """The first call counts; returns whether this is it."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.worker.requests -= 1
        self.worker.pending_tokens -= self._pending
        self.worker.added_tokens -= self._added
        self.worker.ongoing_tokens -= self._total
        self._pending = 0
        self.worker.counts[outcome] += 1
        return True
