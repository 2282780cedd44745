"""The cost of a cold prompt's prefill for running answers, event by event.

An event is a request of class COLD, from sending to its first token. Outside of all events, running
answers generate tokens at their normal rate. The difference from that rate within an event is the
cost of the prefill, as tokens and as answer time, summed over all running answers:
    lost = running * seconds * (1 - TPOT outside / TPOT within)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmark.agentic.load.outcome import Outcome
from benchmark.agentic.load.sessions import COLD
from benchmark.agentic.studies.record import Cell

Values = npt.NDArray[np.float64]


def events(cell: Cell) -> dict[str, float]:
    """Return means over the events, in seconds. Empty if no cold prompt was answered within the
    window, or no answer ran outside of events."""
    began, ended = cell.span
    cold = [
        (max(o.started_s, began), min(o.first_token_s, ended))
        for o in cell.outcomes
        if o.request_class == COLD and o.first_token_s is not None
    ]
    times, spans = _streams(cell.outcomes, began, ended)
    whole = [(low, high) for low, high in cold if began < low < high < ended]
    covered = [_within(times, spans, low, high) for low, high in _union(cold)]
    outside_s = float((spans[:, 1] - spans[:, 0]).sum()) - sum(ran for ran, _ in covered)
    tokens = len(times) - sum(tokens_in_span for _, tokens_in_span in covered)
    if not whole or outside_s <= 0 or tokens <= 0:
        return {}
    seconds = np.array([high - low for low, high in whole])
    ran, tokens_in_span = np.array([_within(times, spans, low, high) for low, high in whole]).T
    rate = tokens / outside_s
    lost = ran - tokens_in_span / rate
    return {
        "prefills": len(whole),
        "prefill_s": float(seconds.mean()),
        "running": float(ran.sum() / seconds.sum()),
        "tpot_outside": 1 / rate,
        "tpot_within": float(ran.sum() / tokens_in_span.sum())
        if tokens_in_span.sum()
        else float("nan"),
        "lost_tokens": float((ran * rate - tokens_in_span).mean()),
        "lost_s": float(lost.mean()),
        "share_lost": float(lost.sum() / ran.sum()) if ran.sum() else float("nan"),
    }


def _streams(outcomes: Sequence[Outcome], began: float, ended: float) -> tuple[Values, Values]:
    """Return, within the window, the times of tokens other than an answer's first ones, and the
    spans in which answers ran."""
    times: list[Values] = []
    spans = [(began, began)]
    for o in outcomes:
        if o.first_token_s is not None and o.itl_s:
            times.append(o.first_token_s + np.cumsum(o.itl_s))
            spans.append((o.first_token_s, float(times[-1][-1])))
    all_times = np.concatenate([np.empty(0), *times])
    return (
        all_times[(all_times > began) & (all_times <= ended)],
        np.clip(np.array(spans), began, ended),
    )


def _union(windows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of the spans, because several events may overlap."""
    merged: list[tuple[float, float]] = []
    for low, high in sorted(window for window in windows if window[0] < window[1]):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def _within(times: Values, spans: Values, low: float, high: float) -> tuple[float, float]:
    """Return the seconds for which answers ran between ``low`` and ``high``, summed, and their
    tokens in that time."""
    ran = np.minimum(spans[:, 1], high) - np.maximum(spans[:, 0], low)
    return float(np.maximum(ran, 0.0).sum()), float(((times > low) & (times <= high)).sum())
