"""Running servers: target of requests, warm-up, flush, counters, and gauges over time."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from benchmark.agentic.fleet.spec import NONE, FleetFile, Setup
from benchmark.agentic.load.prepare import PromptSource
from benchmark.agentic.load.run import Settings, replay
from benchmark.harness import fleet, metrics
from benchmark.harness.client import Target
from benchmark.harness.command import RunFailed
from benchmark.harness.models import REPOSITORY
from benchmark.harness.ports import allocate_ports
from benchmark.harness.servers import HOST, ServerConfig
from benchmark.traces.record import Record

SAMPLE_S = 1.0
UNANSWERED = (OSError, ValueError, HTTPException)
"""Errors of a query to a server."""
FLUSH_S = 10.0
"""Time limit for a server to become idle and empty its cache."""
ROUTED = "our router"
MEMORY = "sglang:host_memory_bytes"
"""Host pools or staging buffers of the engines; for the store, the memory that its clients give."""
DEVICE_MEMORY = "sglang:device_memory_bytes"
"""KV pools of the engines."""


class Servers:
    """The running servers of one setup. Roles are ``aggregated``, ``prefill`` and ``decode``."""

    def __init__(
        self,
        setup: Setup,
        about: FleetFile,
        target: Target,
        vocabulary: range,
        check: Callable[[], None] = lambda: None,
        via: str = "directly",
        token_bytes: int = 0,
        owned: bool = False,
    ) -> None:
        """``check``: raises if a server is unhealthy; called after each load. ``via``: how requests
        reach the servers, for the page. ``token_bytes``: KV bytes of a token, 0 if unknown.
        ``owned``: no other load uses the store, so it may be emptied."""
        self.setup, self.about, self.target, self.via = setup, about, target, via
        self.vocabulary, self.check, self._token_bytes = vocabulary, check, token_bytes
        self._owned = owned

    def prompts(self, seed: int) -> PromptSource:
        about = self.about
        return PromptSource(self.vocabulary, about.block_tokens, seed, about.endpoint, about.model)

    def warm_up(self) -> None:
        """Send some requests before the load, because the first transfer between two servers also
        sets up their connection.

        Raises:
            RunFailed: a request failed; the message names the target and the reason.
        """
        prompts = self.prompts(0)
        tokens = 3 * prompts.block_tokens
        # Block ids that no trace has, so that nothing of a trace is cached beforehand.
        records = [
            Record(0.0, tokens, 4, (-3 * i - 1, -3 * i - 2, -3 * i - 3))
            for i in range(self.about.warm_up * max(1, len(self.setup.engines)))
        ]
        headers = self.about.all_headers
        settings = Settings(think_s=0.0, timeout_s=120.0, sessions=2, headers=headers)
        for outcome in asyncio.run(replay(self.target, records, prompts, settings)):
            if outcome.error is not None:
                raise RunFailed(f"warm-up of {self.target.url} failed: {outcome.message}")

    def flush(self) -> list[str]:
        """Empty every engine's cache, then the state of our router, then the rig's store. Return
        the servers that failed to do so, each with the reason."""
        refused = []
        urls = list(self.setup.engines) or ([self.target.url] if self.setup.router else [])
        if self.via.startswith(ROUTED):
            urls.append(self.target.url)
        for number, url in enumerate(urls):
            try:
                # A server may need one more step after its last token to become idle.
                self._ask("POST", f"{url}/flush_cache?timeout={FLUSH_S}")
            except UNANSWERED as error:  # no address in the saved run
                refused.append(f"server {number}: {error}")
        if self._owned and self.setup.store is not None:
            try:
                self._empty(self.setup.store)
            except UNANSWERED as error:
                refused.append(f"the store: {error}")
        return refused

    def _empty(self, store: str) -> None:
        """Remove all keys from the store, otherwise a load would hit what the previous one stored.
        Repeat, because Mooncake keeps recently used keys."""
        readers = [url for url, role in self.setup.engines.items() if role != "decode"]
        until = time.monotonic() + FLUSH_S
        while self._scrape(store).get(metrics.STORE_KEYS, 0.0):
            if time.monotonic() > until:
                raise ValueError("it kept some keys")
            for url in readers:
                self._ask("POST", f"{url}/hicache/storage-backend/clear")
            time.sleep(SAMPLE_S / 4)

    def counters(self) -> dict[str, dict[str, float]]:
        """Return URL -> counters of the engines and the store with a reachable ``/metrics``."""
        counters = {}
        for url in self._roles:
            with suppress(*UNANSWERED):
                counters[url] = self._scrape(url)
        return counters

    def gained(self, before: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """Return, by role (``store`` is one), the increase of its servers' counters, summed, and
        their current memory for KV in bytes as ``MEMORY`` and ``DEVICE_MEMORY``. A role is left
        out if one of its servers is missing now or in ``before``, because its earlier counts would
        then look like the load's, or be missing."""
        now, gained = self.counters(), {}
        for role in dict.fromkeys(self._roles.values()):
            urls = [url for url, server_role in self._roles.items() if server_role == role]
            if all(url in before and url in now for url in urls):
                gained[role] = metrics.total(metrics.gained(before[url], now[url]) for url in urls)
                total = metrics.total(now[url] for url in urls)
                staged = total.get(metrics.STAGED_PAGES, 0.0) * self.about.block_tokens
                host = total.get(metrics.HOST_TOKENS, 0.0) or staged
                if memory := host * self._token_bytes + total.get(metrics.STORE_BYTES, 0.0):
                    gained[role][MEMORY] = memory
                if device := total.get(metrics.POOL_TOKENS, 0.0) * self._token_bytes:
                    gained[role][DEVICE_MEMORY] = device
        return gained

    @property
    def _roles(self) -> dict[str, str]:
        """URL -> role of all servers that may have counters."""
        store = self.setup.store
        return {**self.setup.engines, **({store: "store"} if store else {})}

    @contextmanager
    def sampled(self) -> Iterator[list[float]]:
        """Sample the KV pool usage of each decoding server once a second within the context."""
        used: list[float] = []
        over = threading.Event()
        decoding = [url for url, role in self.setup.engines.items() if role != "prefill"]

        def watch() -> None:
            while True:
                for url in decoding:
                    with suppress(*UNANSWERED):
                        text = self._ask("GET", url + "/metrics").decode(errors="replace")
                        used.extend(usage(text))
                if over.wait(SAMPLE_S):
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield used
        finally:
            over.set()
            thread.join(30)

    def _scrape(self, url: str) -> dict[str, float]:
        return metrics.parse(self._ask("GET", url + "/metrics").decode(errors="replace"))

    def _ask(self, method: str, url: str) -> bytes:
        request = urllib.request.Request(url, method=method, headers=self.about.all_headers)
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            body: bytes = answer.read()
            return body


