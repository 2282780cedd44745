"""Sentences from numbers. Arms are called different only if the interval of their ratio excludes 1,
over at least three rounds. An arm is called best only if it is worse in nothing."""

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
"""Quantities shown of a grid."""
SHARE = 0.9
"""Share of requests that must meet the SLO for an arm to hold a load."""
BUSY_CELLS = 0.1
"""Share of measured loads above which a busy machine leaves no verdict."""
LATE_S = 0.05
"""Delay above which the client is called the bottleneck."""


def grid_sure(run: Run) -> float:
    """Return the confidence of one interval at one load of a grid, so that all intervals of a load
    (each arm over the first, in each quantity) hold together with 95 %."""
    return 1 - 0.05 / (len(AGAINST) * max(1, len(run.titles) - 1))


def said(run: Run, point: str) -> str:
    """Return a load as a sentence names it."""
    head, *over = point.split(", ")
    unit = run.study.load.unit
    return ", ".join((f"{head} {unit.replace('s at', ' at') if head == '1' else unit}", *over))


def measured(run: Run, run_numbers: Numbers, point: str) -> list[str]:
    """Return the arms of a load, in the page's order."""
    there = set(run_numbers.cells.loc[point].index.get_level_values("arm"))
    return [arm for arm in run.titles if arm in there]


def answer(run: Run, run_numbers: Numbers) -> str:
    """Return the verdict for each load: which arm is best, or the trade between arms."""
    rounds = int(run_numbers.cells.groupby(level=["point", "arm"]).size().min())
    if rounds < ROUNDS:
        return (
            f"**No verdict: {rounds} round{'s' * (rounds != 1)} measured, and a verdict needs at "
            f"least {ROUNDS}.**"
        )
    busy = [cell for cell in run.cells if cell.contention and cell.contention.busy]
    if len(busy) > BUSY_CELLS * len(run.cells):
        return (
            f"**No verdict: the machine was busy.** In {len(busy)} of {len(run.cells)} loads the "
            "servers waited for a CPU that other processes used: run it again on a quiet machine."
        )
    points = [point.name for point in run.points]
    if run.study.grid and len(run.titles) > 1:
        return _over_a_grid(run, run_numbers, points)
    # All ratios of the page hold together with 95 % (Bonferroni), so that equal arms get a verdict
    # on one page in twenty.
    pairs = max(1, math.comb(len(run.titles), 2))
    sure = 1 - 0.05 / (len(AGAINST) * pairs * len(points))
    return "\n".join(
        "- " * (len(points) > 1) + _headline(run, run_numbers, point, sure) for point in points
    )


def _over_a_grid(run: Run, run_numbers: Numbers, points: Sequence[str]) -> str:
    """Return the number of loads at which each arm is better and worse than the first one."""
    (base, *others), sure = run.titles, grid_sure(run)
    parts = []
    for arm in others:
        there = [point for point in points if {base, arm} <= set(measured(run, run_numbers, point))]
        counts = []
        for quantity in SHOWN:
            ratios = (run_numbers.ratio(point, (arm, base), quantity, sure=sure) for point in there)
            sides = Counter(better(quantity, ratio) for ratio in ratios)
            counts.append(f"{AGAINST[quantity]} at {sides[1]}, worse at {sides[-1]}")
        parts.append(f"**{run.titles[arm]}** is better in {'; in '.join(counts)}")
    return (
        f"Of {len(points)} loads, against {run.titles[base]}: {'. '.join(parts)}. At the others "
        "there is no verdict. Each load is compared by itself, at 95 % over its "
        f"{len(AGAINST)} quantities of each arm."
    )


def better(quantity: str, ratio: Interval) -> int:
    """Return 1 if the first of two arms is better beyond the interval, -1 if worse, else 0."""
    side = (ratio.low > 1) - (ratio.high < 1)
    return side if quantity == "goodput" else -side


