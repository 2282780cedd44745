"""Sentences from numbers. A difference is one where its interval leaves 1 out, over at least three
rounds; nothing else is called better or worse. No arm is best that pays for it in anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from benchmark.agentic.report.numbers import (
    AGAINST,
    COMPUTED,
    ROUNDS,
    Interval,
    Numbers,
    interval,
)
from benchmark.agentic.studies.record import Run
from benchmark.agentic.studies.spec import Point

SHOWN = ("ttft_mean", "itl_p99", "goodput")
"""Of a grid."""
SHARE = 0.9
"""Of requests that must meet the SLO for an arm to hold a load."""
LATE_S = 0.05
"""Above this the client is called the bottleneck."""


def grid_sure(run: Run) -> float:
    """Of the intervals of one load of a grid, so that all of them hold with 95 %: of each arm over
    the first one in each quantity."""
    return 1 - 0.05 / (len(AGAINST) * max(1, len(run.titles) - 1))


def said(run: Run, point: str) -> str:
    """A load as a sentence names it."""
    head, *over = point.split(", ")
    unit = run.study.load.unit
    return ", ".join((f"{head} {unit.replace('s at', ' at') if head == '1' else unit}", *over))


def measured(run: Run, of: Numbers, point: str) -> list[str]:
    """The arms of a load, in the page's order."""
    there = set(of.cells.loc[point].index.get_level_values("arm"))
    return [arm for arm in run.titles if arm in there]


def answer(run: Run, of: Numbers) -> str:
    """What the table says of each load: which arm is best, or which arms trade what."""
    rounds = int(of.cells.groupby(level=["point", "arm"]).size().min())
    if rounds < ROUNDS:
        return (
            f"**No verdict: {rounds} round{'s' * (rounds != 1)} measured, and a verdict needs at "
            f"least {ROUNDS}.**"
        )
    points = [point.name for point in run.points]
    if run.study.grid and len(run.titles) > 1:
        return _over_a_grid(run, of, points)
    # All ratios of the page hold together with 95 % (Bonferroni): equal arms get a verdict on one
    # page of twenty.
    pairs = max(1, math.comb(len(run.titles), 2))
    sure = 1 - 0.05 / (len(AGAINST) * pairs * len(points))
    return "\n".join("- " * (len(points) > 1) + _headline(run, of, point, sure) for point in points)


def _over_a_grid(run: Run, of: Numbers, points: Sequence[str]) -> str:
    """At how many loads each arm is better and worse than the first one."""
    (base, *others), sure = run.titles, grid_sure(run)
    parts = []
    for arm in others:
        there = [point for point in points if {base, arm} <= set(measured(run, of, point))]
        each = []
        for quantity in SHOWN:
            ratios = (of.ratio(point, (arm, base), quantity, sure=sure) for point in there)
            found = Counter(better(quantity, ratio) for ratio in ratios)
            each.append(f"{AGAINST[quantity]} at {found[1]}, worse at {found[-1]}")
        parts.append(f"**{run.titles[arm]}** is better in {'; in '.join(each)}")
    return (
        f"Of {len(points)} loads, against {run.titles[base]}: {'. '.join(parts)}. At the others "
        "there is no verdict. Each load is compared by itself, at 95 % over its "
        f"{len(AGAINST)} quantities of each arm."
    )


def better(quantity: str, ratio: Interval) -> int:
    """1 where the first of two arms is better beyond the interval, -1 where it is worse, else 0."""
    side = (ratio.low > 1) - (ratio.high < 1)
    return side if quantity == "goodput" else -side


def best(
    arms: Sequence[str], wins: Mapping[tuple[str, str], Any], loses: Mapping[tuple[str, str], Any]
) -> str | None:
    """The arm that is worse than no other in anything, and better than each in something. Of each
    ordered pair: in what the first is better than the second, and whether it is worse in anything.
    """
    for arm in arms:
        if all(wins[arm, o] and not loses[arm, o] for o in arms if o != arm):
            return arm
    return None


