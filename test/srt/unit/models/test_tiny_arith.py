"""The shipped model folder: its size, its tokenizer, and what a radix cache needs of them."""

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from models.arith_tokenizer import CHAT_TEMPLATE, MAX_TOKENS
from models.arithmetic import number_of, problems
from models.eval_tiny_arith import FOLDER, complete_here
from models.train_tiny_arith import chat_segments, make_tokenizer

TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
"""Surrogates have no UTF-8."""


def prompt(*contents: str) -> str:
    """Chat text of user and assistant in turn, up to where the assistant is to write."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_folder_is_small() -> None:
    """Guards against a repository that grows: every version of the weights stays in its history."""
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8_000_000


def test_shape() -> None:
    """Guards against a shape that other tests do not expect: grouped queries, room for long
    prompts, an embedding for each token, and 2,048 bytes of KV a token in float32."""
    config = AutoConfig.from_pretrained(FOLDER)
    assert config.num_attention_heads > config.num_key_value_heads > 1
    assert config.max_position_embeddings == MAX_TOKENS
    assert config.vocab_size == len(TOKENIZER)
    kv = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    assert kv == 2048


@given(ANY_TEXT)
@example("\r\n\n \t  a\u00a0b \U0001f600 \u0660\u0661 1234 don't <|im_end|>\x00")
def test_any_text_round_trips(text: str) -> None:
    """Guards against unknown tokens and lost spaces: benchmarks send texts of every kind."""
    assert TOKENIZER.decode(encode(text)) == text


def test_digits_stay_apart() -> None:
    """Guards against tokens of several digits, over which a tiny model cannot add."""
    assert [TOKENIZER.decode([i]) for i in encode("1975")] == list("1975")


def test_chat_template_ends_with_the_generation_prompt() -> None:
    """Guards against a prompt after which the model would go on with the user's turn."""
    assert prompt("Hi").endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert TOKENIZER.chat_template == CHAT_TEMPLATE


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT)
@example("q", "\n leading newline and space", "\n")
@example("q ", " 12", "12")
def test_next_prompt_extends_prompt_and_answer(first: str, answer: str, second: str) -> None:
    """Guards against token merges across turns: a decode server's radix cache finds an earlier
    answer only if the next prompt's ids start with the earlier prompt's and the answer's."""
    earlier = encode(prompt(first)) + encode(answer) + encode("<|im_end|>")
    assert encode(prompt(first, answer, second))[: len(earlier)] == earlier


def test_generated_ids_are_a_prefix_of_the_next_prompt(model: Any) -> None:
    """Guards against a model that spells its answers in other tokens than the tokenizer would:
    their KV could not be reused."""
    asked = [problem.question for problem in itertools.islice(problems("test", seed=2), 2)]
    start = torch.tensor([encode(prompt(asked[0]))])
    ids = model.generate(input_ids=start, max_new_tokens=120, do_sample=False)[0].tolist()
    assert ids[-1] == TOKENIZER.eos_token_id
    answer = TOKENIZER.decode(ids[start.shape[1] : -1])
    assert encode(prompt(asked[0], answer, asked[1]))[: len(ids)] == ids


@pytest.mark.nightly
def test_answers_held_out_questions(model: Any) -> None:
    """Guards against weights that were broken or half trained when they were saved."""
    asked = list(itertools.islice(problems("test", seed=4), 20))
    answers = complete_here(model, TOKENIZER, [prompt(problem.question) for problem in asked])
    right = sum(number_of(text) == one.value for text, one in zip(answers, asked, strict=True))
    assert right >= 17


@pytest.mark.nightly
def test_training_text_is_what_the_chat_template_writes() -> None:
    """Guards against training on another chat format than servers will send."""
    segments = chat_segments(random.Random(0), turns=3)
    contents = [text for text, _ in segments]
    chat = prompt(*_contents(contents))
    assert "".join(contents).startswith(chat)


def _contents(texts: list[str]) -> list[str]:
    """Contents of the messages in three turns' segments, without the last answer."""
    cut = [text.split("user\n")[-1].split("<|im_end|>")[0] for text in texts]
    return [text for text in cut if text != "\n"][:-1]


@pytest.mark.nightly
def test_tokenizer_is_what_the_script_makes() -> None:
    """Guards against a shipped tokenizer that nobody can make again."""
    made = make_tokenizer(seed=0)
    assert made.get_vocab() == TOKENIZER.get_vocab()
