"""``rounds.jsonl`` as tables and sentences, for the READMEs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from benchmark.agentic.report.numbers import Interval
from benchmark.agentic.report.numbers import ratio as over_rounds
from benchmark.harness.report import Verdict, markdown, milliseconds
from benchmark.lead.arms import ARMS, BURST, LOADS, SESSIONS

Row = Mapping[str, Any]
Value = Callable[[Row], float]


def rate(row: Row) -> float:
    return float(row["requests_per_s"])


def ttft(row: Row) -> float:
    return float(row["ttft_later_s"]["p50"])


#: Numerator and denominator of each ratio that the page shows, by kind of load.
COMPARED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "sessions": (
        ("thread", "stock"),
        ("local", "stock"),
        ("local + thread", "stock"),
        ("local + thread", "thread"),
    ),
    "burst": (
        ("stock + r64", "stock"),
        ("thread", "stock"),
        ("thread + admission", "stock + r64"),
        ("thread + admission", "thread"),
        ("thread + admission", "thread + r64"),
        ("thread + admission + r64", "thread + r64"),
    ),
    "bounds": (
        ("local + thread", "thread"),
        ("local + thread + itl100", "local + thread"),
        ("local + thread + itl50", "local + thread"),
    ),
}


class Bound(NamedTuple):
    """What is asked of a ratio over the rounds."""

    load: str
    arm: str
    base: str
    of: Value
    value: float
    at_least: bool = True


_BUSY, _ALONE = "beside cold prompts", "alone"
BOUNDS = (
    Bound(_BUSY, "local + thread", "stock", ttft, 0.25, at_least=False),
    Bound(_BUSY, "local + thread", "stock", rate, 1.5),
    Bound(_ALONE, "local + thread", "stock", rate, 0.95),
    Bound(_ALONE, "local + thread", "stock", ttft, 1.1, at_least=False),
    Bound("burst", "thread + admission", "stock + r64", rate, 1.3),
)
"""Of the group ``lead`` against stock."""
ITL = (("local + thread + itl100", 0.1), ("local + thread + itl50", 0.05))
"""Arms with a bound on inter-token latency, in seconds."""
PARTS = (
    Bound(_BUSY, "thread", "stock", rate, 1),
    Bound(_BUSY, "local", "stock", rate, 1),
    Bound(_BUSY, "local + thread", "thread", rate, 1),
    Bound(_ALONE, "thread", "stock", rate, 1),
    Bound(_ALONE, "local", "stock", rate, 1),
    Bound(_ALONE, "local + thread", "thread", rate, 1),
    Bound(_ALONE, "local + thread", "thread", ttft, 1, at_least=False),
    Bound("burst", "thread", "stock", rate, 1),
    Bound("burst", "thread + admission", "thread", rate, 1),
    Bound("burst", "thread + admission", "thread + r64", rate, 1),
)
"""Of each part alone: it brings something if the interval is on the right side of 1."""


def rounds(rows: Sequence[Row], load: str, arm: str, of: Value) -> dict[int, float]:
    """The value of each round, the median of its plays."""
    plays: dict[int, list[float]] = {}
    for row in rows:
        if (row["load"], row["arm"]) == (load, arm):
            plays.setdefault(row["round"], []).append(of(row))
    return {number: median(values) for number, values in plays.items()}


def ratio(rows: Sequence[Row], load: str, arm: str, base: str, of: Value) -> Interval:
    """The geometric mean over the rounds that both arms have, with the 95 % interval of Student's
    t, which is NaN of fewer than two rounds."""
    ours, theirs = (rounds(rows, load, each, of) for each in (arm, base))
    ratios = [ours[number] / theirs[number] for number in ours if number in theirs]
    middle = geometric_mean(ratios) if ratios else math.nan
    if len(ratios) < 2:
        return Interval(middle, math.nan, math.nan)
    return over_rounds(ratios)


def verdict(rows: Sequence[Row], bound: Bound) -> Verdict:
    """Whether a ratio keeps its bound, by its mean."""
    found = ratio(rows, bound.load, bound.arm, bound.base, bound.of)
    side = "at least" if bound.at_least else "at most"
    text = f"{_about(bound)}: {shown(found)} ({side} {bound.value:g})"
    value = found.value
    return Verdict(text, value >= bound.value if bound.at_least else value <= bound.value)


def kept(rows: Sequence[Row], arm: str, limit: float) -> Verdict:
    """Whether 99 of 100 gaps between tokens were within ``limit`` seconds, in each play."""
    found = [row["gap_s"]["p99"] for row in rows if row["arm"] == arm]
    slowest = max(found, default=math.nan)
    text = f"{arm}: p99 of the gaps between tokens, the slowest of {len(found)} plays: "
    text += f"{milliseconds(slowest)} (at most {milliseconds(limit)})"
    return Verdict(text, slowest <= limit)


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """All that is asked of the group."""
    return [*(verdict(rows, each) for each in BOUNDS), *(kept(rows, *each) for each in ITL)]


def brings(rows: Sequence[Row], part: Bound) -> str:
    """Whether a part brings more than the rounds differ."""
    found = ratio(rows, part.load, part.arm, part.base, part.of)
    better = found.low > part.value if part.at_least else found.high < part.value
    worse = found.high < part.value if part.at_least else found.low > part.value
    if math.isnan(found.low):
        return f"no interval: {_about(part)}: {shown(found)}"
    said = "a gain" if better else "A LOSS" if worse else "WITHIN THE NOISE"
    return f"{said}: {_about(part)}: {shown(found)}"


def _about(bound: Bound) -> str:
    of = {rate: "requests/s", ttft: "TTFT p50 of later turns"}[bound.of]
    return f"{bound.load}, {of}: {bound.arm} / {bound.base}"


def shown(of: Interval) -> str:
    """A ratio and its interval, if there is one."""
    if math.isnan(of.low):
        return f"{of.value:.2f} (one round)"
    return "{:.2f} [{:.2f}, {:.2f}]".format(*of)


def title(load: str) -> str:
    """What is sent."""
    if load == "burst":
        return (
            f"{BURST.requests} requests at once over {BURST.groups} prefixes of "
            f"{BURST.prefix_tokens:,} tokens, {BURST.generated_tokens} tokens an answer, a decode "
            f"pool of {BURST.decode_pool:,} tokens"
        )
    about, plays = SESSIONS[load]
    (clients,) = about.cold_clients
    beside = f"beside cold prompts of {about.cold_tokens:,} tokens, clients: {clients}"
    often = f", plays a round: {plays}"
    sessions = f"{about.talks} sessions of {about.turns} turns of {about.turn_tokens:,} new tokens"
    return f"{sessions} {beside if clients else 'alone'}{often}"


def table(rows: Sequence[Row], kind: str, load: str) -> tuple[list[str], list[list[str]]]:
    """Head and rows: a quantity a row, an arm a column; medians over the rounds."""
    arms = [arm.name for arm in ARMS[kind]]

    def line(name: str, text: Callable[[float], str], *of: Value) -> list[str]:
        cells = ([rounds(rows, load, arm, each).values() for each in of] for arm in arms)
        return [name, *(", ".join(text(median(v)) if v else "-" for v in each) for each in cells)]

    def spread(of: str, *which: str) -> list[Value]:
        return [lambda row, p=p: float(row[of][p]) for p in which]

    turns = "all requests" if kind == "burst" else "later turns"
    body = [
        line("requests/s", "{:.2f}".format, rate),
        [
            "each round",
            *(
                ", ".join(f"{v:.2f}" for v in rounds(rows, load, arm, rate).values())
                for arm in arms
            ),
        ],
        line(f"TTFT of {turns}: p50, p99", milliseconds, *spread("ttft_later_s", "p50", "p99")),
        line("gap between tokens: p50, p99", milliseconds, *spread("gap_s", "p50", "p99")),
        line("end to end: p50", milliseconds, *spread("latency_s", "p50")),
    ]
    if kind == "burst":
        body += [
            line("requests running: mean", "{:.1f}".format, *spread("running", "mean")),
            line("requests running: most", "{:.0f}".format, lambda row: row["running_max"]),
            line("retractions", "{:.0f}".format, lambda row: row["retracted"]),
        ]
    else:
        body.append(
            ["requests by who computed them, and why", *(_reasons(rows, load, arm) for arm in arms)]
        )
    if "cold prompts" in title(load):
        about = "cold prompts answered a second"
        body.append(line(about, "{:.2f}".format, lambda row: row["cold_answered_per_s"]))
    return ["", *arms], body


def _reasons(rows: Sequence[Row], load: str, arm: str) -> str:
    total: Counter[str] = Counter()
    for row in rows:
        if (row["load"], row["arm"]) == (load, arm):
            total.update(row["reasons"])
    every = sum(total.values())
    return ", ".join(f"{name} {n / every:.0%}" for name, n in total.most_common()) or "-"


def page(rows: Sequence[Row]) -> str:
    """All loads; each bound and each part."""
    loads = (_load(rows, kind, load) for kind in LOADS for load in LOADS[kind])
    return "\n".join((*loads, answers(rows)))


def answers(rows: Sequence[Row]) -> str:
    """Each bound and each part, a line each."""
    bounds = "".join(f"- {each}\n" for each in verdicts(rows))
    parts = "".join(f"- {brings(rows, part)}\n" for part in PARTS)
    return (
        f"What is asked of the group, by the mean over the rounds:\n\n{bounds}\n"
        f"What each part brings, by its interval:\n\n{parts}"
    )


def headline(rows: Sequence[Row]) -> str:
    """The answer in a few sentences."""

    def times(load: str, arm: str, base: str, of: Value = rate) -> str:
        return shown(ratio(rows, load, arm, base, of))

    both, thread, tuned = "local + thread", "thread + admission", "stock + r64"
    sessions = ", ".join(
        f"{load} {times(load, both, 'stock')} times the requests/s and "
        f"{times(load, both, 'stock', ttft)} times the TTFT p50 of later turns"
        for load in (_BUSY, _ALONE)
    )
    asked = verdicts(rows)
    return (
        f"Against stock 0.5.23, local turns with the sleeping thread give sessions {sessions}. "
        "With admission and the sleeping thread, a burst gets "
        f"{times('burst', thread, tuned)} times the requests/s of stock with "
        "`--num-reserved-decode-tokens 64`. Beside the "
        f"sleeping thread alone, admission gives {times('burst', thread, 'thread')} times, and "
        f"{times('burst', thread, 'thread + r64')} times if the thread has that flag too. "
        f"{sum(each.holds for each in asked)} of {len(asked)} bounds hold. "
        "Ratios are means over the rounds with 95 % intervals.\n"
    )


def _load(rows: Sequence[Row], kind: str, load: str) -> str:
    done = len({row["round"] for row in rows if row["load"] == load})
    ratios = [
        [f"{arm} / {base}", *(shown(ratio(rows, load, arm, base, of)) for of in (rate, ttft))]
        for arm, base in COMPARED[kind]
    ]
    head = ["", "requests/s", "TTFT p50"]
    return (
        f"{title(load)}, rounds: {done}, medians of them:\n\n{markdown(*table(rows, kind, load))}\n"
        f"{markdown(head, ratios)}"
    )