def _headline(run: Run, of: Numbers, point: str, sure: float) -> str:
    """A sentence or two about one load."""
    titles, at, by = run.titles, f"At {said(run, point)}", f"{run.study.by}_mean"
    if len(arms := measured(run, of, point)) < 2:
        mean = interval(of.cells.loc[point, arms[0]][by])
        return (
            f"{at}, {titles[arms[0]]} has a mean {AGAINST[by]} of "
            f"{spread([x * 1e3 for x in mean], ',.0f', ' ms')}."
        )
    wins, loses, ratios = {}, {}, {}
    for pair in permutations(arms, 2):
        ratios[pair] = {q: of.ratio(point, pair, q, sure=sure) for q in AGAINST}
        wins[pair] = [q for q, x in ratios[pair].items() if better(q, x) > 0]
        loses[pair] = any(better(q, of.ratio(point, pair, q)) < 0 for q in AGAINST)
    if not any(wins.values()):
        each = [f"{titles[a]} {share(ratios[a, arms[0]][by])}" for a in arms[1:]]
        return (
            f"{at}, **no verdict**: no arm differs from another by more than the interval; "
            f"{AGAINST[by]} over that of {titles[arms[0]]}: {', '.join(each)}."
        )
    found: dict[tuple[str, str], list[str]] = {}
    for q in AGAINST:
        of_q = {arm: 1.0 if arm == arms[0] else ratios[arm, arms[0]][q].value for arm in arms}
        one, other, *_ = sorted(arms, key=of_q.get, reverse=q == "goodput")
        pair = (one, other if one == arms[0] else arms[0])
        if q in wins[pair]:
            found.setdefault(pair, []).append(f"{share(ratios[pair][q])} times the {AGAINST[q]}")
    parts = [f"*{titles[a]}* has {', '.join(x)} of *{titles[b]}*" for (a, b), x in found.items()]
    head = "a trade" if any(wins[a, b] and wins[b, a] for a, b in wins) else "no arm is best"
    if name := best(arms, wins, loses):
        head = f"{titles[name]} is best"
    return ": ".join(filter(None, (f"{at}, **{head}**", "; ".join(parts)))) + "."


def holds(run: Run, of: Numbers) -> Iterator[str]:
    """At which loads each arm meets the SLO."""
    for arm, title in run.titles.items():
        cells = of.cells.xs(arm, level="arm").groupby(level="point")
        met = (cells["slo"].mean() >= SHARE) & (cells["failed"].sum() == 0)
        held = [point.name for point in run.points if met.get(point.name, False)]
        where = f": {'; '.join(held)}" if held else ""
        yield f"**{title}** meets the SLO at {len(held)} of {len(met)} loads{where}."


def warnings(run: Run, of: Numbers) -> Iterator[str]:
    """What a reader has to know before believing a number."""
    late = []
    for (point, arm), cells in of.cells.groupby(level=["point", "arm"], sort=False):
        times = cells[["late_p99", "read_late_p99"]].max()
        if times.max() > LATE_S:
            text = " and ".join(f"{x * 1e3:,.0f}" for x in times)
            late.append(f"{run.titles[arm]} at {point} ({text} ms)")
    if late:
        yield (
            "**The client was a bottleneck**: it sent requests late or read answers late (p99 of "
            f"both in brackets), in {', '.join(late)}. Times there include that delay."
        )
    unflushed = {text for cell in run.cells for text in cell.unflushed}
    if unflushed:
        count = len({text.partition(": ")[0] for text in unflushed})
        reasons = ", ".join(sorted({text.rpartition(": ")[2] for text in unflushed}))
        yield (
            f"**{count} server{'s' * (count > 1)} did not empty the cache between loads** "
            f"({reasons}): later loads and rounds hit what earlier ones had cached."
        )
    if run.fleet.get("flush") is False:
        yield (
            "**Caches were not emptied between loads** (`flush: false`): later loads and rounds "
            "hit what earlier ones had cached."
        )
    counts = {arm: sum(each.values()) for arm, each in run.servers.items()}
    if len(set(counts.values()) - {0}) > 1:
        of_each = ", ".join(f"{run.titles[arm]}: {n or 'unknown'}" for arm, n in counts.items())
        yield (
            f"**The arms have different numbers of servers** ({of_each}): differences between "
            "them include that of the hardware."
        )
    yield from _few(run)
    compared, different = answers(run) or (0, 0)
    if different:
        yield f"**{different} of {compared:,} answers differ between arms.**"
    if run.missing:
        yield f"Arms not measured, as the fleet has no such setup: {', '.join(run.missing)}."
    failed: dict[str, Counter[str]] = {}
    for cell in run.cells:
        where = f"{run.titles[cell.arm]} at {said(run, cell.key[2].name)}"
        failed.setdefault(where, Counter()).update(o.error for o in cell.outcomes if o.error)
    for where, errors in failed.items():
        if errors:
            yield f"**{where}: {', '.join(f'{n} {kind}' for kind, n in errors.items())}.**"


