"""How soon a transfer that is under way is looked at again."""

from __future__ import annotations

import math

#: The shortest pause, in seconds; every other one is a power of two times as long.
SHORTEST_S = 50e-6
#: The longest (0.8 ms) for a transfer that may settle any moment.
_LONGEST = 2**4
#: The pause (1.6 ms) for one that has taken longer than ``_LONG_AFTER_S``, and the pause (25.6 ms)
#: after ``_SLOW_AFTER_S``, when its peer may as well be stopped.
_LONG = 2**5
_LONG_AFTER_S = 1.0
_SLOW = 2**9
_SLOW_AFTER_S = 10.0
#: The pause (0.2 s) for one that missed its deadline.
_BURIED = 2**12
#: Of the time under way, the part that looking too late may add.
_FRACTION = 1 / 16


def next_look(now: float, age: float, buried: bool = False) -> float:
    """When to look again at a transfer that has been under way for ``age`` seconds.

    All such times lie on one grid, the coarser pauses on a part of its lines. So a worker with many
    transfers wakes up for all of them at once, and never more often than every ``SHORTEST_S``.
    """
    if buried:
        pause = _BURIED
    elif age >= _SLOW_AFTER_S:
        pause = _SLOW
    elif age >= _LONG_AFTER_S:
        pause = _LONG
    else:
        pause = 1
        while pause < _LONGEST and 2 * pause * SHORTEST_S <= age * _FRACTION:
            pause *= 2
    line = pause * SHORTEST_S
    # A thousandth of a pause covers what rounding does to the time of a line: it is not met twice.
    return (math.floor(now / line + 1e-3) + 1) * line
