"""Conversations about the shipped model's held-out questions, as token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmark.harness.models import TINY_ARITH

Ids = list[int]


def questions(count: int) -> list[str]:
    """Held-out questions of the shipped model."""
    lines = (TINY_ARITH / "test_set.jsonl").read_text().splitlines()
    return [json.loads(line)["question"] for line in lines[:count]]


class Conversations:
    """Chats of several turns, as token ids; each turn goes on from the answer before it.

    ``instruction``: token ids that all of them begin with.
    """

    def __init__(
        self, model: Path, count: int, turns: int, instruction: Sequence[int] = ()
    ) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        asked = questions(count * turns)
        self._asked = [asked[at::count] for at in range(count)]
        self.prompts: list[Ids] = [[*instruction, *self._user(asks[0])] for asks in self._asked]
        self._turn = 0

    def _user(self, text: str) -> Ids:
        message = [{"role": "user", "content": text}]
        ids = self._tokenizer.apply_chat_template(
            message, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)

    def answer(self, answers: Sequence[Ids]) -> None:
        """The next turn of each."""
        self._turn += 1
        self.prompts = [
            [*prompt, *answer, *self._user(asks[self._turn])]
            for prompt, answer, asks in zip(self.prompts, answers, self._asked, strict=True)
        ]
