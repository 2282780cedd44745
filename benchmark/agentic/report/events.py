"""What a prompt's prefill takes from the answers that run meanwhile, event by event.

An event is a cold client's prompt, from its sending to its first token. The rate of running answers
outside of all events is what they would have had; what they lack of it within one is what the
prefill cost them, as tokens and as answer time, summed over all of them:

    stalled = running * seconds * (1 - TPOT outside / TPOT within)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmark.agentic.load.outcome import Outcome
from benchmark.agentic.report.numbers import DRAWS, Interval, Level, Values, spanned


@dataclass(frozen=True)
class Events:
    """Of an arm at a load; means of an event, with intervals from draws of events. Seconds."""

    prefills: int
    ttft: Interval
    """Of the new prompt."""
    running: float
    """Answers that ran meanwhile."""
    tpot_outside: float
    """TPOT while nothing of a cold client was under way."""
    tpot_within: float
    lost_tokens: Interval
    lost: Interval
    """Answer time lost, of all running answers together."""
    share_lost: float
    """Of the running answers' seconds, those that were lost."""


def events(level: Level, arm: str) -> Events | None:
    """None where no cold prompt was answered, or nothing ran outside of events."""
    rows: list[tuple[float, float, float]] = []
    running_s = tokens = 0.0
    for cell in level.cells[arm]:
        windows = _windows(cell.cold)
        times, spans = streams(cell.outcomes)
        if windows:
            until = _known(cell.cold) + level.cold_gap_s
            times, spans = times[times <= until], np.minimum(spans, until)
        rows += [(high - low, *_within(times, spans, low, high)) for low, high in windows]
        covered = [_within(times, spans, low, high) for low, high in _union(windows)]
        running_s += float((spans[:, 1] - spans[:, 0]).sum()) - sum(each[0] for each in covered)
        tokens += len(times) - sum(each[1] for each in covered)
    if not rows or running_s <= 0 or tokens <= 0:
        return None
    seconds, ran, got = np.array(rows).T
    rate = tokens / running_s
    draws = np.random.default_rng(0).multinomial(len(rows), [1 / len(rows)] * len(rows), DRAWS)

    def interval(values: Values) -> Interval:
        return spanned(float(values.mean()), draws @ values / len(rows))

    within = float(ran.sum() / got.sum()) if got.sum() else float("nan")
    return Events(
        len(rows),
        interval(seconds),
        float(ran.sum() / seconds.sum()),
        1 / rate,
        within,
        interval(ran * rate - got),
        interval(ran - got / rate),
        1 - 1 / rate / within,
    )


def streams(outcomes: Sequence[Outcome]) -> tuple[Values, Values]:
    """When tokens came, those that began an answer left out; and from when to when answers ran."""
    times: list[Values] = []
    spans = [(0.0, 0.0)]
    for o in outcomes:
        if o.first_token_s is not None and o.itl_s:
            times.append(o.first_token_s + np.cumsum(o.itl_s))
            spans.append((o.first_token_s, float(times[-1][-1])))
    return np.concatenate([np.empty(0), *times]), np.array(spans)


def _known(cold: Sequence[Outcome]) -> float:
    """When the first of the clients had its last answer that is recorded. What it sent after its
    pause was under way as the load ended, and counts neither as an event nor as time without one.
    """
    last: dict[str | None, float] = {}
    for o in cold:
        ended = max(o.finished_s, o.first_token_s or 0.0)
        last[o.session_id] = max(last.get(o.session_id, 0.0), ended)
    return min(last.values())


def _windows(cold: Sequence[Outcome]) -> list[tuple[float, float]]:
    return sorted((o.started_s, o.first_token_s) for o in cold if o.first_token_s is not None)


def _union(windows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Several cold clients' events overlap."""
    found: list[tuple[float, float]] = []
    for low, high in windows:
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _within(times: Values, spans: Values, low: float, high: float) -> tuple[float, float]:
    """Seconds that answers ran within the window, summed; and the tokens that they got."""
    ran = np.minimum(spans[:, 1], high) - np.maximum(spans[:, 0], low)
    return float(np.maximum(ran, 0.0).sum()), float(((times > low) & (times <= high)).sum())
