"""The policies as functions: the winner, and the direction in which each term pulls."""

import pytest

from benchmark.agentic.router.policies import POLICIES, Knobs, View, Work, choose

WORK = Work(1000, 100)


def view(name: str, requests: int = 0, matched: int = 0, ongoing: int = 0, **more: int) -> View:
    fields = {"pending_tokens": 0, "added_tokens": 0, "pool_tokens": 10_000, **more}
    return View(name, requests, ongoing_tokens=ongoing, matched_tokens=matched, **fields)


def pick(policy: str, views: list[View], turn: int = 0, pinned: int | None = None) -> str:
    choice = choose(policy, views, WORK, Knobs(), turn, pinned)
    return views[choice.index].name


@pytest.mark.parametrize(
    ("policy", "views", "winner"),
    [
        # 500 more tokens in flight lose to 600 cached ones, and win against 400.
        ("linear", [view("a", 1, 600, 900), view("b", 1, 0, 400)], "a"),
        ("linear", [view("a", 1, 400, 900), view("b", 1, 0, 400)], "b"),
        # Equal scores: the worker with fewer requests wins.
        ("linear", [view("a", 2), view("b", 1)], "b"),
        # (0 + 100) x 4 < (0 + 1000) x 1, since this request counts; (0 + 300) x 4 is more.
        ("lmetric", [view("a", 3, 900), view("b")], "a"),
        ("lmetric", [view("a", 3, 700), view("b")], "b"),
        # Tokens that other requests have yet to prefill count like this prompt's own tokens.
        ("lmetric", [view("a", 1, 500, pending_tokens=400), view("b", 1, 200)], "b"),
        # The holder of the prompt wins...
        ("delta_kv", [view("a"), view("b", 1, 1000)], "b"),
        # ...until its batch is larger by more than a few...
        ("delta_kv", [view("a", 0), view("b", 4, 1000)], "b"),
        ("delta_kv", [view("a", 0), view("b", 12, 1000)], "a"),
        # ...or its pool is full: 150 tokens to keep there cost more than 1000 elsewhere to move.
        ("delta_kv", [view("a", 4), view("b", 4, 950, added_tokens=95_000)], "a"),
    ],
)
def test_the_winner(policy: str, views: list[View], winner: str) -> None:
    """Guards each formula against a lost term or sign; the order of candidates does not matter."""
    assert pick(policy, views) == winner
    assert pick(policy, views[::-1]) == winner


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_workers_take_turns(policy: str) -> None:
    """Guards against a first worker that wins every tie."""
    views = [view("a"), view("b"), view("c")]
    assert len({pick(policy, views, turn) for turn in range(3)}) == 3


def test_linear_keeps_a_session_on_its_worker_until_it_is_overloaded() -> None:
    """Guards the pin and its end; no other policy may have either. A lone worker keeps all its
    sessions."""
    calm = [view("a", 1, ongoing=1000), view("b", 0)]
    assert choose("linear", calm, WORK, Knobs(), 0, 0)[:2] == (0, "pinned")
    loaded = [view("a", 3, ongoing=1200), view("b", 0)]
    assert choose("linear", loaded, WORK, Knobs(), 0, 0)[:2] == (1, "overloaded")
    assert choose("linear", loaded[:1], WORK, Knobs(), 0, 0)[:2] == (0, "pinned")
    for policy in set(POLICIES) - {"linear"}:
        for turn in range(2):
            assert pick(policy, loaded, turn, 0) == pick(policy, loaded, turn, None)