def answers(run: Run) -> tuple[int, int] | None:
    """Requests whose answers several arms have, and how many of them were answered differently;
    None where answers were not read."""
    found: dict[tuple[int, Point, int], set[tuple[str, str]]] = {}
    for cell in run.cells:
        for o in cell.outcomes:
            if o.answer is not None:
                key = (cell.round, cell.key[2], o.index)
                found.setdefault(key, set()).add((cell.arm, o.answer))
    several = [{text for _, text in of} for of in found.values() if len({arm for arm, _ in of}) > 1]
    return (len(several), sum(len(of) > 1 for of in several)) if found else None


def _few(run: Run) -> Iterator[str]:
    """Windows that closed before enough requests had begun."""
    if (window := run.study.load.window) is None:
        return
    sent, found = {o.request_class for cell in run.cells for o in cell.outcomes}, {}
    for cell in sorted(run.cells, key=lambda cell: len(cell.counted)):
        made = run.study.made and cell.key[2].made(run.study.made)
        counts = Counter(o.request_class for o in cell.counted)
        lacking = [n for n in (made.classes if made else sent) if counts[n] < window.of_class]
        if counts.total() < window.requests or lacking:
            each = "".join(f", {counts[name]} of {name}" for name in sorted(lacking))
            where = f"{run.titles[cell.arm]} at {cell.key[2].name}"
            found.setdefault(where, f"{where} ({counts.total()}{each})")
    if found:
        yield (
            f"**Fewer requests of a round than asked for** ({window.requests}, and "
            f"{window.of_class} of each class) began within {window.limit_s:g} s "
            f"(here the fewest of a round): {'; '.join(found.values())}."
        )


def claims(run: Run, of: Numbers) -> list[dict[str, Any]]:
    """Those whose arms and load were measured, each with ``ours`` and ``verdict``: *agrees*, *does
    not agree*, or *no verdict* where the interval holds the bound, or there is none."""
    columns = {name.partition("_")[0]: name for name in (*AGAINST, "requests_per_s", COMPUTED)}
    found = []
    for claim in run.study.claims:
        for point in (each for each in run.points if claim.at in (None, each.load)):
            name, there = columns[claim.of], measured(run, of, point.name)
            if claim.arm not in there or claim.over not in (None, *there):
                continue
            if claim.over is None:
                ours = interval(of.cells.loc[point.name, claim.arm][name], least=ROUNDS)
            else:
                arms, kind = (claim.arm, claim.over), claim.request_class or ""
                ours = of.ratio(point.name, arms, name, kind)
            low = -math.inf if claim.at_least is None else claim.at_least
            high = math.inf if claim.at_most is None else claim.at_most
            verdict = "no verdict"
            if low <= ours.low and ours.high <= high:
                verdict = "agrees"
            elif ours.high < low or ours.low > high:
                verdict = "does not agree"
            bounds = (("at most", claim.at_most), ("at least", claim.at_least))
            bound = " and ".join(f"{word} {x:g}" for word, x in bounds if x is not None)
            theirs = f"{claim.theirs}; {bound}" if claim.theirs else bound
            named: dict[str, Any] = {"claim": claim.text, "load": point.name, "theirs": theirs}
            found.append({**named, "ours": ours, "verdict": verdict})
    return found


def share(of: Sequence[float]) -> str:
    return spread(of, ".2f")


def percent(of: Sequence[float]) -> str:
    value, low, high = of
    return spread((value, max(low, 0.0), min(high, 1.0)), ".0%")


def spread(of: Sequence[float], form: str, unit: str = "") -> str:
    """A number, and its interval where it has one."""
    value, low, high = of
    if math.isnan(value):
        return "-"
    if math.isnan(low):
        return f"{value:{form}}{unit}"
    return f"{value:{form}}{unit} [{low:{form}}, {high:{form}}]"
