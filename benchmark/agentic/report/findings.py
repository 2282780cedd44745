"""Sentences from numbers: what a reader would look for first. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmark.agentic.report.measure import Measured

NOISE = 0.05
"""Relative differences below this are not called differences: one run an arm cannot tell them."""


def findings(arms: Sequence[Measured]) -> list[str]:
    """One sentence each; only of arms that were measured."""
    by_name = {measured.arm.name: measured for measured in arms}
    return [*_radix(by_name), *_delta(by_name), *_linear_and_lmetric(by_name), *_warnings(arms)]


def ratio(value: float, base: float) -> float:
    """``value`` over ``base``; NaN of nothing."""
    return value / base if base else float("nan")


def compared(what: str, value: float, base: float, less_is_better: bool) -> str:
    """``TTFT p50 0.63 of it (better)``: a ratio, and whether it is one worth naming."""
    share = ratio(value, base)
    if share != share:  # nothing to compare with
        return f"{what} not measured"
    if abs(share - 1) <= NOISE:
        word = "no difference"
    else:
        word = "better" if (share < 1) == less_is_better else "worse"
    return f"{what} {share:.2f} ({word})"


def _against(measured: Measured, base: Measured) -> str:
    mine, other = measured.report.overall, base.report.overall
    return ", ".join(
        (
            compared("requests/s", mine.requests_per_s, other.requests_per_s, False),
            compared("TTFT p50", mine.ttft_s.p50, other.ttft_s.p50, True),
            compared("TTFT p99", mine.ttft_s.p99, other.ttft_s.p99, True),
            compared("TPOT p50", mine.tpot_s.p50, other.tpot_s.p50, True),
        )
    )


def _radix(arms: Mapping[str, Measured]) -> Iterator[str]:
    stock, patched = arms.get("1P1D stock"), arms.get("1P1D patched")
    radix, spinning = arms.get("1P1D radix, same router"), arms.get("1P1D radix, spinning")
    if stock and patched:
        yield (
            "**1P1D, patched without a flag against the stock release** (same router; above all "
            f"NIXL's progress thread, which spins in stock): of stock's numbers: "
            f"{_against(patched, stock)}."
        )
    for base, name in ((patched, "patched without it"), (stock, "the stock release")):
        if base and radix:
            moved = ratio(radix.traffic.bytes_moved, base.traffic.bytes_moved)
            yield (
                f"**1P1D, decode radix cache against {name}** (same router): it moves "
                f"{moved:.2f} of the bytes; of its numbers: {_against(radix, base)}."
            )
    if stock and spinning:
        yield (
            "**1P1D, decode radix cache with a spinning progress thread, as stock's**: of stock's "
            f"numbers: {_against(spinning, stock)}."
        )


def _delta(arms: Mapping[str, Measured]) -> Iterator[str]:
    base, delta = arms.get("1P2D round_robin"), arms.get("1P2D delta_kv")
    if base and delta:
        moved = ratio(delta.traffic.bytes_moved, base.traffic.bytes_moved)
        verdict = "at most 0.6 as asked" if moved <= 0.6 else "**more than the 0.6 asked**"
        yield (
            f"**1P2D, decode routed by delta KV against round robin**: it moves {moved:.2f} of "
            f"the bytes ({verdict}); of round robin's numbers: {_against(delta, base)}."
        )


def _linear_and_lmetric(arms: Mapping[str, Measured]) -> Iterator[str]:
    for place in ("colocated", "1P2D"):
        linear, lmetric = arms.get(f"{place} linear"), arms.get(f"{place} lmetric")
        if linear and lmetric:
            mine, other = linear.report.overall.hit_rate, lmetric.report.overall.hit_rate
            what = f"hit rate {mine:.1%} and {other:.1%}"
            if place == "1P2D":
                moved = ratio(lmetric.traffic.bytes_moved, linear.traffic.bytes_moved)
                what = f"lmetric moves {moved:.2f} of the bytes"
            yield (
                f"**linear and lmetric, {place}**: {what}; lmetric over linear: "
                f"{_against(lmetric, linear)}."
            )


def _warnings(arms: Sequence[Measured]) -> Iterator[str]:
    late = [
        f"{m.arm.name} ({client.late_p99_s * 1e3:,.0f} and {client.loop_lag_p99_s * 1e3:,.0f} ms)"
        for m in arms
        if (client := m.report.client).warnings()
    ]
    if late:
        yield (
            "**The client was a bottleneck** in these arms: it sent requests late, or read late "
            f"what had come (p99 of both): {', '.join(late)}. Their times hold that lag."
        )
    for measured in arms:
        if failed := measured.report.overall.failed:
            kinds = ", ".join(f"{n} {kind}" for kind, n in measured.report.errors.items())
            yield f"**{measured.arm.name}: {failed} requests failed** ({kinds})."
