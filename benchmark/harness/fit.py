"""Costs from measured times."""

from __future__ import annotations

from collections.abc import Sequence


def solve(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """A factor for each column of ``rows``, none below zero, so that rows come near to ``times``.

    Least squares of the relative error, as times differ by orders of magnitude.
    """
    import numpy as np
    from scipy.optimize import nnls

    matrix = np.asarray(rows, dtype=float) / np.asarray(times, dtype=float)[:, None]
    scale = np.abs(matrix).max(axis=0)
    solution, _ = nnls(matrix / scale, np.ones(len(rows)))
    return [float(value) for value in solution / scale]
