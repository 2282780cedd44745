"""The shipped model: its tokenizer, template and answers suit a radix cache."""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmark.harness.models import TINY_ARITH

TOKENIZER = AutoTokenizer.from_pretrained(TINY_ARITH)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
"""Surrogates have no UTF-8."""


def prompt(*contents: str) -> str:
    """Return the chat text of user and assistant in turn, up to the assistant's next answer."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT)
@example("q", "\n leading newline and space", "\n")
@example("q ", " 12", "12")
def test_next_prompt_extends_prompt_and_answer(first: str, answer: str, second: str) -> None:
    """Guards against token merges across turns: a decode server's radix cache finds an earlier
    answer only if the next prompt's ids start with the earlier prompt's and the answer's."""
    earlier = encode(prompt(first)) + encode(answer) + encode("<|im_end|>")
    assert encode(prompt(first, answer, second))[: len(earlier)] == earlier


def test_generated_ids_are_a_prefix_of_the_next_prompt() -> None:
    """Guards against a model that spells its answers in other tokens than the tokenizer would:
    their KV could not be reused."""
    model: Any = AutoModelForCausalLM.from_pretrained(TINY_ARITH, dtype=torch.float32)
    rows = (TINY_ARITH / "test_set.jsonl").read_text().splitlines()
    questions = [json.loads(row)["question"] for row in rows[:2]]
    start = torch.tensor([encode(prompt(questions[0]))])
    ids = model.generate(input_ids=start, max_new_tokens=120, do_sample=False)[0].tolist()
    assert ids[-1] == TOKENIZER.eos_token_id
    answer = TOKENIZER.decode(ids[start.shape[1] : -1])
    assert encode(prompt(questions[0], answer, questions[1]))[: len(ids)] == ids
