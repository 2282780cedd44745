"""What generated agentic traffic is like.

The figures to meet are those of a published two hours of a production cluster that serves coding
agents (GLM-5.1; 2.1 million requests): see ``TARGET``. The model behind the numbers:

- A prompt is an instruction of the product (few, popular, all day), then a context that a family of
  sessions shares, then what is the session's own.
- A family is one task or project: a few sessions, begun within minutes of each other, over the same
  files (an agent and its helpers; one question asked several ways). Most sharing across sessions
  is of this kind, as in the published trace: picking sessions at random left 16 of 52 points of
  the shared share, so that 36 were between few sessions. Popular instructions are the rest.
- Most sessions have one turn. The others have a heavy tail of turns; each turn's prompt is all that
  was said before, the answer, and what a tool or a person adds.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET = {
    "input mean": 33_600,
    "input p50": 20_000,
    "input p90": 88_000,
    "output mean": 445,
    "output p50": 80,
    "prefill share": 0.98,
    "hit": 0.67,
    "within share of hits": 0.62,
    "cross-session share": 0.52,
    "growth per turn": 2_000,
}
"""The published figures. (Their own input and output means give a prefill share of 0.987.)"""


@dataclass(frozen=True)
class LogNormal:
    """A length in tokens, or a time in seconds."""

    median: float
    spread: float
    """Standard deviation of the logarithm."""


@dataclass(frozen=True)
class AgenticShape:
    """Lengths in tokens, times in seconds."""

    families_per_s: float = 9.8
    """Poisson."""
    instruction_blocks: tuple[int, ...] = (8, 5, 12, 3, 24, 8, 2, 16)
    """Blocks of each popular instruction, the i-th used in proportion to 1 / i."""
    lonely: float = 0.42
    """Share of families of one session."""
    mean_members: float = 2.6
    """Sessions of the other families: at least two, geometrically distributed."""
    gap_s: float = 40.0
    """Mean time from one session's beginning to the next one's in its family, exponential."""
    context: LogNormal = LogNormal(5_200, 1.82)
    """Shared by a family."""
    own: LogNormal = LogNormal(1_950, 1.5)
    """A session's first turn, without what it shares."""
    one_turn: float = 0.928
    """Share of sessions of one turn."""
    turns: LogNormal = LogNormal(4.0, 1.1)
    """Turns of the others beyond the second."""
    addition: LogNormal = LogNormal(800, 1.2)
    """What a turn adds to the prompt beside the last answer."""
    answer: LogNormal = LogNormal(80, 1.88)
    pause_s: LogNormal = LogNormal(8, 1.2)
    """From one request of a session to its next."""
    longest: int = 200_000
    """A prompt's most tokens: first turns are cut to it, sessions end before it."""
    longest_answer: int = 32_000
    block_tokens: int = 512
