"""The router's view of one worker, and the load that each request in flight adds to it."""

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

AGGREGATED = "aggregated"
PREFILL = "prefill"
DECODE = "decode"
_FAILED = re.compile(rb'"error": ?[{"]|"(?:type|finish_reason)": ?"abort"')
"""Marks a failed answer. Quotes within generated text are escaped, so text never matches."""


class PrefixIndex(Recent[int, None]):
    """Hashes of the blocks that one worker probably holds, at most ``entries``.

    A block is never older than its successors, so the end of the least recently used prompt is
    evicted first, as in a radix tree.
    """

    def match(self, hashes: Sequence[int]) -> int:
        """Return the number of leading blocks that are held. Does not count as a use, because most
        candidates are not chosen."""
        return next((n for n, block in enumerate(hashes) if block not in self), len(hashes))

    def learn(self, hashes: Sequence[int]) -> None:
        """Record that the worker now holds this prompt, as the most recently used one."""
        for block in reversed(hashes[: self.entries]):
            self.note(block, None)


class Worker:
    """The state of a worker. It is up once its first health check has passed."""

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
        """``fall``: consecutive failed checks after which it is down."""
        self.role, self.url = role, url.rstrip("/")
        host = urlsplit(self.url).hostname or ""
        self.bootstrap = (f"[{host}]" if ":" in host else host, bootstrap_port)
        self.block_tokens, self.pool_tokens = block_tokens, pool_tokens
        self.index = PrefixIndex(pool_tokens // block_tokens)
        self.up = False
        self.checked = False
        """True once a health check has ended, passed or failed."""
        self._fall, self._failed = fall, 0
        self.counts: Counter[str] = Counter()
        """Number of requests by outcome."""
        self.requests = self.pending_tokens = self.ongoing_tokens = self.added_tokens = 0

    def view(self, hashes: Sequence[int], work: Work) -> View:
        matched = min(self.index.match(hashes) * self.block_tokens, work.tokens)
        load = (self.requests, self.pending_tokens, self.ongoing_tokens, self.added_tokens)
        return View(self.url, *load, self.pool_tokens, matched)

    def state(self) -> dict[str, object]:
        """Return the state, for operators."""
        shown = ("role", "url", "up", "requests", "pending_tokens", "ongoing_tokens")
        shown += ("added_tokens", "pool_tokens", "counts")
        return {name: getattr(self, name) for name in shown} | {"believed_blocks": len(self.index)}

    def passed(self, pool_tokens: int | None = None) -> None:
        """Note that a health check passed. ``pool_tokens``: size of its KV pool as the worker
        reports it, which also limits ``index``."""
        if pool_tokens is not None:
            self.pool_tokens, self.index.entries = pool_tokens, pool_tokens // self.block_tokens
        if not self.up:
            logger.info("%s worker %s is up, pool %d tokens", self.role, self.url, self.pool_tokens)
        self.up = self.checked = True
        self._failed = 0

    def failed(self, why: str, gone: bool = False) -> None:
        """Note that a health check or a connection failed.

        ``gone``: nothing listens there, so the process is gone, and its successor has an empty
        cache.
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
    """A request at one of its workers; adds to the worker's load until it ends."""

    def __init__(self, worker: Worker, ask: Ask, matched_tokens: int) -> None:
        self.worker, self.ask = worker, ask
        self.sent = self.begun = self.failed = self.done = False
        """``sent``: the request was sent. ``begun``: its answer has begun, so the worker has the
        prompt's KV. ``failed``: the answer reports an error. ``done``: a stream's last event has
        arrived."""
        self.outcome: str | None = None
        """``ok``, ``error`` (in its own answer), ``lost``, ``unreached``, ``abandoned`` (the client
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
        """Take whole events, or all, of its answer. Return True if they are the first sign that the
        worker has the prompt's KV."""
        self.failed = self.failed or _FAILED.search(data) is not None
        self.done = self.done or b"data: [DONE]" in data
        self.worker.pending_tokens -= self._pending
        self._pending = 0
        first, self.begun = not self.begun, True
        return first and not self.failed

    def end(self, outcome: str) -> bool:
        """End it with ``outcome``, unless it has ended. Return True on the first call."""
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
