"""An estimate as a table with formulas, as answers, and what both leave out."""

from __future__ import annotations

import math
from typing import NamedTuple

from benchmark.worth_it.arithmetic import Split
from benchmark.worth_it.estimate import Estimate

GIB = 2**30
LATENT_SCALES = 80
"""Bytes that SGLang adds to an fp8 latent row of 512 + 64 elements: 4 scales of 4 bytes, and a
second byte for each element of the rope (``calculate_mla_kv_cache_dim``)."""

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
"""Limits of the arithmetic."""


class Term(NamedTuple):
    """A row of the table."""

    name: str
    formula: str
    value: str


def terms(estimate: Estimate) -> list[Term]:
    """Return the rows, those in seconds only with rates."""
    work, (whole, delta) = estimate.work, estimate.moved
    saved = (whole - delta) * estimate.token_bytes
    rows = [
        Term("KV of a token", f"b = {estimate.shape.formula}", f"{estimate.shape.token_bytes:,} B"),
        Term(
            f"on the {estimate.ranks} ranks of a server",
            "latents and too few heads are copied to each rank",
            f"{estimate.ranks} x {estimate.rank_bytes:,} B",
        ),
        Term(
            "decode pool of a server",
            "T",
            f"{estimate.pool:,} tokens, {estimate.pool * estimate.rank_bytes / GIB:.1f} GiB a rank",
        ),
        Term(
            "prompt of a mean turn",
            "L = prefix P + history H + new N",
            f"{work.prompt:,.0f} = {work.shared:,.0f} + {work.history:,.0f} + {work.new:,.0f}",
        ),
        Term("requests that fit, stock", "T / (L + A)", f"{estimate.without:,}"),
        Term(
            "requests that fit, radix cache",
            f"(T - {work.prefixes} x P) / (H + N + A)",
            f"{estimate.fit:,}",
        ),
        Term(
            "histories that stay in the trees",
            "the same x decode servers / sessions, at most 1",
            f"{estimate.kept:.0%} of {work.sessions:,}",
        ),
        Term(
            "prefix hit on decode",
            "P + H x that share, in whole pages"
            if estimate.hit_rate is None
            else "hit rate x L, in whole pages",
            f"{estimate.hit:,} tokens, {estimate.hit / work.prompt:.0%}",
        ),
        Term(
            "KV moved a turn, stock", "L x b, in whole pages", _bytes(whole * estimate.token_bytes)
        ),
        Term("KV moved a turn, radix cache", "(L - hit) x b", _bytes(delta * estimate.token_bytes)),
        Term("saved a turn", "hit x b", _bytes(saved)),
    ]
    if estimate.ranks == 1:
        del rows[1]
    return rows + (_timed(estimate, saved) if estimate.rates else [])


def _timed(estimate: Estimate, saved: int) -> list[Term]:
    work, rates = estimate.work, estimate.rates
    assert rates is not None
    stock, radix, local = estimate.ttft(work.new)
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
            f"{work.new + estimate.lost:,.0f} tokens",
        ),
        Term("wire time saved a turn", "hit x b / W", _ms(saved / rates.wire)),
        Term("TTFT without queues, stock", "(N + R) / Vp + L x b / W", _ms(stock)),
        Term("TTFT without queues, radix cache", "(N + R) / Vp + m x b / W", _ms(radix)),
        Term("TTFT without queues, local turn", "m / Vd + (m / c - 1) x s", _ms(local)),
        Term(
            "chunk of a local turn; decode step",
            "c = the setting, at most (ITL bound - s) x Vd",
            f"{estimate.chunk_tokens:,.0f} tokens; s = {step}",
        ),
        Term(
            "local turns win up to",
            "m* = ((R + N - m) / Vp + s) / (1 / Vd + s / c - 1 / Vp - b / W)",
            _tokens(estimate.longest_local),
        ),
        Term("longest gap, aggregated", "s + N / Vp", _ms(estimate.aggregated_gap_s)),
    ]
    if (split := estimate.split) is None:
        return rows
    x, y = estimate.prefill_servers, estimate.decode_servers
    return [
        *rows,
        Term("server time for the prompt of a turn", "N / Vp", _ms(split.prefill_s)),
        Term(
            "server time for its answer",
            f"A x s / B, B = {estimate.batch} running",
            _ms(split.decode_s),
        ),
        Term(
            f"turns/s of {x + y} aggregated servers",
            f"{x + y} / (prompt + answer x 1 to {(x + y) / y:g})",
            "{:.2f} to {:.2f}".format(*split.aggregated),
        ),
        Term(
            f"turns/s of {x}P {y}D",
            f"min({x} x Vp / (N + R), {y} / answer)",
            f"{split.disaggregated:.2f}, {_ratios(split)} of it",
        ),
    ]


