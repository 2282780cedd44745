"""WARM, MEDIUM and HEAVY: a request by the prompt tokens that it needs prefilled.

Those that an endless cache, shared by all workers and in the order of the trace, would not hold:
known before sending, so that a request has one class in every arm, also where it fails.
"""

from __future__ import annotations

import msgspec

from benchmark.traces.record import BLOCK_TOKENS

WARM, MEDIUM, HEAVY = NAMES = ("WARM", "MEDIUM", "HEAVY")


class Classes(msgspec.Struct, frozen=True):
    """Thresholds in new tokens: WARM below ``medium``, HEAVY above ``heavy``."""

    medium: int = 5_000
    heavy: int = 20_000

    def __post_init__(self) -> None:
        if not 0 < self.medium <= self.heavy:
            raise ValueError(
                f"classes need 0 < medium <= heavy, these are {self.medium} and {self.heavy}"
            )

    def scaled(self, block_tokens: int, from_tokens: int = BLOCK_TOKENS) -> Classes:
        """For a trace whose blocks were made smaller: its requests keep their classes."""
        return Classes(
            max(1, round(self.medium * block_tokens / from_tokens)),
            max(1, round(self.heavy * block_tokens / from_tokens)),
        )

    def of(self, new: int) -> str:
        if new < self.medium:
            return WARM
        return MEDIUM if new <= self.heavy else HEAVY

    def __str__(self) -> str:
        return f"WARM < {self.medium:,} new tokens <= MEDIUM <= {self.heavy:,} < HEAVY"
