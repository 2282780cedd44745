"""Any number of servers as one object: started, checked and ended together.

with Pair(PairConfig(model=..., radix=True), log_folder) as pair:
    results = pair.generate([[1, 2, 3], ...], max_new_tokens=16)
    pair.check()
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import Self

from benchmark.harness import checks, metrics, servers
from benchmark.harness.client import Request, Result, Target, send_all
from benchmark.harness.process import ServerProcess
from benchmark.harness.servers import HOST, ServerConfig, Sizes

START_S = 240.0
"""Time limit for a server to become ready."""


def start(config: ServerConfig, log_folder: Path, name: str | None = None) -> ServerProcess:
    """Start the server of a configuration. Its log is ``NAME.log`` in the folder, by default
    ``ROLE.log``."""
    name = name or config.role
    return ServerProcess(
        name, config.command, config.environment(), log_folder / f"{name}.log", config.ready_url
    )


class Fleet:
    """Running servers by name: their role, or ``ROLE-0``, ``ROLE-1`` if several have it.

    A context manager: servers start on entry, in parallel, a store before the engines and load
    balancers after them; all end on exit.
    """

    target: Target
    """Target of requests, if a subclass sets it."""

    def __init__(
        self, layout: Sequence[ServerConfig], log_folder: Path | str, start_s: float = START_S
    ) -> None:
        """``start_s``: time limit for a server to become ready."""
        self.layout, self._start_s = list(layout), start_s
        several = Counter(config.role for config in self.layout)
        numbers: Counter[str] = Counter()
        self._configs: dict[str, ServerConfig] = {}
        for config in self.layout:
            role = config.role
            name = f"{role}-{numbers[role]}" if several[role] > 1 else role
            self._configs[name] = config
            numbers[role] += 1
        self._log_folder = Path(log_folder)
        self.processes: dict[str, ServerProcess] = {}

    def __enter__(self) -> Self:
        order = {"store": 0, "router": 2}
        try:
            # A load balancer drops servers that are not up yet, so start it after them.
            for turn in range(3):
                group = [n for n, c in self._configs.items() if order.get(c.role, 1) == turn]
                for name in group:
                    self.processes[name] = start(self._configs[name], self._log_folder, name)
                self.wait(group)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def wait(self, started: Sequence[str]) -> None:
        """Wait for all at once, so that the first failure ends the wait."""
        with ThreadPoolExecutor(len(started) or 1) as pool:
            waits = [pool.submit(self.processes[n].wait_ready, self._start_s) for n in started]
            try:
                for wait in waits:
                    wait.result()
            except BaseException:
                self.stop()  # also ends the other waits
                raise

    def restart(self, name: str) -> Path:
        """Start an ended server again, on its ports. Return the path of the ended one's log."""
        ended = self.processes[name]
        ended.stop()  # its children may hold the ports
        log = ended.log.replace(ended.log.with_suffix(".ended.log"))
        self.processes[name] = start(self._configs[name], self._log_folder, name)
        return log

    def stop(self) -> None:
        """End all servers. Safe to call twice."""
        for process in reversed(list(self.processes.values())):
            process.stop()

    def check(self, timeout_s: float = 60.0) -> None:
        """Wait until all engines are idle, and check that they passed SGLang's memory check.

        Raises:
            ServerFailed: a server died, or reported a leak.
            TimeoutError: requests are left after ``timeout_s``.
        """
        # Decode first, because prefill's last transfers end with it.
        for name, config in sorted(self._configs.items(), key=lambda item: item[1].role):
            if config.role not in ("router", "store"):
                checks.wait_idle(self.processes[name], config.url, timeout_s)
        for process in self.processes.values():
            checks.assert_healthy(process)

    def send(self, requests: Sequence[Request], concurrency: int | None = None) -> list[Result]:
        """Send requests, all at once by default. Return results in order."""
        return asyncio.run(send_all(self.target, requests, concurrency))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        ignore_eos: bool = True,
        concurrency: int | None = None,
    ) -> list[list[int]]:
        """Return greedy answers as token ids, in the order of the prompts.

        Raises:
            RuntimeError: any of the requests failed.
        """
        requests = [
            Request(prompt, max_new_tokens, ignore_eos, label=str(i))
            for i, prompt in enumerate(prompts)
        ]
        return output_ids(self.send(requests, concurrency))


