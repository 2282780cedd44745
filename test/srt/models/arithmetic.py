"""Seeded grade-school word problems in GSM8K's format.

A question is one paragraph of text. The answer has one sentence per step, each with a calculator
annotation (``3+4 = <<3+4=7>>7``), and ends with the line ``#### n``.

Train and test questions are disjoint by construction: `split_of` hashes the numbers of a question
in order, so a test question cannot occur in training even under other names or objects.
"""

import hashlib
import json
import operator
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "test"]

NAMES = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack"),
    *("Kate", "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor"),
)
THINGS = (
    *("apples", "books", "cards", "coins", "cookies", "cups", "eggs", "flowers", "marbles"),
    *("oranges", "pencils", "pens", "shells", "stamps", "stickers", "stones", "tickets", "toys"),
)

LARGEST = 99
"""No intermediate result exceeds this."""
RANGES = {"a": (2, 40), "b": (2, 30), "c": (2, 30), "d": (2, 30), "k": (2, 5), "m": (2, 12)}
"""Inclusive range of each number that a template may name."""
TEST_PERCENT = 5
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class Template:
    """A question and its steps.

    Each step is an equation over the numbers in scope and a sentence that shows its result; the
    last step's result is the answer. In a follow-up, ``p`` is the previous question's answer.
    """

    question: str
    steps: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    value: int
    things: str
    """The counted objects; a follow-up continues with them."""


HAS = "{name} has {x} {things}."
OPENERS = (
    Template(
        "{name} has {a} {things} and buys {b} more. Then {name} gives {c} {things} to {friend}. "
        "How many {things} does {name} have left?",
        (("x=a+b", HAS), ("y=x-c", "{name} has {y} {things} left.")),
    ),
    Template(
        "{name} has {a} {things}. {name} loses {b} of them and later finds {c} others. "
        "How many {things} does {name} have now?",
        (("x=a-b", HAS), ("y=x+c", "{name} now has {y} {things}.")),
    ),
    Template(
        "{name} has {m} {things} and {friend} has {k} times as many. "
        "How many {things} do they have together?",
        (("x=m*k", "{friend} has {x} {things}."), ("y=m+x", "Together they have {y} {things}.")),
    ),
    Template(
        "{name} buys {k} bags with {m} {things} each and already has {a} {things} at home. "
        "How many {things} does {name} have in total?",
        (("x=k*m", "The bags hold {x} {things}."), ("y=x+a", "{name} has {y} {things} in total.")),
    ),
    Template(
        "There are {k} boxes with {m} {things} in each box. {name} sells {b} of the {things}. "
        "How many {things} are left?",
        (("x=k*m", "The boxes hold {x} {things}."), ("y=x-b", "There are {y} {things} left.")),
    ),
    Template(
        "{name} has {a} {things}. {friend} has {b} more {things} than {name}. "
        "How many {things} do they have together?",
        (("x=a+b", "{friend} has {x} {things}."), ("y=a+x", "Together they have {y} {things}.")),
    ),
    Template(
        "{name} has {a} {things}. {friend} has {b} fewer {things} than {name}. "
        "How many {things} do they have together?",
        (("x=a-b", "{friend} has {x} {things}."), ("y=a+x", "Together they have {y} {things}.")),
    ),
    Template(
        "{name} collects {a} {things} on Monday and {b} on Tuesday. On Wednesday {name} gives {c} "
        "of them away and collects {d} more. How many {things} does {name} have now?",
        (
            ("x=a+b", HAS),
            ("y=x-c", "After giving some away there are {y} {things}."),
            ("z=y+d", "{name} now has {z} {things}."),
        ),
    ),
    Template(
        "{name} has {a} {things}. Then {k} friends bring {m} {things} each, and {b} {things} are "
        "sold. How many {things} are left?",
        (
            ("x=k*m", "The friends bring {x} {things}."),
            ("y=a+x", "That makes {y} {things}."),
            ("z=y-b", "There are {z} {things} left."),
        ),
    ),
)
FOLLOW_UPS = (
    Template(
        "Then {name} brings {b} more {things} and {friend} takes {c} away. "
        "How many {things} are there now?",
        (("x=p+b", "There are {x} {things}."), ("y=x-c", "There are now {y} {things}.")),
    ),
    Template(
        "Then {b} of these {things} are sold and {name} brings {c} others. "
        "How many {things} are there now?",
        (("x=p-b", "There are {x} {things}."), ("y=x+c", "There are now {y} {things}.")),
    ),
)


def split_of(question: str) -> Split:
    """Return the split of a question: a function of its numbers and their order alone."""
    numbers = ",".join(re.findall(r"\d+", question))
    digest = hashlib.sha256(numbers.encode()).digest()
    return "test" if int.from_bytes(digest[:4], "big") % 100 < TEST_PERCENT else "train"


def number_of(answer: str) -> int | None:
    """Return the number of the first ``#### n`` in an answer, or None."""
    number = re.search(r"#### (-?\d+)", answer)
    return int(number.group(1)) if number else None


def _solve(template: Template, numbers: dict[str, int]) -> tuple[dict[str, str], int] | None:
    """Return the text of each step's result and the last result, or None if a result is out of
    range."""
    values, shown, result = dict(numbers), {}, 0
    for equation, _ in template.steps:
        target, left, sign, right = equation[0], equation[2], equation[3], equation[4]
        result = OPERATIONS[sign](values[left], values[right])
        if not 1 <= result <= LARGEST:
            return None
        term = f"{values[left]}{sign}{values[right]}"
        values[target], shown[target] = result, f"{term} = <<{term}={result}>>{result}"
    return shown, result


def _problem(rng: random.Random, split: Split, previous: Problem | None = None) -> Problem:
    """Draw one problem of the split; with `previous`, one that continues from its answer."""
    while True:
        template = rng.choice(FOLLOW_UPS if previous else OPENERS)
        name, friend = rng.sample(NAMES, 2)
        things = rng.choice(THINGS)
        numbers = {key: rng.randint(*bounds) for key, bounds in RANGES.items()}
        fields: dict[str, str | int] = {"name": name, "friend": friend, "things": things, **numbers}
        if previous:
            fields["things"], numbers["p"] = previous.things, previous.value
        question = template.question.format(**fields)
        if split_of(question) != split or (solved := _solve(template, numbers)) is None:
            continue
        shown, value = solved
        lines = [sentence.format(**(fields | shown)) for _, sentence in template.steps]
        return Problem(question, "\n".join([*lines, f"#### {value}"]), value, str(fields["things"]))


def problems(split: Split, seed: int) -> Iterator[Problem]:
    """Yield independent problems, endlessly."""
    rng = random.Random(f"problems/{split}/{seed}")
    while True:
        yield _problem(rng, split)


def conversation(rng: random.Random, split: Split, turns: int) -> list[Problem]:
    """Return `turns` problems; each after the first is with even odds a follow-up of the previous
    one.

    A follow-up is answered right only by a reader that still knows the earlier turn.
    """
    result = [_problem(rng, split)]
    while len(result) < turns:
        result.append(_problem(rng, split, result[-1] if rng.random() < 0.5 else None))
    return result


def held_out(count: int, seed: int) -> list[dict[str, str]]:
    """Return the first `count` different test problems, as GSM8K records."""
    records: dict[str, str] = {}
    for problem in problems("test", seed):
        records.setdefault(problem.question, problem.answer)
        if len(records) == count:
            break
    return [{"question": question, "answer": answer} for question, answer in records.items()]


def write_jsonl(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
