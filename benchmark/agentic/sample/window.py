"""A contiguous piece of a trace's time.

A sample takes the sessions that **begin** in the window, each with all its requests, also those
after the window: a session cut in two would begin with a long prompt that nothing explains. The
load therefore rises at the window's start, and a thin tail of long sessions follows its end. Of
what a session shares with others, what they did before the window is lost.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmark.agentic.sample.survey import U64, Columns


def densest(time_ms: npt.NDArray[np.float64], seconds: float) -> float:
    """Where the window of this length with the most requests begins, in seconds as ``time_ms``
    counts them; the earliest of several. A window never reaches beyond the trace, unless the trace
    is shorter than it.

    ``time_ms``: of requests, ascending.
    """
    length = seconds * 1000
    fits = time_ms[time_ms + length <= max(time_ms[-1], time_ms[0] + length)]
    inside = np.searchsorted(time_ms, fits + length, side="left") - np.searchsorted(time_ms, fits)
    return float(fits[np.argmax(inside)]) / 1000


def beginning(columns: Columns, start_s: float, seconds: float) -> npt.NDArray[np.bool_]:
    """Which of ``columns.sessions`` begin in [start, start + seconds)."""
    begins: npt.NDArray[np.float64] = columns.time_ms[columns.first] / 1000
    return (begins >= start_s) & (begins < start_s + seconds)


def requests_of(columns: Columns, sessions: U64) -> int:
    """Requests of the sessions with these keys."""
    return int(columns.turns[np.isin(columns.sessions, sessions)].sum())
