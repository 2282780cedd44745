"""Pictures of comparisons: a colour an arm, labelled axes. Needs matplotlib (``bench`` extra)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: The first one is what the others are compared with.
COLORS = ("#9a9a9a", "#2a7fb8", "#c0504d", "#c9b37e", "#8cc0de", "#55a868")


@contextmanager
def panels(
    path: Path, count: int = 1, size: tuple[float, float] = (7.0, 4.0), rows: int = 1
) -> Iterator[Any]:
    """The axes of ``count`` panels side by side, in ``rows``, which are written to ``path``
    afterwards.

    ``size``: inches of one panel. The format is that of the path's suffix.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    inches = (size[0] * count, size[1] * rows)
    axes = pyplot.subplots(rows, count, figsize=inches, squeeze=False)[1].ravel()
    figure = axes[0].figure
    yield axes
    for axis in axes:
        axis.title.set_fontsize(9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
