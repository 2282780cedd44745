"""One estimate: from the model's KV, a mean turn and the servers' speeds to terms and answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from benchmark.kv_transfer.shapes import Shape
from benchmark.worth_it import arithmetic
from benchmark.worth_it.arithmetic import Rates, Split, Workload

GIB = 2**30

UNKNOWN = (
    "Queues: each time is that of a request that waits for no other. Under load, queues decide.",
    "Speeds: prefill tokens/s fall with the length of the prompt, a decode step grows with running "
    "requests and their KV, and transfers that overlap share the wire. Measure them at your load.",
    "Overlap: prefill sends chunks while it computes the next ones, so that a transfer delays the "
    "first token by less than its seconds here.",
    "Routing: a turn hits only on the decode server that has its history.",
    "Aggregated decode: with fewer requests a step takes as long, or less in proportion. The range "
    "of turns/s has both ends.",
    "Eviction: histories are evicted at random here, and by least recent use on a server.",
    "Aggregated servers have several caches, PD's prefill servers fewer: their hit rates differ.",
)
"""What arithmetic does not show."""


class Term(NamedTuple):
    """A row of the table."""

    name: str
    formula: str
    value: str


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
        """Share of a decode server's sessions whose history stays in its tree."""
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

    @cached_property
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

    # ---- table ----

    def terms(self) -> list[Term]:
        """Return the rows, those in seconds only with rates."""
        work, (whole, delta) = self.work, self.moved
        saved = (whole - delta) * self.token_bytes
        rows = [
            Term("KV of a token", f"b = {self.shape.formula}", f"{self.shape.token_bytes:,} B"),
            Term(
                f"on the {self.ranks} ranks of a server",
                "latents and too few heads are copied to each rank",
                f"{self.ranks} x {self.rank_bytes:,} B",
            ),
            Term(
                "decode pool of a server",
                "T",
                f"{self.pool:,} tokens, {self.pool * self.rank_bytes / GIB:.1f} GiB a rank",
            ),
            Term(
                "prompt of a mean turn",
                "L = prefix P + history H + new N",
                f"{work.prompt:,.0f} = {work.shared:,.0f} + {work.history:,.0f} + {work.new:,.0f}",
            ),
            Term("requests that fit, stock", "T / (L + A)", f"{self.without:,}"),
            Term(
                "with the decode radix cache",
                f"(T - {work.prefixes} x P) / (H + N + A)",
                f"{self.fit:,}",
            ),
            Term(
                "histories that stay in the trees",
                "the same x decode servers / sessions, at most 1",
                f"{self.kept:.0%} of {work.sessions:,}",
            ),
            Term(
                "prefix hit on decode",
                "P + H x that share, in whole pages"
                if self.hit_rate is None
                else "hit rate x L, in whole pages",
                f"{self.hit:,} tokens, {self.hit / work.prompt:.0%}",
            ),
            Term(
                "KV moved a turn, stock", "L x b, in whole pages", _bytes(whole * self.token_bytes)
            ),
            Term("with the decode radix cache", "(L - hit) x b", _bytes(delta * self.token_bytes)),
            Term("saved a turn", "hit x b", _bytes(saved)),
        ]
        if self.ranks == 1:
            del rows[1]
        return rows + (self._timed(saved) if self.rates else [])

    def _timed(self, saved: int) -> list[Term]:
        work, rates = self.work, self.rates
        assert rates is not None
        stock, radix, local = self.ttft(work.new)
        step = f"{rates.step_s * 1e3:g} ms" if rates.step_s else "unknown, 0 here"
        rows = [
            Term(
                "last answer, which prefill computes again",
                "R = A in all turns but the first; from a trace 0",
                f"{work.again:,.0f} tokens",
            ),
            Term(
                "tokens that decode lacks, with the history",
                "m = N and a rest of a page",
                f"{work.new + self.lost:,.0f} tokens",
            ),
            Term("wire time saved a turn", "hit x b / W", _ms(saved / rates.wire)),
            Term("TTFT without queues, stock", "(N + R) / Vp + L x b / W", _ms(stock)),
            Term("with the radix cache", "(N + R) / Vp + m x b / W", _ms(radix)),
            Term("as a local turn", "m / Vd + (m / c - 1) x s", _ms(local)),
            Term(
                "chunk of a local turn; decode step",
                "c = the setting, at most (ITL bound - s) x Vd",
                f"{self.chunk_tokens:,.0f} tokens; s = {step}",
            ),
            Term(
                "local turns win up to",
                "m* = ((R + N - m) / Vp + s) / (1 / Vd + s / c - 1 / Vp - b / W)",
                _tokens(self.longest_local),
            ),
            Term("longest gap, aggregated", "s + N / Vp", _ms(self.aggregated_gap_s)),
        ]
        if (split := self.split) is None:
            return rows
        x, y = self.prefill_servers, self.decode_servers
        return [
            *rows,
            Term("a server's time for a turn's prompt", "N / Vp", _ms(split.prefill_s)),
            Term(
                "for its answer",
                f"A x s / B, B = {self.batch} running",
                _ms(split.decode_s),
            ),
            Term(
                f"turns/s of {x + y} aggregated servers",
                f"{x + y} / (prompt + answer x 1 to {(x + y) / y:g})",
                "{:.2f} to {:.2f}".format(*split.aggregated),
            ),
            Term(
                f"of {x}P {y}D",
                f"min({x} x Vp / (N + R), {y} / answer)",
                f"{split.disaggregated:.2f}, {_ratios(split)} of it",
            ),
        ]

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

    # ---- answers ----

    def answers(self) -> list[str]:
        """Return what the terms say, in sentences."""
        said = [self._radix()]
        if self.rates is None:
            missing = "--network-gb-s and --prefill-tokens-per-s"
            return [*said, f"Local turns, PD itself: not computed without {missing}."]
        return [*said, self._local(), self._pd()]

    def _radix(self) -> str:
        (whole, delta), work = self.moved, self.work
        if not self.hit:
            return "The decode radix cache does not pay: decode holds no part of a later prompt."
        fits = f"{self.fit:,} requests fit instead of {self.without:,}"
        if self.fit == self.without:
            fits = f"as many requests fit: {self.fit:,}"
        text = f"The decode radix cache moves {1 - delta / whole:.0%} less KV, and {fits}."
        if work.prefixes * work.shared > self.pool:
            text += " The prefixes alone do not fit into the pool, so nothing is shared."
        if self.kept < 1:
            text += (
                f" Only {self.kept:.0%} of the histories fit: more decode memory, or fewer "
                "sessions a server, would raise the hits."
            )
        return text

    def _local(self) -> str:
        longest, missing = self.longest_local, self.work.new + self.lost
        if self.chunk_tokens <= 0:
            return "Local turns do not pay: the ITL bound is shorter than a decode step."
        verdict = "a mean turn wins" if missing <= longest else "for a mean turn prefill wins"
        return (
            f"Local turns win up to {_tokens(longest)} that decode lacks: {verdict} "
            f"({missing:,.0f}). --disaggregation-decode-local-tokens is this bound. A queue on "
            "prefill raises it."
        )

    def _pd(self) -> str:
        rates, split, itl = self.rates, self.split, self.itl_s
        assert rates is not None
        if split is None:
            return "PD itself: not computed without --decode-step-ms."
        servers = self.prefill_servers + self.decode_servers
        cost = f"{_ratios(split)} of the turns/s of {servers} aggregated servers"
        if itl is None:
            return (
                f"PD gives {cost}, and no gap of {_ms(self.aggregated_gap_s)} between two tokens. "
                "--itl-ms says which matters."
            )
        if self.aggregated_gap_s <= itl:
            return (
                f"PD does not pay: aggregated servers keep {_ms(itl)} between two tokens "
                f"({_ms(self.aggregated_gap_s)}), and PD gives {cost}."
            )
        if rates.step_s > itl:
            return f"PD does not help: a decode step alone is longer than {_ms(itl)}."
        return (
            f"PD can pay: it keeps {_ms(itl)} between two tokens, and aggregated servers do not "
            f"({_ms(self.aggregated_gap_s)}: SGLang computes a prompt without a decode step in "
            f"between). It gives {cost}."
        )

    def notes(self) -> list[str]:
        """Return what this model has beside KV that the forms count."""
        shape, notes = self.shape, []
        if shape.window_layers:
            notes.append(
                f"{shape.window_layers} of {shape.layers} layers see {shape.window_tokens} tokens. "
                "The decode radix cache needs --disable-hybrid-swa-memory, by which they hold all "
                "tokens, as here. Stock servers can keep those layers in a smaller pool, so more "
                "requests fit there than this table says."
            )
        if shape.state_layers:
            notes.append(
                f"{shape.state_layers} layers keep a recurrent state for each request, which is "
                "moved whole and not counted here."
            )
        return notes


def _ratios(split: Split) -> str:
    return "{:.0%} to {:.0%}".format(*split.ratios)


def _bytes(number: float) -> str:
    return f"{number / 1e9:,.3f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _tokens(number: float) -> str:
    return "each length" if math.isinf(number) else f"{number:,.0f} tokens"
