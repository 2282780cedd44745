"""Everything that the command line decides; it has an option for each field."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmark.agentic.router.policies import Knobs, option


@dataclass(frozen=True)
class Settings:
    """Workers, policies and bounds."""

    workers: tuple[str, ...] = ()
    """URLs of colocated workers."""
    prefills: tuple[tuple[str, int], ...] = ()
    """URL and bootstrap port of each prefill worker."""
    decodes: tuple[str, ...] = ()
    knobs: Knobs = field(default_factory=Knobs)
    policy: str = option("linear", "policy for aggregated workers")
    prefill_policy: str = option("lmetric", "policy for prefill workers")
    decode_policy: str = option("delta_kv", "policy for decode workers")
    block_tokens: int = option(16, "tokens per block of the shadow index")
    pool_tokens: int = option(100_000, "KV pool of a worker that does not report its size, tokens")
    reserve_tokens: int = option(
        512, "maximum output tokens to reserve, as --num-reserved-decode-tokens"
    )
    max_sessions: int = option(
        100_000, "sessions whose worker is stored; the least recently used are evicted first"
    )
    heavy_threshold: int = option(
        20_000,
        "uncached tokens above which a request is offloaded to a PD pair beside aggregated workers",
    )
    offload_min_cached: float = option(
        0.0, "share of the prompt that the prefill worker must have cached for an offload"
    )
    max_offload_inflight: int = option(4, "maximum concurrent offloaded requests")
    max_attempts: int = option(3, "maximum workers, or pairs, tried for a request")
    connect_timeout: float = option(5.0, "seconds to connect to a worker")
    request_timeout: float = option(1800.0, "seconds for a whole request")
    max_body_bytes: int = option(256 << 20, "maximum bytes of a request")
    health_interval: float = option(5.0, "seconds between two health checks of a worker")
    health_timeout: float = option(
        25.0, "seconds for one health check; SGLang's takes 1 to 20, as it waits for its scheduler"
    )
    health_fall: int = option(
        3, "consecutive failed checks, or refused connections, that remove a worker"
    )

    def __post_init__(self) -> None:
        if not self.workers and not self.prefills and not self.decodes:
            raise ValueError("no workers: give --worker, or --prefill and --decode")
        if bool(self.prefills) != bool(self.decodes):
            raise ValueError("--prefill and --decode must be given together")
        urls = [*self.workers, *(url for url, _ in self.prefills), *self.decodes]
        if len(set(urls)) < len(urls):
            raise ValueError("a worker is given twice")
