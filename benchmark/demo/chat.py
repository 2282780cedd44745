"""Several sessions at once with the tiny model; each turn is sent with all that was said."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientSession

from benchmark.harness.client import Request, Result, Target, open_session, send

MAX_ANSWER_TOKENS = 120


@dataclass(frozen=True)
class Turn:
    """A question and the number that answers it."""

    question: str
    value: int


def load_conversations() -> list[list[Turn]]:
    """The demo's sessions: held-out problems, some of which need the turn before."""
    text = (Path(__file__).parent / "conversations.json").read_text()
    return [[Turn(**turn) for turn in conversation] for conversation in json.loads(text)]


def play(
    target: Target, conversations: Sequence[Sequence[Turn]], on_turn: Callable[[], object]
) -> list[Result]:
    """Plays all sessions at once; a result a turn, labelled ``CONVERSATION.TURN``."""

    async def everyone() -> list[Result]:
        async with open_session() as session:
            talks = (
                _converse(session, target, str(i), turns, on_turn)
                for i, turns in enumerate(conversations)
            )
            return [result for results in await asyncio.gather(*talks) for result in results]

    return asyncio.run(everyone())


async def _converse(
    session: ClientSession,
    target: Target,
    label: str,
    turns: Sequence[Turn],
    on_turn: Callable[[], object],
) -> list[Result]:
    messages: list[dict[str, str]] = []
    results = []
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn.question})
        request = Request(
            tuple(messages), MAX_ANSWER_TOKENS, ignore_eos=False, label=f"{label}.{number}"
        )
        result = await send(session, target, request)
        messages.append({"role": "assistant", "content": result.text})
        results.append(result)
        on_turn()
    return results


def right_answers(conversations: Sequence[Sequence[Turn]], results: Sequence[Result]) -> int:
    """How many turns ended with the right number."""
    wanted = [turn.value for turns in conversations for turn in turns]
    return sum(
        number_of(result.text) == value for value, result in zip(wanted, results, strict=True)
    )


def number_of(answer: str) -> int | None:
    """The number after ``####``, as GSM8K ends its answers; None where there is none."""
    found = re.search(r"#### (-?\d+)", answer)
    return int(found.group(1)) if found else None
