"""One estimate: what follows from the KV of a model, a mean turn, and the servers' speeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmark.kv_transfer.shapes import Shape
from benchmark.worth_it import arithmetic
from benchmark.worth_it.arithmetic import Rates, Split, Workload


@dataclass(frozen=True)
class Estimate:
    """The inputs, and the terms that follow from them."""

    shape: Shape
    work: Workload
    pool: int
    """T: tokens of a decode server's pool."""
    page: int = 1
    ranks: int = 1
    hit_rate: float | None = None
    rates: Rates | None = None
    """None: no term in seconds."""
    chunk: int = 512
    itl_s: float | None = None
    """Longest gap between two tokens of a running request that is acceptable."""
    running: int | None = None
    """Running requests of a server; None: all sessions, or as many as fit."""
    prefill_servers: int = 1
    decode_servers: int = 1

    @property
    def rank_bytes(self) -> int:
        """Bytes of a token on a rank."""
        return self.shape.on_rank(self.ranks).token_bytes

    @property
    def token_bytes(self) -> int:
        """b: bytes of a token on all ranks of a server, which is what crosses the wire."""
        return self.rank_bytes * self.ranks

    @property
    def without(self) -> int:
        """Requests that fit without the decode radix cache."""
        return self._fit(shared=False)

    @property
    def fit(self) -> int:
        """Requests, running or between turns, that fit with it."""
        return self._fit(shared=True)

    def _fit(self, *, shared: bool) -> int:
        work = self.work
        own = work.history + work.new
        return arithmetic.holds(
            self.pool, work.shared, own, work.prefixes, shared=shared, reserved=work.answer
        )

    @property
    def kept(self) -> float:
        """Share of the sessions with their history in the tree of a decode server."""
        return min(1.0, self.fit * self.decode_servers / self.work.sessions)

    @property
    def hit(self) -> int:
        return arithmetic.hit_tokens(self.work, self.kept, self.page, self.hit_rate)

    @property
    def moved(self) -> tuple[int, int]:
        """Tokens that prefill sends for a turn, without and with the decode radix cache."""
        prompt = self.work.prompt
        return (
            arithmetic.moved_tokens(prompt, 0, self.page),
            arithmetic.moved_tokens(prompt, self.hit, self.page),
        )

    @property
    def batch(self) -> int:
        """B: running requests of a decode server."""
        return self.running or max(
            1, min(math.ceil(self.work.sessions / self.decode_servers), self.fit)
        )

    @property
    def chunk_tokens(self) -> float:
        """c: tokens of a chunk of a local turn."""
        assert self.rates is not None
        return arithmetic.chunk_tokens(self.chunk, self.rates.local, self.itl_s, self.rates.step_s)

    @property
    def lost(self) -> float:
        """Tokens of earlier turns that decode lacks though the history is in its tree: less than a
        page."""
        known = self.work.shared + self.work.history
        return known - arithmetic.hit_tokens(self.work, 1.0, self.page)

    @property
    def longest_local(self) -> float:
        """m*: tokens that decode may lack, so that a local turn wins, if it has the history."""
        assert self.rates is not None
        return arithmetic.longest_local(
            self.work, self.lost, self.rates, self.token_bytes, self.chunk_tokens
        )

    @property
    def split(self) -> Split | None:
        """PD beside aggregated servers; None without the time of a decode step."""
        if self.rates is None or not self.rates.step_s:
            return None
        work, rates = self.work, self.rates
        return Split(
            self.prefill_servers,
            self.decode_servers,
            work.new / rates.prefill,
            (work.new + work.again) / rates.prefill,
            work.answer * rates.step_s / self.batch,
        )

    @property
    def aggregated_gap_s(self) -> float:
        """Longest gap that a turn's prefill causes on an aggregated server."""
        assert self.rates is not None
        return self.rates.step_s + self.work.new / self.rates.prefill

    def ttft(self, new: float) -> tuple[float, float, float]:
        """Return the TTFT of a turn with ``new`` tokens, without queues, if decode has its history:
        stock, with the radix cache, and as a local turn."""
        rates, work = self.rates, self.work
        assert rates is not None
        whole, missing = work.prompt - work.new + new, self.lost + new
        computed, chunk = new + work.again, max(1.0, self.chunk_tokens)
        return (
            arithmetic.remote_s(computed, whole * self.token_bytes, rates.prefill, rates.wire),
            arithmetic.remote_s(computed, missing * self.token_bytes, rates.prefill, rates.wire),
            arithmetic.local_s(missing, rates.local, rates.step_s, chunk),
        )