@dataclass(frozen=True)
class PairConfig:
    """A prefill and a decode server: model, switches and sizes."""

    model: Path | str
    stock: bool = False
    """Both servers run the stock release, even if the package is installed."""
    radix: bool = False
    """The decode server gets --disaggregation-decode-enable-radix-cache."""
    stock_prefill: bool = False
    """Only the prefill server runs the stock release."""
    prefill_sizes: Sizes = field(default_factory=lambda: Sizes(pool_tokens=64_000))
    decode_sizes: Sizes = field(default_factory=Sizes)
    backend: str = "nixl"
    router: bool = False
    """Start SGLang's PD load balancer too and send requests through it."""
    router_port: int | None = None
    """None: a free one."""
    skip_warmup: bool = False
    """Start without SGLang's warm-up request; the first real request is slower then."""
    prefill_tp: int = 1
    """Tensor parallel ranks of the prefill server."""
    decode_tp: int = 1
    """Tensor parallel ranks of the decode server."""
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for both servers."""
    prefill_env: Mapping[str, str] = field(default_factory=dict)
    decode_env: Mapping[str, str] = field(default_factory=dict)

    def layout(self) -> list[ServerConfig]:
        """Return prefill, decode and perhaps the router, on ports reserved for them now."""
        common = ("--skip-server-warmup",) if self.skip_warmup else ()
        prefill = servers.engine(
            "prefill",
            self.model,
            self.prefill_sizes,
            backend=self.backend,
            stock=self.stock or self.stock_prefill,
            ranks=self.prefill_tp,
            extra_args=common + self.prefill_args,
            env={**self.env, **self.prefill_env},
        )
        decode = servers.engine(
            "decode",
            self.model,
            self.decode_sizes,
            backend=self.backend,
            stock=self.stock,
            radix=self.radix,
            ranks=self.decode_tp,
            extra_args=common + self.decode_args,
            env={**self.env, **self.decode_env},
        )
        engines = [prefill, decode]
        if self.router:
            return [*engines, servers.router(engines, port=self.router_port)]
        return engines


class Pair(Fleet):
    """A running pair."""

    def __init__(self, config: PairConfig, log_folder: Path | str) -> None:
        self.config = config
        super().__init__(config.layout(), log_folder)
        prefill, decode = self.layout[:2]
        self.prefill_url, self.decode_url = prefill.url, decode.url
        # The load balancer if there is one, otherwise both servers directly.
        direct = Target(decode.url, prefill.url, HOST, prefill.bootstrap_port)
        self.target = Target(self.layout[2].url) if config.router else direct

    def metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the current counters of prefill and of decode."""
        return metrics.scrape(self.prefill_url), metrics.scrape(self.decode_url)


class Aggregated(Fleet):
    """One server that prefills and decodes: the reference for equality. Used like ``Pair``."""

    def __init__(
        self,
        model: Path | str,
        log_folder: Path | str,
        sizes: Sizes = Sizes(),  # noqa: B008
        **more: Any,
    ) -> None:
        """``more``: ``stock``, ``extra_args`` and ``env`` of ``servers.engine``."""
        self.config = servers.aggregated(model, sizes, **more)
        super().__init__([self.config], log_folder)
        self.target = Target(self.config.url)


def output_ids(results: Sequence[Result]) -> list[list[int]]:
    """Return the token ids of results; raise RuntimeError if any failed."""
    if errors := [f"request {r.label}: {r.error}" for r in results if r.error]:
        raise RuntimeError("; ".join(errors[:5]))
    return [r.output_ids for r in results]
