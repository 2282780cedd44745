"""What a cold prompt's prefill takes from the answers that run meanwhile, event by event.

An event is a request of class COLD, from its sending to its first token. The rate of running
answers outside of all events is what they would have had; what they lack of it within one is what
the prefill cost them, as tokens and as answer time, summed over all of them:

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
    """Means of an event, in seconds; nothing where no cold prompt was answered within the window,
    or nothing ran outside of events."""
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
    tokens = len(times) - sum(got for _, got in covered)
    if not whole or outside_s <= 0 or tokens <= 0:
        return {}
    seconds = np.array([high - low for low, high in whole])
    ran, got = np.array([_within(times, spans, low, high) for low, high in whole]).T
    rate = tokens / outside_s
    lost = ran - got / rate
    return {
        "prefills": len(whole),
        "prefill_s": float(seconds.mean()),
        "running": float(ran.sum() / seconds.sum()),
        "tpot_outside": 1 / rate,
        "tpot_within": float(ran.sum() / got.sum()) if got.sum() else float("nan"),
        "lost_tokens": float((ran * rate - got).mean()),
        "lost_s": float(lost.mean()),
        "share_lost": float(lost.sum() / ran.sum()) if ran.sum() else float("nan"),
    }


def _streams(outcomes: Sequence[Outcome], began: float, ended: float) -> tuple[Values, Values]:
    """When tokens came, those that began an answer left out, and from when to when answers ran; in
    the window."""
    times: list[Values] = []
    spans = [(began, began)]
    for o in outcomes:
        if o.first_token_s is not None and o.itl_s:
            times.append(o.first_token_s + np.cumsum(o.itl_s))
            spans.append((o.first_token_s, float(times[-1][-1])))
    every = np.concatenate([np.empty(0), *times])
    return every[(every > began) & (every <= ended)], np.clip(np.array(spans), began, ended)


def _union(windows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Several events overlap."""
    found: list[tuple[float, float]] = []
    for low, high in sorted(window for window in windows if window[0] < window[1]):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _within(times: Values, spans: Values, low: float, high: float) -> tuple[float, float]:
    """Seconds that answers ran within the window, summed; and the tokens that they got."""
    ran = np.minimum(spans[:, 1], high) - np.maximum(spans[:, 0], low)
    return float(np.maximum(ran, 0.0).sum()), float(((times > low) & (times <= high)).sum())
