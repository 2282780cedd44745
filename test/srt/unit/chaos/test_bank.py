"""The bank of questions: conversations that share what real ones share."""

from collections.abc import Sequence

from chaos.bank import Bank, Shape, make_bank

SHAPE = Shape(threads=4, turns=3, prefixes=2, prefix=20, first=(3, 9), later=(1, 4), answer=(2, 6))


def ask(prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """An answer that depends on the whole prompt."""
    return [[(sum(prompt) + i) % 1000 + 5000 for i in range(count)] for prompt in prompts]


def bank(seed: int = 1) -> Bank:
    return make_bank(range(16, 900), seed, ask, SHAPE)


def test_a_turn_continues_the_one_before() -> None:
    """Guards against turns that share nothing: the tree would never be of use."""
    questions = bank().questions
    assert [question.number for question in questions] == list(range(12))
    assert bank().threads == (3, 3, 3, 3)
    for before, after in zip(questions, questions[1:], strict=False):
        if after.number % 3 == 0:
            continue
        said = (*before.prompt, *before.answer)
        assert after.prompt[: len(said)] == said
        assert 1 <= len(after.prompt) - len(said) <= 4


def test_answers_are_the_reference_cut_to_length() -> None:
    """Guards the expected tokens that every answer of a run is compared with."""
    for question in bank().questions:
        assert 2 <= len(question.answer) <= 6
        assert list(question.answer) == ask([list(question.prompt)], len(question.answer))[0]


def test_conversations_share_prefixes_and_seeds_do_not() -> None:
    """Guards against a bank without shared pages, or one that is the same for every seed."""
    firsts = [question.prompt[:20] for question in bank().questions[::3]]
    assert firsts[0] == firsts[2] != firsts[1] == firsts[3]
    assert bank(1) == bank(1) != bank(2)
