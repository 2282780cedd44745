"""A fuzzer's number of tries: short in CI, ten times that at night, a tenth in a fast run."""

from __future__ import annotations

from hypothesis import settings


def tries(ci: int) -> int:
    """Return the number of examples, seeds or messages in this run, if CI runs ``ci``."""
    return max(ci * settings.default.max_examples // 100, 1)
