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
    policy: str = option("linear", "for colocated workers")
    prefill_policy: str = option("lmetric", "for prefill workers")
    decode_policy: str = option("delta_kv", "for decode workers")
    block_tokens: int = option(16, "tokens of a block of the shadow index")
    pool_tokens: int = option(100_000, "KV pool of a worker that does not tell its own, tokens")
    reserve_tokens: int = option(
        512, "answer tokens to keep room for at most, as --num-reserved-decode-tokens"
    )
    max_sessions: int = option(
        100_000, "sessions whose worker is remembered; the least recently used go first"
    )
    heavy_threshold: int = option(
        20_000,
        "uncached tokens above which a request is offloaded to a PD pair beside colocated workers",
    )
    offload_min_cached: float = option(
        0.0, "share of the prompt that the prefill worker must hold for that"
    )
    max_offload_inflight: int = option(4, "offloaded requests at once")
    max_attempts: int = option(3, "workers, or pairs, that a request is tried on at most")
    connect_timeout: float = option(5.0, "s")
    request_timeout: float = option(1800.0, "s, for a whole request")
    max_body_bytes: int = option(256 << 20, "of a request")
    health_interval: float = option(5.0, "s between two checks of a worker")
    health_timeout: float = option(
        25.0, "s that one may take; SGLang's own takes 1 to 20, as it waits for its scheduler"
    )
    health_fall: int = option(
        3, "failed checks, or refused connections, in a row that take a worker out"
    )

    def __post_init__(self) -> None:
        if not self.workers and not self.prefills and not self.decodes:
            raise ValueError("no workers: give --worker, or --prefill and --decode")
        if bool(self.prefills) != bool(self.decodes):
            raise ValueError("--prefill and --decode need each other")
        urls = [*self.workers, *(url for url, _ in self.prefills), *self.decodes]
        if len(set(urls)) < len(urls):
            raise ValueError("a worker is named twice")