def best(
    arms: Sequence[str], wins: Mapping[tuple[str, str], Any], loses: Mapping[tuple[str, str], Any]
) -> str | None:
    """Return the arm that is worse than no other in anything, and better than each in something.

    ``wins``: for each ordered pair, the quantities in which the first arm is better. ``loses``:
    True if the first arm is worse in a quantity.
    """
    for arm in arms:
        if all(wins[arm, o] and not loses[arm, o] for o in arms if o != arm):
            return arm
    return None


def _headline(run: Run, run_numbers: Numbers, point: str, sure: float) -> str:
    """Return one or two sentences about one load."""
    titles, at, by = run.titles, f"At {said(run, point)}", f"{run.study.by}_mean"
    if len(arms := measured(run, run_numbers, point)) < 2:
        mean = interval(run_numbers.cells.loc[point, arms[0]][by])
        return (
            f"{at}, {titles[arms[0]]} has a mean {AGAINST[by]} of "
            f"{spread([x * 1e3 for x in mean], ',.0f', ' ms')}."
        )
    wins, loses, ratios = {}, {}, {}
    for pair in permutations(arms, 2):
        ratios[pair] = {q: run_numbers.ratio(point, pair, q, sure=sure) for q in AGAINST}
        wins[pair] = [q for q, x in ratios[pair].items() if better(q, x) > 0]
        loses[pair] = any(better(q, run_numbers.ratio(point, pair, q)) < 0 for q in AGAINST)
    if not any(wins.values()):
        over_first = [f"{titles[a]} {share(ratios[a, arms[0]][by])}" for a in arms[1:]]
        return (
            f"{at}, **no verdict**: no arm differs from another by more than the interval; "
            f"{AGAINST[by]} over that of {titles[arms[0]]}: {', '.join(over_first)}."
        )
    gains: dict[tuple[str, str], list[str]] = {}
    for q in AGAINST:
        values = {arm: 1.0 if arm == arms[0] else ratios[arm, arms[0]][q].value for arm in arms}
        first, second, *_ = sorted(arms, key=values.get, reverse=q == "goodput")
        pair = (first, second if first == arms[0] else arms[0])
        if q in wins[pair]:
            gains.setdefault(pair, []).append(f"{share(ratios[pair][q])} times the {AGAINST[q]}")
    parts = [f"*{titles[a]}* has {', '.join(x)} of *{titles[b]}*" for (a, b), x in gains.items()]
    head = "a trade" if any(wins[a, b] and wins[b, a] for a, b in wins) else "no arm is best"
    if name := best(arms, wins, loses):
        head = f"{titles[name]} is best"
    return ": ".join(filter(None, (f"{at}, **{head}**", "; ".join(parts)))) + "."


def holds(run: Run, run_numbers: Numbers) -> Iterator[str]:
    """Yield, for each arm, the loads at which it meets the SLO."""
    for arm, title in run.titles.items():
        cells = run_numbers.cells.xs(arm, level="arm").groupby(level="point")
        met = (cells["slo"].mean() >= SHARE) & (cells["failed"].sum() == 0)
        held = [point.name for point in run.points if met.get(point.name, False)]
        where = f": {'; '.join(held)}" if held else ""
        yield f"**{title}** meets the SLO at {len(held)} of {len(met)} loads{where}."


def warnings(run: Run, run_numbers: Numbers) -> Iterator[str]:
    """Yield the warnings to read before the numbers."""
    late = []
    for (point, arm), cells in run_numbers.cells.groupby(level=["point", "arm"], sort=False):
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
    counts = {arm: sum(by_role.values()) for arm, by_role in run.servers.items()}
    if len(set(counts.values()) - {0}) > 1:
        of_arms = ", ".join(f"{run.titles[arm]}: {n or 'unknown'}" for arm, n in counts.items())
        yield (
            f"**The arms have different numbers of servers** ({of_arms}): differences between "
            "them include that of the hardware."
        )
    yield from _busy(run)
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
    """Return the number of requests answered in several arms, and how many of these were answered
    differently; None if answers were not read."""
    arm_answers: dict[tuple[int, Point, int], set[tuple[str, str]]] = {}
    for cell in run.cells:
        for o in cell.outcomes:
            if o.answer is not None:
                key = (cell.round, cell.key[2], o.index)
                arm_answers.setdefault(key, set()).add((cell.arm, o.answer))
    several = [
        {text for _, text in pairs}
        for pairs in arm_answers.values()
        if len({arm for arm, _ in pairs}) > 1
    ]
    return (len(several), sum(len(texts) > 1 for texts in several)) if arm_answers else None


