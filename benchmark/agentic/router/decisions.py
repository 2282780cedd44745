"""A line of JSON for each decision, with every term of every candidate's score."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmark.agentic.router.body import Ask
from benchmark.agentic.router.schedule import Pick, Route


class DecisionLog:
    """Appends to a file, a line at a time, so that a crash loses none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, ask: Ask, route: Route, attempt: int, at: float) -> None:
        """``at``: seconds since the epoch. ``attempt``: 0, or how often it was sent elsewhere."""
        line = {
            "at": at,
            "rid": ask.rid,
            "session": ask.session,
            "path": ask.path,
            "tokens": ask.work.tokens,
            "reserve_tokens": ask.work.reserve_tokens,
            "attempt": attempt,
            "offload": route.offload,
            "taken": list(route.charges),
            "pools": {role: _pool(pick) for role, pick in route.picks.items()},
        }
        self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()


def _pool(pick: Pick) -> dict[str, object]:
    terms = pick.choice.terms
    return {
        "policy": pick.policy,
        "reason": pick.choice.reason,
        "chosen": pick.worker.url,
        "candidates": [
            {
                **view._asdict(),
                **({"score": terms[i].score, "terms": terms[i].parts} if terms else {}),
            }
            for i, view in enumerate(pick.views)
        ],
    }
