"""Sentences from numbers. A difference is one where its interval leaves 1 out, over at least three
rounds; nothing else is called better or worse."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from benchmark.agentic.load.outcome import client
from benchmark.agentic.report.numbers import NAMES, QUANTITIES, Interval, Level
from benchmark.agentic.studies.record import Run

ROUNDS = 3
"""Fewer give no verdict: what lies between two runs of one arm is not known then."""
SHARE = 0.9
"""Of requests that must meet the SLO for an arm to hold a load."""


def answer(run: Run, levels: Sequence[Level]) -> str:
    """Which arm has the lowest time at each load, by how much, and in what it loses."""
    if min((level.rounds for level in levels), default=0) < ROUNDS:
        rounds = min((level.rounds for level in levels), default=0)
        return (
            f"**No verdict: {rounds} round{'s' * (rounds != 1)} measured, and a verdict needs at "
            f"least {ROUNDS}.**"
        )
    return " ".join(_best(run, level) for level in levels)


def _best(run: Run, level: Level) -> str:
    """A sentence or two about one load."""
    by, titles = run.study.by, run.titles
    values = {arm: level.values(arm, by) for arm in level.cells}
    means = {arm: level.interval(each) for arm, each in values.items()}
    answered = [arm for arm, mean in means.items() if not math.isnan(mean.value)]
    if not answered:
        return f"At {level.load:g} {run.unit}, no arm has a {NAMES[by]}."
    order = sorted(answered, key=lambda arm: means[arm].value)
    best, others = order[0], order[1:]
    at = f"At {level.load:g} {run.unit}"
    what = f"mean {NAMES[by]}"
    if not others:
        return f"{at}, {titles[best]} has a {what} of {seconds(means[best])}."
    ratios = {arm: level.ratio(values[best], values[arm]) for arm in others}
    tied = [arm for arm in others if not ratios[arm].high < 1]
    beaten = [arm for arm in others if arm not in tied]
    over = " and ".join(f"{share(ratios[arm])} times that of {titles[arm]}" for arm in beaten)
    if not tied:
        text = f"{at}, **{titles[best]} has the lowest {what}**: {seconds(means[best])}."
        return " ".join((text, f"It is {over}.", *_worse(level, best, titles)))
    names = " and ".join(f"{titles[arm]} (ratio {share(ratios[arm])})" for arm in tied)
    text = f"{at}, **no verdict on {what} between {titles[best]} and {names}**."
    return f"{text} The {what} of {titles[best]} is {over}." if beaten else text


def _worse(level: Level, best: str, titles: Mapping[str, str]) -> Iterator[str]:
    """In what the arm that wins by one quantity loses to another arm."""
    goodput = {arm: level.goodput(arm) for arm in level.cells}
    for arm in (arm for arm in level.cells if arm != best):
        ratios = {q: level.ratio(level.values(best, q), level.values(arm, q)) for q in QUANTITIES}
        lost = [f"{NAMES[q]} is {share(of)}" for q, of in ratios.items() if of.low > 1]
        if lost:
            yield (
                f"But its mean {', its mean '.join(lost)} times that of {titles[arm]}, and "
                f"{goodput[best]:.2f} requests/s meet the SLO instead of {goodput[arm]:.2f}."
            )


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
            before = [each for each in held if each.load < level.load]
            if before:
                text += f"meets the SLO up to {before[-1].load:g} {run.unit}. "
            else:
                text += "misses the SLO at the first load. "
            text += f"At {level.load:g}, {percent(of)} of requests are within it"
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
                late.append(f"{run.titles[arm]} at {level.load:g} ({times})")
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
    if run.missing:
        yield f"Arms not measured, as the fleet has no such setup: {', '.join(run.missing)}."
    for level in levels:
        for arm, cells in level.cells.items():
            errors: dict[str, int] = {}
            for o in (o for cell in cells for o in cell.outcomes if o.error):
                errors[str(o.error)] = errors.get(str(o.error), 0) + 1
            where = f"{run.titles[arm]} at {level.load:g} {run.unit}"
            if errors:
                kinds = ", ".join(f"{n} {kind}" for kind, n in errors.items())
                yield f"**{where}: {kinds}.**"
            cold = [o for cell in cells for o in cell.cold]
            if failed := sum(o.error is not None for o in cold):
                yield (
                    f"**{where}, {failed} of {len(cold)} prompts of cold clients failed**: the "
                    "competing load was lower, and the table of prefills lacks them."
                )


def seconds(of: Interval) -> str:
    """A time with its interval."""
    scale, unit, digits = (1e3, "ms", 0) if of.value < 10 else (1.0, "s", 1)
    value, low, high = (f"{x * scale:,.{digits}f}" for x in (of.value, of.low, of.high))
    return f"{value} {unit} [{low}, {high}]"


def share(of: Interval) -> str:
    return f"{of.value:.2f} [{of.low:.2f}, {of.high:.2f}]"


def percent(of: Interval) -> str:
    return f"{of.value:.0%} [{of.low:.0%}, {of.high:.0%}]"
