"""Where one request goes: candidates, selective offload, session pins, charges; and its log."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmark.agentic.router.body import Ask
from benchmark.agentic.router.policies import Choice, View, choose
from benchmark.agentic.router.settings import Settings
from benchmark.agentic.router.state import COLOCATED, DECODE, PREFILL, Charge, Worker
from benchmark.traces.sessions import Recent


class NoWorker(RuntimeError):
    """No worker of a role is up, or all of them have refused the request already."""


class Pins:
    """Which worker a session last went to, for the most recent sessions."""

    def __init__(self, limit: int) -> None:
        self._workers: Recent[str, tuple[str, int]] = Recent(limit)

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, session: str | None) -> tuple[str | None, int]:
        """The session's worker, and how many requests in a row it has had; None and 0."""
        return (None, 0) if session is None else self._workers.get(session, (None, 0))

    def set(self, session: str | None, url: str) -> None:
        if session is None:
            return
        before, stayed = self.get(session)
        self._workers.note(session, (url, stayed + 1 if before == url else 1))


@dataclass(frozen=True)
class Pick:
    """One worker chosen from its pool, the candidates it was chosen from, and why."""

    worker: Worker
    policy: str
    views: Sequence[View]
    choice: Choice

    @property
    def matched_tokens(self) -> int:
        return self.views[self.choice.index].matched_tokens


@dataclass(frozen=True)
class Route:
    """Where a request goes, and its charges there: an aggregated worker, or prefill and decode."""

    picks: Mapping[str, Pick]
    """By role: those taken, and the colocated one that an offloaded request passed over."""
    offload: str | None
    """Why the request was offloaded or not; None where there is no choice."""
    charges: Mapping[str, Charge]
    """By role: one, or prefill's and decode's."""
    matched_blocks: Mapping[str, int] = field(default_factory=dict)
    """Blocks of the prompt that each worker was believed to hold when it was chosen."""


class Scheduler:
    """Owns the workers and the sessions' pins."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pools: dict[str, list[Worker]] = {
            COLOCATED: [self._worker(COLOCATED, url) for url in settings.workers],
            PREFILL: [self._worker(PREFILL, url, port) for url, port in settings.prefills],
            DECODE: [self._worker(DECODE, url) for url in settings.decodes],
        }
        self.policies = {
            COLOCATED: settings.policy,
            PREFILL: settings.prefill_policy,
            DECODE: settings.decode_policy,
        }
        self.forget_sessions()
        self._turns = dict.fromkeys(self.pools, 0)
        self._offloaded: list[Charge] = []

    def forget_sessions(self) -> None:
        """A session's next request may go anywhere."""
        self.pins = {role: Pins(self.settings.max_sessions) for role in self.pools}

    def _worker(self, role: str, url: str, bootstrap_port: int | None = None) -> Worker:
        s = self.settings
        return Worker(
            role,
            url,
            bootstrap_port,
            block_tokens=s.block_tokens,
            pool_tokens=s.pool_tokens,
            fall=s.health_fall,
        )

    @property
    def workers(self) -> list[Worker]:
        return [worker for pool in self.pools.values() for worker in pool]

    @property
    def can_serve(self) -> bool:
        """Whether a request that came now would find a worker, or a pair."""
        up = {role: any(worker.up for worker in pool) for role, pool in self.pools.items()}
        return up[COLOCATED] or (up[PREFILL] and up[DECODE])

    def route(self, ask: Ask, exclude: Collection[str] = ()) -> Route:
        """Chooses and charges.

        Args:
            exclude: URLs of workers that could not be reached for this request.

        Raises:
            NoWorker: nobody left.
        """
        colocated = self._pick(COLOCATED, ask, exclude)
        prefill = self._pick(PREFILL, ask, exclude)
        decode = self._pick(DECODE, ask, exclude)
        offload = None
        if colocated is not None and self.pools[PREFILL]:
            offload = self._offload(ask, colocated, prefill, decode)
        picks = {r.worker.role: r for r in (colocated, prefill, decode) if r is not None}
        if colocated is not None and offload != "offloaded":
            picks = {COLOCATED: colocated}
            taken = [colocated]
        elif prefill is not None and decode is not None:
            taken = [prefill, decode]
        else:
            raise NoWorker(self._missing(exclude))
        charges = {}
        for pick in taken:
            role = pick.worker.role
            self._turns[role] += 1
            self.pins[role].set(ask.session, pick.worker.url)
            charges[role] = pick.worker.charge(ask.work, pick.matched_tokens)
        if offload == "offloaded":
            self._offloaded.append(charges[DECODE])
        blocks = {
            role: picks[role].matched_tokens // self.settings.block_tokens for role in charges
        }
        return Route(picks, offload, charges, blocks)

    def _pick(self, role: str, ask: Ask, exclude: Collection[str]) -> Pick | None:
        up = [w for w in self.pools[role] if w.up and w.url not in exclude]
        if not up:
            return None
        policy = self.policies[role]
        views = [worker.view(ask.prompt.hashes, ask.work) for worker in up]
        pin, stayed = self.pins[role].get(ask.session)
        pinned = next((i for i, worker in enumerate(up) if worker.url == pin), None)
        knobs, turn = self.settings.knobs, self._turns[role]
        choice = choose(policy, views, ask.work, knobs, turn, pinned, stayed)
        return Pick(up[choice.index], policy, views, choice)

    def _offload(self, ask: Ask, colocated: Pick, prefill: Pick | None, decode: Pick | None) -> str:
        """Why a request leaves the aggregated workers (``offloaded``), or stays with them.

        An SGLang server has one disaggregation mode, so an offloaded request runs on a PD pair
        beside the aggregated workers, from prefill to its last token.
        """
        self._offloaded = [charge for charge in self._offloaded if not charge.released]
        if ask.work.tokens - colocated.matched_tokens <= self.settings.heavy_threshold:
            return "light"
        if prefill is None or decode is None:
            return "no pair"
        if prefill.matched_tokens < self.settings.offload_min_cached * ask.work.tokens:
            return "cold"
        if len(self._offloaded) >= self.settings.max_offload_inflight:
            return "capped"
        return "offloaded"

    def _missing(self, exclude: Collection[str]) -> str:
        lacking = [
            f"{role} worker"
            for role, pool in self.pools.items()
            if pool and not any(w.up and w.url not in exclude for w in pool)
        ]
        tried = f" (attempted: {', '.join(exclude)})" if exclude else ""
        return f"no {' and no '.join(lacking)} is available{tried}"


class DecisionLog:
    """A JSON line a decision, with every term of every candidate's score; written at once, so that
    a crash loses none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, ask: Ask, route: Route, attempt: int, at: float) -> None:
        """``at``: seconds since the epoch. ``attempt``: 0, or how often it was sent elsewhere."""
        line = {
            "at": at,
            "rid": ask.rid,
            "session": ask.session,
            "path": ask.path,
            "tokens": ask.work.tokens,
            "reserve_tokens": ask.work.reserve_tokens,
            "attempt": attempt,
            "offload": route.offload,
            "taken": list(route.charges),
            "pools": {role: _told(pick) for role, pick in route.picks.items()},
        }
        self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()


def _told(pick: Pick) -> dict[str, object]:
    candidates = [view._asdict() for view in pick.views]
    for candidate, terms in zip(candidates, pick.choice.terms, strict=False):
        candidate |= {"score": terms.score, "terms": terms.parts}
    return {
        "policy": pick.policy,
        "reason": pick.choice.reason,
        "chosen": pick.worker.url,
        "candidates": candidates,
    }
