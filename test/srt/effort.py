"""How hard a fuzzer tries: its short form in CI, ten times that at night, a tenth in a fast run."""

from __future__ import annotations

from hypothesis import settings


def tries(ci: int) -> int:
    """Examples, seeds or messages in this run, of which CI takes ``ci``."""
    return max(ci * settings.default.max_examples // 100, 1)