@contextmanager
def reach(
    setup: Setup, about: FleetFile, policy: str, router_args: Sequence[str]
) -> Iterator[Servers]:
    """Use servers that are already running. If several have one role, start our router for as long
    as the context lasts, even if the arm has none; ``via`` then says so.

    Raises:
        RunFailed: an address refuses connections; the message names it.
    """
    for url in [*setup.engines, *([setup.router] if setup.router else [])]:
        try:
            urllib.request.urlopen(url + "/health", timeout=30.0).close()
        except urllib.error.HTTPError:
            pass  # a server answered
        except UNANSWERED as error:
            raise RunFailed(f"{url} cannot be reached: {error}") from error
    vocabulary = range(*about.vocabulary)
    if (target := direct(setup)) is not None:
        yield Servers(setup, about, target, vocabulary)
        return
    if about.headers:
        raise RunFailed("our router does not forward `headers`: give your own router as `router`")
    policy = "round_robin" if policy == NONE else policy
    config = routed(setup, policy, router_args)
    with TemporaryDirectory() as folder, fleet.Fleet([config], Path(folder)) as running:
        via = f"{ROUTED}, {policy}"
        yield Servers(setup, about, Target(config.url), vocabulary, running.check, via)


def routed(setup: Setup, policy: str, more: Sequence[str] = ()) -> ServerConfig:
    """Return the configuration of our router for a setup's servers. It becomes ready after a health
    check of each. ``policy`` applies to decode if servers are split, otherwise to the workers.

    ``more``: further arguments, such as ``("--alpha", "0.5")``.
    """
    (port,) = allocate_ports(1)
    command = [sys.executable, "-m", "benchmark", "route", "--host", HOST, "--port", str(port)]
    for server in setup.prefill:
        command += ["--prefill", server.url, str(server.bootstrap_port)]
    for role, urls in (("--decode", setup.decode), ("--worker", setup.aggregated)):
        command += [word for url in urls for word in (role, url)]
    command.append("--decode-policy" if setup.decode and not setup.aggregated else "--policy")
    env = {"PYTHONPATH": str(REPOSITORY)}
    return ServerConfig("router", port, (*command, policy, *more), env)


def direct(setup: Setup) -> Target | None:
    """Return the target of requests, or None if our router has to choose among servers."""
    if setup.router is not None:
        return Target(setup.router.rstrip("/"))
    if len(setup.aggregated) == 1 and not setup.decode:
        return Target(setup.aggregated[0].rstrip("/"))
    if len(setup.prefill) == len(setup.decode) == 1 and not setup.aggregated:
        server = setup.prefill[0]
        host = urlsplit(server.url).hostname
        return Target(
            setup.decode[0].rstrip("/"), server.url.rstrip("/"), host, server.bootstrap_port
        )
    return None


def usage(text: str) -> list[float]:
    """Return the KV pool usage on a metrics page: the mean over data-parallel ranks, whose pools
    have one size; empty if the page has none. Parsing the whole page instead would delay the
    client, which shares the interpreter, by tens of milliseconds."""
    values = re.findall(r"^sglang:token_usage(?:\{.*\})? (\S+)", text, re.MULTILINE)
    return [sum(map(float, values)) / len(values)] if values else []