def answers(estimate: Estimate) -> list[str]:
    """Return what the terms say, in sentences."""
    said = [_radix(estimate)]
    if estimate.rates is None:
        missing = "--network-gb-s and --prefill-tokens-per-s"
        return [*said, f"Local turns, PD itself: not computed without {missing}."]
    return [*said, _local(estimate), _pd(estimate)]


def _radix(estimate: Estimate) -> str:
    (whole, delta), work = estimate.moved, estimate.work
    if not estimate.hit:
        return "The decode radix cache does not pay: decode holds no part of a later prompt."
    fits = f"{estimate.fit:,} requests fit instead of {estimate.without:,}"
    if estimate.fit == estimate.without:
        fits = f"as many requests fit: {estimate.fit:,}"
    text = f"The decode radix cache moves {1 - delta / whole:.0%} less KV, and {fits}."
    if work.prefixes * work.shared > estimate.pool:
        text += " The prefixes alone do not fit into the pool, so nothing is shared."
    if estimate.kept < 1:
        text += (
            f" Only {estimate.kept:.0%} of the histories fit: more decode memory, or fewer "
            "sessions a server, would raise the hits."
        )
    return text


def _local(estimate: Estimate) -> str:
    longest, missing = estimate.longest_local, estimate.work.new + estimate.lost
    if estimate.chunk_tokens <= 0:
        return "Local turns do not pay: the ITL bound is shorter than a decode step."
    verdict = "a mean turn wins" if missing <= longest else "for a mean turn prefill wins"
    return (
        f"Local turns win up to {_tokens(longest)} that decode lacks: {verdict} "
        f"({missing:,.0f}). --disaggregation-decode-local-tokens is this bound. A queue on "
        "prefill raises it."
    )


def _pd(estimate: Estimate) -> str:
    rates, split, itl = estimate.rates, estimate.split, estimate.itl_s
    assert rates is not None
    if split is None:
        return "PD itself: not computed without --decode-step-ms."
    servers = estimate.prefill_servers + estimate.decode_servers
    cost = f"{_ratios(split)} of the turns/s of {servers} aggregated servers"
    if itl is None:
        return (
            f"PD gives {cost}, and no gap of {_ms(estimate.aggregated_gap_s)} between two tokens. "
            "--itl-ms says which matters."
        )
    if estimate.aggregated_gap_s <= itl:
        return (
            f"PD does not pay: aggregated servers keep {_ms(itl)} between two tokens "
            f"({_ms(estimate.aggregated_gap_s)}), and PD gives {cost}."
        )
    if rates.step_s > itl:
        return f"PD does not help: a decode step alone is longer than {_ms(itl)}."
    return (
        f"PD can pay: it keeps {_ms(itl)} between two tokens, and aggregated servers do not "
        f"({_ms(estimate.aggregated_gap_s)}: SGLang computes a prompt without a decode step in "
        f"between). It gives {cost}."
    )


def notes(estimate: Estimate) -> list[str]:
    """Return how the model differs from the form of ``Shape.token_bytes``."""
    shape, texts = estimate.shape, []
    if shape.window_layers:
        texts.append(
            f"{shape.window_layers} of {shape.layers} layers see {shape.window_tokens} tokens. "
            "The decode radix cache needs --disable-hybrid-swa-memory, by which they hold all "
            "tokens, as here. Stock servers can keep those layers in a smaller pool, so more "
            "requests fit there than this table says."
        )
    if shape.index_bytes and shape.dtype_bytes == 1:
        scaled = shape.head_dim + LATENT_SCALES
        texts.append(
            "With fp8, most backends of sparse attention store scales and a bfloat16 rope with a "
            f"latent: {scaled} B a layer instead of {shape.head_dim}. This is not counted."
        )
    if shape.state_layers:
        texts.append(
            f"{shape.state_layers} layers keep a recurrent state for each request, which is "
            "moved whole and not counted here."
        )
    return texts


def _ratios(split: Split) -> str:
    return "{:.0%} to {:.0%}".format(*split.ratios)


def _bytes(number: float) -> str:
    return f"{number / 1e9:,.3f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _tokens(number: float) -> str:
    return "each length" if math.isinf(number) else f"{number:,.0f} tokens"
