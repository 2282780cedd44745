"""A prefill and a decode server, and a load balancer where asked, as one object.

with Pair(PairConfig(model=..., radix=True), log_folder) as pair:
    results = pair.generate([[1, 2, 3], ...], max_new_tokens=16)
    pair.check()
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.harness import metrics, servers
from benchmark.harness.client import Request, Result, Target, send_all
from benchmark.harness.fleet import Fleet
from benchmark.harness.ports import allocate_ports
from benchmark.harness.process import ServerProcess
from benchmark.harness.servers import DEFAULT_SIZES, HOST, ServerConfig, Sizes
from benchmark.harness.variants import Variant


@dataclass(frozen=True)
class PairConfig:
    """One arm: a model, the switches, the sizes."""

    model: Path | str
    stock: bool = False
    """Both servers run the stock release, whatever is installed."""
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
    """None takes a free one."""
    skip_warmup: bool = False
    """Start without SGLang's warm-up request; the first real request is slower then."""
    prefill_tp: int = 1
    """Tensor parallel ranks of the prefill server."""
    decode_tp: int = 1
    """The same of the decode server."""
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """For both servers."""
    prefill_env: Mapping[str, str] = field(default_factory=dict)
    decode_env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, variant: Variant, model: Path | str, **more: Any) -> PairConfig:
        """The arm of a comparison that runs ``variant``; ``more``: the other fields, which are the
        same for all arms."""
        decode_args = (*more.pop("decode_args", ()), *variant.decode_args)
        switches = {"stock": variant.stock, "radix": variant.radix, "env": variant.env}
        return cls(model, decode_args=decode_args, **switches | more)

    def layout(self) -> list[ServerConfig]:
        """Prefill, decode and perhaps router, on ports reserved for them now."""
        p_http, p_nccl, p_boot, d_http, d_nccl, r_http, r_metrics = allocate_ports(7)
        common = ("--skip-server-warmup",) if self.skip_warmup else ()
        prefill_ranks, prefill_env = servers.tensor_parallel(self.prefill_tp)
        decode_ranks, decode_env = servers.tensor_parallel(self.decode_tp)
        prefill = servers.prefill(
            self.model,
            (p_http, p_nccl, p_boot),
            self.prefill_sizes,
            backend=self.backend,
            stock=self.stock or self.stock_prefill,
            extra_args=common + prefill_ranks + self.prefill_args,
            env={**prefill_env, **self.env, **self.prefill_env},
        )
        decode = servers.decode(
            self.model,
            (d_http, d_nccl),
            self.decode_sizes,
            backend=self.backend,
            stock=self.stock,
            radix=self.radix,
            extra_args=common + decode_ranks + self.decode_args,
            env={**decode_env, **self.env, **self.decode_env},
        )
        if not self.router:
            return [prefill, decode]
        ports = (self.router_port or r_http, r_metrics)
        return [prefill, decode, servers.router(ports, [prefill], [decode])]


class Served(Fleet):
    """Servers that requests can be sent to, at ``target``."""

    target: Target

    def send(self, requests: Sequence[Request], concurrency: int | None = None) -> list[Result]:
        """Sends requests, all at once by default; results in their order."""
        return asyncio.run(send_all(self.target, requests, concurrency))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        ignore_eos: bool = True,
        concurrency: int | None = None,
    ) -> list[list[int]]:
        """Greedy answers as token ids, in the prompts' order.

        Raises:
            RuntimeError: any of the requests failed.
        """
        requests = [
            Request(prompt, max_new_tokens, ignore_eos, label=str(i))
            for i, prompt in enumerate(prompts)
        ]
        return output_ids(self.send(requests, concurrency))


class Pair(Served):
    """A running pair. A context manager, as every fleet."""

    def __init__(
        self, config: PairConfig, log_folder: Path | str, start_timeout_s: float = 240.0
    ) -> None:
        self.config = config
        super().__init__(config.layout(), log_folder, start_timeout_s)
        prefill, decode = self.layout[:2]
        self.prefill_url, self.decode_url = prefill.url, decode.url
        # The load balancer if there is one, else both servers directly.
        direct = Target(decode.url, prefill.url, HOST, prefill.bootstrap_port)
        self.target = Target(self.layout[2].url) if config.router else direct

    def metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """The counters of prefill and of decode, now."""
        return metrics.scrape(self.prefill_url), metrics.scrape(self.decode_url)


def running(decode_log: str) -> list[int]:
    """Each ``#running-req`` in the log of a decode server."""
    return [int(n) for n in re.findall(r"Decode batch.*?#running-req: (\d+)", decode_log)]


def peak_running(decode_log: str) -> int:
    """The largest of them."""
    return max(running(decode_log), default=0)


def output_ids(results: Sequence[Result]) -> list[list[int]]:
    """The token ids of results, all of which must have succeeded."""
    if errors := [f"request {r.label}: {r.error}" for r in results if r.error]:
        raise RuntimeError("; ".join(errors[:5]))
    return [r.output_ids for r in results]


class Aggregated(Served):
    """One server that does both: the reference for equality. Used like ``Pair``."""

    def __init__(
        self, model: Path | str, log_folder: Path | str, sizes: Sizes = DEFAULT_SIZES, **more: Any
    ) -> None:
        """``more``: ``stock``, ``extra_args`` and ``env`` of ``servers.engine``."""
        self.config = servers.aggregated(model, allocate_ports(2), sizes, **more)
        super().__init__([self.config], log_folder)
        self.target = Target(self.config.url)

    @property
    def process(self) -> ServerProcess:
        return self.processes[self.config.role]
