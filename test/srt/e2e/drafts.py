"""Compares drafts behind a prefix from the tree with drafts behind a transferred prompt.

Wrong draft KV changes no answer, only the number of accepted drafts. The same prompts are sent as
later turns, once more, and in separate namespaces, where none is a hit. All of it is repeated on a
decode server that zeroes the draft KV of every shared prefix (``zeroed_drafts``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmark.harness import metrics
from benchmark.harness.client import Request, Result
from benchmark.harness.fleet import Pair
from benchmark.harness.models import REPOSITORY, TINY_ARITH

ACCEPT_LENGTH = "sglang:spec_accept_length"
Ids = list[int]
CHATS = 5
#: Turns of a chat.
TURNS = 5
#: Generated tokens of a turn.
NEW = 60


@dataclass(frozen=True)
class Rates:
    """Shares of accepted drafts for the same prompts with the same answers."""

    turns: float
    """Later turns of conversations: the previous turn is in the tree."""
    again: float
    """Sent again: all but the last page is in the tree."""
    misses: float
    """In a separate namespace: nothing is in the tree."""


def zeroing() -> Mapping[str, str]:
    """Return a decode server's environment for zeroing the draft KV of every shared prefix."""
    tests = str(REPOSITORY / "test/srt")
    path = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
    return {"SGLANG_EXTERNAL_MODEL_PACKAGE": "e2e.zeroed_drafts", "PYTHONPATH": path}


def rates(pair: Pair, model: Path) -> Rates:
    """Measure a fresh pair with ``model`` as its own draft, one step, and room for all sessions.

    Raises:
        RuntimeError: a request failed, answers differ, or hits are missing or unexpected.
    """
    chats = Conversations(model, CHATS, TURNS)
    prompts: list[list[int]] = []
    turns: list[Result] = []
    for turn in range(TURNS):
        asked = enumerate(chats.prompts, len(prompts))
        results = pair.send([Request(prompt, NEW, label=f"{number}") for number, prompt in asked])
        if turn:
            prompts += chats.prompts
            turns += results
        if turn < TURNS - 1:
            chats.answer([result.output_ids for result in results])
    once_more = [Request(prompt, NEW, label=f"{number}") for number, prompt in enumerate(prompts)]
    again = pair.send(once_more, concurrency=6)
    hit_tokens = pair.metrics()[1][metrics.HIT_TOKENS]
    apart = [replace(request, extra={"extra_key": request.label}) for request in once_more]
    misses = pair.send(apart, concurrency=6)
    pair.check()
    if not _same([turns, again, misses]):
        raise RuntimeError("a request failed, or outputs of hits and misses differ")
    if hit_tokens <= 0.9 * sum(map(len, prompts)):
        raise RuntimeError(f"{hit_tokens:.0f} hit tokens: the tree did not keep the sessions")
    if pair.metrics()[1][metrics.HIT_TOKENS] != hit_tokens:
        raise RuntimeError("prompts in separate namespaces were hits")
    return Rates(*map(accept_rate, (turns, again, misses)))


def accept_rate(results: Sequence[Result]) -> float:
    """Return the share of accepted drafts."""
    drafted = sum(result.drafted_tokens for result in results)
    return sum(result.accepted_tokens for result in results) / drafted


def drafting(model: Path, steps: int, algorithm: str = "EAGLE") -> tuple[str, ...]:
    """Return a server's arguments for the draft model ``model`` with chains of ``steps`` drafts."""
    return (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(model)),
        *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(steps + 1)),
    )


class Conversations:
    """Chats about the shipped model's held-out questions; each turn continues the last answer."""

    def __init__(self, model: Path, count: int, turns: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        lines = (TINY_ARITH / "test_set.jsonl").read_text().splitlines()
        asked = [json.loads(line)["question"] for line in lines[: count * turns]]
        self._asked = [asked[start::count] for start in range(count)]
        self.prompts: list[Ids] = [self._user(asks[0]) for asks in self._asked]
        self._turn = 0

    def _user(self, text: str) -> Ids:
        message = [{"role": "user", "content": text}]
        ids = self._tokenizer.apply_chat_template(
            message, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)

    def answer(self, answers: Sequence[Ids]) -> None:
        """Continue each chat with its answer and the next question."""
        self._turn += 1
        self.prompts = [
            [*prompt, *answer, *self._user(asks[self._turn])]
            for prompt, answer, asks in zip(self.prompts, answers, self._asked, strict=True)
        ]


def _same(runs: Sequence[Sequence[Result]]) -> bool:
    """Return True if every request was answered, with the same tokens in all runs."""
    answers = [{r.label: r.output_ids for r in run} for run in runs]
    failed = any(r.error is not None for run in runs for r in run)
    return not failed and all(run_answers == answers[0] for run_answers in answers[1:])
