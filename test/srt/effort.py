"""How hard a fuzzer tries: its short form in CI, ten times that with ``--nightly``."""

from __future__ import annotations

from hypothesis import settings


def tries(ci: int) -> int:
    """Examples, seeds or messages in this run, of which CI takes ``ci``."""
    return ci * settings.default.max_examples // 100
