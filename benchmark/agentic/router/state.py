"""What the router believes about one worker, and what each request in flight charges to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

from benchmark.agentic.router.policies import View, Work
from benchmark.agentic.router.prefixes import PrefixIndex

COLOCATED, PREFILL, DECODE = "colocated", "prefill", "decode"


class Worker:
    """The one owner of a worker's state. Not up until its first health check has passed."""

    def __init__(
        self,
        role: str,
        url: str,
        bootstrap_port: int | None = None,
        *,
        block_tokens: int = 16,
        pool_tokens: int = 100_000,
        fall: int = 3,
    ) -> None:
        """``fall``: failed checks in a row that take it out."""
        self.role, self.url, self.bootstrap_port = role, url.rstrip("/"), bootstrap_port
        host = urlsplit(self.url).hostname or ""
        self.bootstrap_host = f"[{host}]" if ":" in host else host
        self.block_tokens, self.pool_tokens = block_tokens, pool_tokens
        self.index = PrefixIndex(pool_tokens // block_tokens)
        self.up = False
        self.checked = False
        """Whether a health check has ended, well or not."""
        self._fall, self._failed = fall, 0
        self.counts: Counter[str] = Counter()
        """Requests by how they ended; tokens that we believed it held, and that it said it held."""
        self.requests = self.pending_tokens = self.ongoing_tokens = self.added_tokens = 0

    def set_pool(self, tokens: int) -> None:
        """The worker's own word on its KV pool, which also bounds what it can remember."""
        self.pool_tokens = tokens
        self.index.resize(tokens // self.block_tokens)

    def view(self, hashes: Sequence[int], work: Work) -> View:
        matched = min(self.index.match(hashes) * self.block_tokens, work.tokens)
        return View(
            self.url,
            self.requests,
            self.pending_tokens,
            self.ongoing_tokens,
            self.added_tokens,
            self.pool_tokens,
            matched,
        )

    def charge(self, work: Work, matched_tokens: int) -> Charge:
        """A request comes to this worker; whoever gets the charge must release it."""
        return Charge(self, work, matched_tokens)

    def state(self) -> dict[str, object]:
        """All of it, for people."""
        shown = ("role", "url", "up", "requests", "pending_tokens", "ongoing_tokens")
        shown += ("added_tokens", "pool_tokens", "counts")
        return {name: getattr(self, name) for name in shown} | {"believed_blocks": len(self.index)}

    def correct(self, hashes: Sequence[int], believed_blocks: int, held_share: float) -> None:
        """The worker said what share of this prompt it held; less than we believed is forgotten.

        By now it holds the whole prompt again, which is to be learned afterwards; what it lost for
        good is other prompts behind the forgotten blocks. One block less is no news: a server's
        pages are not our blocks, and it always computes the last token.
        """
        held = int(held_share * len(hashes))
        if held + 1 < believed_blocks:
            self.index.forget(hashes[held:believed_blocks])

    def check_passed(self) -> bool:
        """Returns whether that brought the worker back."""
        self.checked, self._failed = True, 0
        came_back, self.up = not self.up, True
        return came_back

    def check_failed(self, *, gone: bool) -> bool:
        """Returns whether that took the worker out.

        ``gone``: nothing listens there, so the process and its cache are gone; the one that comes
        back, however soon, has an empty one.
        """
        self.checked = True
        self._failed += 1
        if gone:
            self.index.clear()
        if not self.up or self._failed < self._fall:
            return False
        self.up = False
        self.index.clear()
        return True


class Charge:
    """What one request adds to a worker's load, from its dispatch to its release."""

    __slots__ = ("_added", "_pending", "_total", "released", "worker")

    def __init__(self, worker: Worker, work: Work, matched_tokens: int) -> None:
        self.worker = worker
        self._pending = work.tokens - matched_tokens
        self._added = self._pending + work.reserve_tokens
        self._total = work.tokens + work.reserve_tokens
        self.released = False
        worker.requests += 1
        worker.pending_tokens += self._pending
        worker.added_tokens += self._added
        worker.ongoing_tokens += self._total

    def computed(self) -> None:
        """The worker has the whole prompt's KV now. Safe to call twice, and after the release."""
        self.worker.pending_tokens -= self._pending
        self._pending = 0

    def release(self) -> None:
        """The request has left the worker. Safe to call twice."""
        if self.released:
            return
        self.released = True
        self.computed()
        self.worker.requests -= 1
        self.worker.added_tokens -= self._added
        self.worker.ongoing_tokens -= self._total
