"""Everything that the command line decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmark.agentic.router.policies import Knobs


@dataclass(frozen=True)
class Settings:
    """Workers, policies and bounds. Times are seconds."""

    workers: tuple[str, ...] = ()
    """URLs of colocated workers."""
    prefills: tuple[tuple[str, int], ...] = ()
    """URL and bootstrap port of each prefill worker."""
    decodes: tuple[str, ...] = ()
    policy: str = "linear"
    """For colocated workers."""
    prefill_policy: str = "lmetric"
    decode_policy: str = "delta_kv"
    knobs: Knobs = field(default_factory=Knobs)
    block_tokens: int = 16
    pool_tokens: int = 100_000
    """KV pool of a worker that does not tell its own."""
    reserve_tokens: int = 512
    """Answer tokens to keep room for at most."""
    max_sessions: int = 100_000
    """Sessions whose worker is remembered; the least recently used go first."""
    heavy_threshold: int = 20_000
    """Uncached tokens above which a request is offloaded, where there are both kinds of worker."""
    offload_min_cached: float = 0.0
    """Share of the prompt that the prefill worker must hold for that."""
    max_offload_inflight: int = 4
    max_attempts: int = 3
    """Workers, or pairs, that a request is tried on at most."""
    connect_timeout: float = 5.0
    request_timeout: float = 1800.0
    max_body_bytes: int = 256 << 20
    health_path: str = "/health"
    health_interval: float = 5.0
    health_timeout: float = 25.0
    """SGLang itself takes 1 to 20 s to answer, as it waits for a sign of its scheduler."""
    health_fall: int = 3
    health_rise: int = 1

    def __post_init__(self) -> None:
        if not self.workers and not self.prefills and not self.decodes:
            raise ValueError("no workers: give --worker, or --prefill and --decode")
        if bool(self.prefills) != bool(self.decodes):
            raise ValueError("--prefill and --decode need each other")
        urls = [*self.workers, *(url for url, _ in self.prefills), *self.decodes]
        if len(set(urls)) < len(urls):
            raise ValueError("a worker is named twice")
