"""The problem generator: right sums, GSM8K's format, and splits that share no question."""

import itertools
import json
import random
import re

import pytest

from models.arithmetic import (
    LARGEST,
    Problem,
    Split,
    conversation,
    held_out,
    number_of,
    problems,
    split_of,
)
from models.eval_tiny_arith import FOLDER
from models.train_tiny_arith import TEST_SET

# Of the generator alone, which makes the shipped model; servers only read what it made.
pytestmark = pytest.mark.nightly

SPLITS: tuple[Split, Split] = ("train", "test")


def sample(split: Split, count: int = 2000) -> list[Problem]:
    """Problems of their own and of conversations, so that follow-ups are among them."""
    rng = random.Random(split)
    chats = (conversation(rng, split, turns=5) for _ in range(count // 10))
    return [*itertools.islice(problems(split, seed=3), count // 2), *itertools.chain(*chats)]


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right_and_well_formed(split: Split) -> None:
    """Guards against teaching or asking for wrong sums, and against a format that scorers miss."""
    for problem in sample(split):
        *steps, last = problem.answer.split("\n")
        assert last == f"#### {problem.value}"
        assert number_of(problem.answer) == problem.value
        for step in steps:
            found = re.search(r"(\d+)([-+*])(\d+) = <<(\d+[-+*]\d+)=(\d+)>>(\d+)", step)
            assert found, step
            left, sign, right, term, result, shown = found.groups()
            assert term == left + sign + right
            assert result == shown
            assert eval(term) == int(result)  # digits and one sign, by the pattern above
            assert 1 <= int(result) <= LARGEST
        assert int(result) == problem.value


@pytest.mark.parametrize("split", SPLITS)
def test_every_question_belongs_to_its_split(split: Split) -> None:
    """Guards against a path of the generator, follow-ups included, that leaves the split out."""
    assert {split_of(problem.question) for problem in sample(split)} == {split}


def test_split_ignores_names_and_things() -> None:
    """Guards against a test question that differs from a training one in its words alone."""
    question = next(problems("test", seed=5)).question
    assert split_of(re.sub(r"[A-Za-z]+", "word", question)) == "test"


def test_same_seed_same_problems() -> None:
    """Guards against hidden state: results must compare across runs and machines."""
    first, again, other = (
        list(itertools.islice(problems("train", seed), 50)) for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


def test_follow_up_needs_the_earlier_turn() -> None:
    """Guards against follow-ups that can be answered alone: they could not reveal lost KV."""
    rng = random.Random(0)
    chats = [conversation(rng, "test", turns=4) for _ in range(50)]
    pairs = [pair for chat in chats for pair in itertools.pairwise(chat)]
    follow_ups = [(one, two) for one, two in pairs if two.question.startswith("Then ")]
    assert 0.3 < len(follow_ups) / len(pairs) < 0.7
    for one, two in follow_ups:
        first_term = re.search(r"(\d+)[-+]", two.answer)
        assert first_term
        assert int(first_term.group(1)) == one.value
        assert two.things == one.things


def test_shipped_set_cannot_come_out_of_the_training_stream() -> None:
    """Guards against an accuracy that is memory: the stream yields train questions alone (above),
    and no shipped question is one."""
    records = [json.loads(line) for line in (FOLDER / "test_set.jsonl").read_text().splitlines()]
    assert len({record["question"] for record in records}) == TEST_SET["count"]
    assert {split_of(record["question"]) for record in records} == {"test"}
    trained = {problem.question for problem in sample("train", 5000)}
    assert trained.isdisjoint(record["question"] for record in records)


def test_shipped_set_is_what_its_seed_makes() -> None:
    """Guards against a generator that has moved on since the shipped set and model were made."""
    records = [json.loads(line) for line in (FOLDER / "test_set.jsonl").read_text().splitlines()]
    assert records == held_out(**TEST_SET)