def _busy(run: Run) -> Iterator[str]:
    """Yield a warning about loads during which other processes used the CPU."""
    busy = [cell for cell in run.cells if cell.contention and cell.contention.busy]
    if busy:
        where = dict.fromkeys(f"{run.titles[cell.arm]} at {cell.key[2].name}" for cell in busy)
        worst = max(busy, key=lambda cell: cell.contention.waited).contention
        yield (
            f"**The machine was busy** in {len(busy)} of {len(run.cells)} loads: "
            f"{', '.join(where)}. At worst the servers waited for a CPU in {worst.waited:.0%} of "
            f"their runnable time, and other processes took {worst.others:.0%} of the CPU time."
        )


def _few(run: Run) -> Iterator[str]:
    """Yield a warning about windows that closed before enough requests had begun."""
    if (window := run.study.load.window) is None:
        return
    sent, lines = {o.request_class for cell in run.cells for o in cell.outcomes}, {}
    for cell in sorted(run.cells, key=lambda cell: len(cell.counted)):
        made = run.study.made and cell.key[2].made(run.study.made)
        counts = Counter(o.request_class for o in cell.counted)
        lacking = [n for n in (made.classes if made else sent) if counts[n] < window.of_class]
        if counts.total() < window.requests or lacking:
            of_class = "".join(f", {counts[name]} of {name}" for name in sorted(lacking))
            where = f"{run.titles[cell.arm]} at {cell.key[2].name}"
            lines.setdefault(where, f"{where} ({counts.total()}{of_class})")
    if lines:
        yield (
            f"**Fewer requests of a round than asked for** ({window.requests}, and "
            f"{window.of_class} of each class) began within {window.limit_s:g} s "
            f"(here the fewest of a round): {'; '.join(lines.values())}."
        )


def claims(run: Run, run_numbers: Numbers) -> list[dict[str, Any]]:
    """Return the claims whose arms and load were measured, each with ``ours`` and ``verdict``:
    *agrees*, *does not agree*, or *no verdict* if the interval contains the bound or is missing."""
    columns = {name.partition("_")[0]: name for name in (*AGAINST, "requests_per_s", COMPUTED)}
    checked = []
    for claim in run.study.claims:
        for point in (point for point in run.points if claim.at in (None, point.load)):
            name, there = columns[claim.of], measured(run, run_numbers, point.name)
            if claim.arm not in there or claim.over not in (None, *there):
                continue
            if claim.over is None:
                ours = interval(run_numbers.cells.loc[point.name, claim.arm][name], least=ROUNDS)
            else:
                arms, kind = (claim.arm, claim.over), claim.request_class or ""
                ours = run_numbers.ratio(point.name, arms, name, kind)
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
            checked.append({**named, "ours": ours, "verdict": verdict})
    return checked


def share(numbers: Sequence[float]) -> str:
    return spread(numbers, ".2f")


def percent(numbers: Sequence[float]) -> str:
    value, low, high = numbers
    return spread((value, max(low, 0.0), min(high, 1.0)), ".0%")


def spread(numbers: Sequence[float], form: str, unit: str = "") -> str:
    """Return a number, with its interval if it has one."""
    value, low, high = numbers
    if math.isnan(value):
        return "-"
    if math.isnan(low):
        return f"{value:{form}}{unit}"
    return f"{value:{form}}{unit} [{low:{form}}, {high:{form}}]"
