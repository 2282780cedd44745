"""Route one request: candidates, selective offload, session pins, load; and the decision log."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmark.agentic.router.body import Ask
from benchmark.agentic.router.policies import Choice, Knobs, View, choose, option
from benchmark.agentic.router.workers import AGGREGATED, DECODE, PREFILL, Half, Worker
from benchmark.traces.sessions import Recent


class NoWorker(RuntimeError):
    """No worker of a role is up, or all of them were unreachable for this request."""


@dataclass(frozen=True)
class Settings(Knobs):
    """All settings of the command line, which has an option for each field."""

    workers: tuple[str, ...] = ()
    """URLs of aggregated workers."""
    prefills: tuple[tuple[str, int], ...] = ()
    """URL and bootstrap port of each prefill worker."""
    decodes: tuple[str, ...] = ()
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
    max_offload_inflight: int = option(4, "maximum concurrent offloaded requests")
    max_attempts: int = option(3, "maximum workers, or pairs, tried for a request")
    request_timeout: float = option(1800.0, "seconds for a whole request")
    health_interval: float = option(5.0, "seconds between two health checks of a worker")
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


class Pick(NamedTuple):
    """A worker chosen from its pool, the candidates, and the reason."""

    worker: Worker
    views: Sequence[View]
    choice: Choice

    @property
    def matched_tokens(self) -> int:
        return self.views[self.choice.index].matched_tokens


class Scheduler:
    """Owns the workers, the session pins, and the log of decisions."""

    def __init__(self, settings: Settings, decisions: Path | None = None) -> None:
        """``decisions``: receives one JSON line for each decision, with all terms of all scores.
        Lines are not buffered, so that a crash loses none."""
        self.settings = s = settings

        def made(role: str, url: str, port: int = 0) -> Worker:
            sizes = {"block_tokens": s.block_tokens, "pool_tokens": s.pool_tokens}
            return Worker(role, url, port, fall=s.health_fall, **sizes)

        self.pools: dict[str, list[Worker]] = {
            AGGREGATED: [made(AGGREGATED, url) for url in s.workers],
            PREFILL: [made(PREFILL, url, port) for url, port in s.prefills],
            DECODE: [made(DECODE, url) for url in s.decodes],
        }
        self._policies = {
            AGGREGATED: s.policy,
            PREFILL: s.prefill_policy,
            DECODE: s.decode_policy,
        }
        self.pins: dict[str, Recent[str, str]] = {
            role: Recent(s.max_sessions) for role in self.pools
        }
        """By role and session: URL of the session's last worker."""
        self._turns = dict.fromkeys(self.pools, 0)
        self._offloaded: list[Half] = []
        self._log = None
        if decisions is not None:
            decisions.parent.mkdir(parents=True, exist_ok=True)
            self._log = decisions.open("ab", buffering=0)

    @property
    def workers(self) -> list[Worker]:
        return [worker for pool in self.pools.values() for worker in pool]

    def route(self, ask: Ask, exclude: Collection[str] = ()) -> dict[str, Half]:
        """Choose an aggregated worker, or a prefill and a decode worker. Return the request's
        halves by role; each adds to its worker's load until it ends.

        Args:
            exclude: URLs of workers that could not be reached for this request.

        Raises:
            NoWorker: no worker is left.
        """
        picks = dict(self._picks(ask, exclude))
        offload = self._offload(ask, picks)
        if AGGREGATED in picks and offload != "offloaded":
            picks = {AGGREGATED: picks[AGGREGATED]}
        elif not {PREFILL, DECODE} <= set(picks):
            pools = self.pools.items()
            missing = [f"{role} worker" for role, pool in pools if pool and role not in picks]
            attempted = f" (attempted: {', '.join(exclude)})" if exclude else ""
            raise NoWorker(f"no {' and no '.join(missing)} is available{attempted}")
        chosen = {r: p for r, p in picks.items() if r != AGGREGATED or offload != "offloaded"}
        if self._log is not None:
            line = {
                "at": time.time(),
                "rid": ask.rid,
                "session": ask.session,
                "path": ask.path,
                "tokens": ask.work.tokens,
                "reserve_tokens": ask.work.reserve_tokens,
                "attempt": len(exclude),
                "offload": offload,
                "taken": list(chosen),
                "pools": {role: self._log_entry(role, pick) for role, pick in picks.items()},
            }
            # Written before the load is added, so that a full disk fails only this request.
            self._log.write(msgspec.json.encode(line) + b"\n")
        halves = {}
        for role, pick in chosen.items():
            self._turns[role] += 1
            if ask.session is not None:
                self.pins[role].note(ask.session, pick.worker.url)
            halves[role] = Half(pick.worker, ask, pick.matched_tokens)
        if offload == "offloaded":
            self._offloaded.append(halves[DECODE])
        return halves

    def _picks(self, ask: Ask, exclude: Collection[str]) -> Iterator[tuple[str, Pick]]:
        """Yield the best worker of each role that has a candidate."""
        for role, pool in self.pools.items():
            up = [worker for worker in pool if worker.up and worker.url not in exclude]
            if up:
                views = [worker.view(ask.hashes, ask.work) for worker in up]
                pin = self.pins[role].get(ask.session or "", "")
                pinned = next((i for i, worker in enumerate(up) if worker.url == pin), None)
                policy, turn = self._policies[role], self._turns[role]
                choice = choose(policy, views, ask.work, self.settings, turn, pinned)
                yield role, Pick(up[choice.index], views, choice)

    def _offload(self, ask: Ask, picks: Mapping[str, Pick]) -> str | None:
        """Return why a request leaves the aggregated workers (``offloaded``) or stays with them;
        None if there is no choice.

        An SGLang server has one disaggregation mode, so an offloaded request runs on a PD pair
        beside the aggregated workers, from prefill to its last token.
        """
        if AGGREGATED not in picks or not self.pools[PREFILL]:
            return None
        self._offloaded = [half for half in self._offloaded if half.outcome is None]
        if ask.work.tokens - picks[AGGREGATED].matched_tokens <= self.settings.heavy_threshold:
            return "light"
        if not {PREFILL, DECODE} <= set(picks):
            return "no pair"
        if len(self._offloaded) >= self.settings.max_offload_inflight:
            return "capped"
        return "offloaded"

    def _log_entry(self, role: str, pick: Pick) -> dict[str, object]:
        """Return the log's entry for one pool."""
        candidates = [view._asdict() for view in pick.views]
        for candidate, terms in zip(candidates, pick.choice.terms, strict=False):
            candidate |= {"score": terms.score, "terms": terms.parts}
        return {
            "policy": self._policies[role],
            "reason": pick.choice.reason,
            "chosen": pick.worker.url,
            "candidates": candidates,
        }
