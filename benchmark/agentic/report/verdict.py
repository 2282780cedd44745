"""Sentences from numbers. A difference is one where its interval leaves 1 out, over at least three
rounds; nothing else is called better or worse. No arm is best that pays for it in anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmark.agentic.load.outcome import client
from benchmark.agentic.report.numbers import NAMES, Interval, Level, plain
from benchmark.agentic.studies.record import Run
from benchmark.agentic.studies.spec import Claim, Point

ROUNDS = 3
"""Fewer give no verdict: what lies between two runs of one arm is not known then."""
AGAINST = {**NAMES, "itl": "ITL p99", "goodput": "goodput"}
"""What arms are compared by: an arm is best only if no other one is better in any of these."""
SHOWN = ("ttft", "itl", "goodput")
"""Of a grid."""
CELL = 1 - 0.05 / len(AGAINST)
"""How sure the intervals of one cell of a grid are, so that all of them hold with 95 %."""
SHARE = 0.9
"""Of requests that must meet the SLO for an arm to hold a load."""


def answer(run: Run, levels: Sequence[Level]) -> str:
    """What the table says of each load: which arm is best, or which arms trade what."""
    rounds = min((level.rounds for level in levels), default=0)
    if rounds < ROUNDS:
        return (
            f"**No verdict: {rounds} round{'s' * (rounds != 1)} measured, and a verdict needs at "
            f"least {ROUNDS}.**"
        )
    if run.study.grid:
        return _over_a_grid(run, levels)
    sure = confidence(len(levels), len(run.titles))
    return " ".join(_headline(run, level, sure) for level in levels)


def _over_a_grid(run: Run, levels: Sequence[Level]) -> str:
    """At how many loads each arm is better and worse than the first one."""
    base, *others = run.titles
    said = []
    for arm in others:
        there = [level for level in levels if {base, arm} <= level.cells.keys()]
        of = [compared(level, arm, base, CELL) for level in there]
        each = []
        for quantity in SHOWN:
            found = Counter(standing(quantity, ratios[quantity]) for ratios in of)
            each.append(f"{AGAINST[quantity]} at {found[1]}, worse at {found[-1]}")
        said.append(f"**{run.titles[arm]}** is better in {'; in '.join(each)}")
    return (
        f"Of {len(levels)} loads, against {run.titles[base]}: {'. '.join(said)}. At the others "
        "there is no verdict. Each load is compared by itself, at 95 % over its "
        f"{len(AGAINST)} quantities."
    )


def standing(quantity: str, ratio: Interval) -> int:
    """1 where the first of two arms is better beyond the interval, -1 where it is worse, else 0."""
    less = (ratio.high < 1) - (ratio.low > 1)
    return -less if quantity == "goodput" else less


def confidence(loads: int, arms: int) -> float:
    """Of one ratio's interval, so that all ratios of a page hold together with 95 % (Bonferroni):
    equal arms get a verdict on one page of twenty."""
    pairs = max(1, arms * (arms - 1) // 2)
    return 1 - 0.05 / (len(AGAINST) * pairs * max(1, loads))


def compared(level: Level, arm: str, other: str, sure: float) -> dict[str, Interval]:
    """Quantity -> that of one arm over that of the other."""
    return {quantity: level.compared(arm, other, quantity, sure) for quantity in AGAINST}


def better(ratios: Mapping[str, Interval]) -> list[str]:
    """In what the first of two compared arms is better, beyond the interval."""
    return [quantity for quantity, of in ratios.items() if standing(quantity, of) > 0]


def best(arms: Sequence[str], wins: Mapping[tuple[str, str], Sequence[str]]) -> str | None:
    """The arm to which no other is better in anything, and which is better than each in something.
    ``wins``: for each ordered pair, in what the first is better than the second."""
    for arm in arms:
        others = [other for other in arms if other != arm]
        if others and all(wins[arm, o] and not wins[o, arm] for o in others):
            return arm
    return None


def _headline(run: Run, level: Level, sure: float) -> str:
    """A sentence or two about one load."""
    titles, at = run.titles, f"At {level.said}"
    arms = [a for a in level.cells if not math.isnan(plain(level.values(a, "e2e")))]
    if len(arms) < 2:
        said = (f"{titles[a]} has a mean {_mean(level, a, run.study.by)}" for a in arms)
        return f"{at}, {next(said, 'no arm answered')}."
    pairs = [(a, b) for a in arms for b in arms if a != b]
    ratios = {pair: compared(level, *pair, sure) for pair in pairs}
    wins = {pair: better(of) for pair, of in ratios.items()}

    def over(one: str, other: str) -> str:
        of = ratios[one, other]
        said = (f"{share(of[q])} times the {AGAINST[q]}" for q in wins[one, other])
        return f"{' and '.join(said)} of {titles[other]}"

    if (name := best(arms, wins)) is not None:
        others = "; ".join(over(name, other) for other in arms if other != name)
        return f"{at}, **{titles[name]} is best**: it has {others}. No other arm is better in any."
    trades = [(a, b) for a, b in pairs if a < b and wins[a, b] and wins[b, a]]
    one_sided = [(a, b) for a, b in pairs if wins[a, b] and not wins[b, a]]
    if not trades and not one_sided:
        by, base = run.study.by, arms[0]
        each = (f"{titles[a]} {share(ratios[a, base][by])}" for a in arms[1:])
        return (
            f"{at}, **no verdict**: no arm differs from another by more than the interval. "
            f"{NAMES[by]} over that of {titles[base]}: {', '.join(each)}."
        )
    parts = [f"{titles[a]} has {over(a, b)}, and {titles[b]} {over(b, a)}" for a, b in trades]
    parts += [f"{titles[a]} has {over(a, b)} and loses nothing" for a, b in one_sided]
    said = "a trade" if trades else "no arm is best"
    return f"{at}, **{said}**: {'; '.join(parts)}."


def _mean(level: Level, arm: str, quantity: str) -> str:
    return f"{NAMES[quantity]} of {seconds(level.interval(level.values(arm, quantity)))}"


def breaks(run: Run, levels: Sequence[Level]) -> Iterator[str]:
    """Up to which load each arm meets the SLO, and what fails beyond."""
    for arm, title in run.titles.items():
        there = [level for level in levels if arm in level.cells]
        shares = [(level, level.interval(level.values(arm, "slo"))) for level in there]
        held = [level for level, of in shares if of.value >= SHARE and not level.failed(arm)]
        lost = next(((level, of) for level, of in shares if level not in held), None)
        text = f"**{title}** "
        if lost is None:
            text += "meets the SLO at every load measured."
        else:
            level, of = lost
            before = held[: there.index(level)]
            if before:
                text += f"meets the SLO up to {before[-1].said}. "
            else:
                text += "misses the SLO at the first load. "
            text += f"At {level.point.name}, {percent(of)} of requests are within it"
            if failed := level.failed(arm):
                text += f" and {failed} of {len(level.outcomes(arm))} fail"
            text += "."
        used = max((u for level in there for u in level.usage(arm)), default=None)
        yield text + (f" Its KV pool was at most {used:.0%} full." if used is not None else "")


def warnings(run: Run, levels: Sequence[Level]) -> Iterator[str]:
    """What a reader has to know before believing a number."""
    late = []
    for level in levels:
        for arm in level.cells:
            of = client(level.outcomes(arm))
            if of.was_the_bottleneck:
                times = f"{of.late_p99_s * 1e3:,.0f} and {of.loop_lag_p99_s * 1e3:,.0f} ms"
                late.append(f"{run.titles[arm]} at {level.point.name} ({times})")
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
    counts = {arm: sum(of.values()) for arm, of in run.servers.items()}
    if len(set(counts.values()) - {0}) > 1:
        of_each = ", ".join(f"{run.titles[arm]}: {n or 'unknown'}" for arm, n in counts.items())
        yield (
            f"**The arms have different numbers of servers** ({of_each}): differences between "
            "them include that of the hardware."
        )
    yield from _few(run, levels)
    if told := answers(run):
        compared, different = told
        if different:
            yield f"**{different} of {compared:,} answers differ between arms or rounds.**"
    if run.missing:
        yield f"Arms not measured, as the fleet has no such setup: {', '.join(run.missing)}."
    for level in levels:
        for arm, cells in level.cells.items():
            errors: dict[str, int] = {}
            for o in (o for cell in cells for o in cell.outcomes if o.error):
                errors[str(o.error)] = errors.get(str(o.error), 0) + 1
            where = f"{run.titles[arm]} at {level.said}"
            if errors:
                kinds = ", ".join(f"{n} {kind}" for kind, n in errors.items())
                yield f"**{where}: {kinds}.**"
            cold = [o for cell in cells for o in cell.cold]
            if failed := sum(o.error is not None for o in cold):
                yield (
                    f"**{where}, {failed} of {len(cold)} prompts of cold clients failed**: the "
                    "competing load was lower, and the table of prefills lacks them."
                )


def answers(run: Run) -> tuple[int, int] | None:
    """Requests whose answers several cells have, and how many of them were answered differently;
    None where answers were not read."""
    found: dict[tuple[Point, int], list[str]] = {}
    for cell in run.cells:
        for o in cell.outcomes:
            if o.answer is not None:
                found.setdefault((cell.key[2], o.index), []).append(o.answer)
    several = [of for of in found.values() if len(of) > 1]
    return (len(several), sum(len(set(of)) > 1 for of in several)) if found else None


def _few(run: Run, levels: Sequence[Level]) -> Iterator[str]:
    """Windows that closed before enough requests had begun."""
    if (window := run.study.load.window) is None:
        return
    wanted = run.study.made.classes if run.study.made else []
    for level in levels:
        for arm, cells in level.cells.items():
            counts = [Counter(o.request_class for o in cell.counted) for cell in cells]
            least = min(of.total() for of in counts)
            lacking = {name: min(of[name] for of in counts) for name in wanted}
            lacking = {name: n for name, n in lacking.items() if n < window.of_class}
            if least < window.requests or lacking:
                of_class = "".join(f", {n} of {name}" for name, n in lacking.items())
                yield (
                    f"**{run.titles[arm]} at {level.said} counts {least} requests of a round"
                    f"{of_class}**, where {window.requests} and {window.of_class} of each class "
                    f"were asked for: the window closed after {window.limit_s:g} s."
                )


class Checked(NamedTuple):
    """A claim, and what was measured of it."""

    claim: Claim
    load: str
    ours: Interval
    verdict: str
    """``agrees``, ``does not agree``, or ``no verdict`` where the interval holds the bound."""


def claims(run: Run, levels: Sequence[Level]) -> list[Checked]:
    """Those whose arms and load were measured."""
    found = []
    for claim in run.study.claims:
        for level in (each for each in levels if each.load == claim.at):
            if not {claim.arm, claim.over} <= level.cells.keys():
                continue
            if claim.request_class is None:
                ours = level.compared(claim.arm, claim.over, claim.of)
            else:
                one, other = (
                    level.values(a, claim.of, claim.request_class) for a in (claim.arm, claim.over)
                )
                ours = level.ratio(one, other)
            high = math.inf if claim.at_most is None else claim.at_most
            low = -math.inf if claim.at_least is None else claim.at_least
            verdict = "no verdict"
            if low <= ours.low and ours.high <= high:
                verdict = "agrees"
            elif ours.high < low or ours.low > high:
                verdict = "does not agree"
            found.append(Checked(claim, level.point.name, ours, verdict))
    return found


def seconds(of: Interval) -> str:
    """A time with its interval."""
    scale, unit, digits = (1e3, "ms", 0) if of.value < 10 else (1.0, "s", 1)
    value, low, high = (f"{x * scale:,.{digits}f}" for x in (of.value, of.low, of.high))
    return f"{value} {unit} [{low}, {high}]"


def share(of: Interval) -> str:
    return f"{of.value:.2f} [{of.low:.2f}, {of.high:.2f}]"


def percent(of: Interval) -> str:
    return f"{of.value:.0%} [{of.low:.0%}, {of.high:.0%}]"
