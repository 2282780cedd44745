"""The policies as functions: who wins, and which way each term pulls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.agentic.router.policies import (
    POLICIES,
    SCORES,
    Knobs,
    View,
    Work,
    choose,
    delta_kv,
    least_pending,
    linear,
    lmetric,
    lmetric_literal,
    overloaded,
)

WORK = Work(1000, 100)


def view(name: str, requests: int = 0, matched: int = 0, ongoing: int = 0, **more: int) -> View:
    given_ = {"pending_tokens": 0, "added_tokens": 0, "pool_tokens": 10_000, **more}
    return View(name, requests, ongoing_tokens=ongoing, matched_tokens=matched, **given_)


def pick(policy: str, views: list[View], turn: int = 0, pinned: int | None = None) -> str:
    choice = choose(policy, views, WORK, Knobs(), turn, pinned)
    return views[choice.index].name


@pytest.mark.parametrize(
    ("policy", "views", "winner"),
    [
        # Fewer tokens in flight win, whatever is cached.
        ("least_tokens", [view("a", 1, 900, 500), view("b", 1, 0, 400)], "b"),
        # 500 more tokens in flight lose to 600 cached ones, and win against 400.
        ("linear", [view("a", 1, 600, 900), view("b", 1, 0, 400)], "a"),
        ("linear", [view("a", 1, 400, 900), view("b", 1, 0, 400)], "b"),
        # (0 + 100) x 4 < (0 + 1000) x 1, and (0 + 300) x 4 is not.
        ("lmetric", [view("a", 3, 900), view("b")], "a"),
        ("lmetric", [view("a", 3, 700), view("b")], "b"),
        # What others have yet to prefill counts like this prompt's own tokens.
        ("lmetric", [view("a", 1, 500, pending_tokens=400), view("b", 1, 200)], "b"),
        # Uncached tokens and those before them, whatever the batch.
        ("least_pending", [view("a", 9, 500, pending_tokens=100), view("b", 0, 300)], "a"),
        ("least_pending", [view("a", 0, 500, pending_tokens=300), view("b", 9, 300)], "b"),
        # The holder of the prompt wins...
        ("delta_kv", [view("a"), view("b", 1, 1000)], "b"),
        # ...until its batch is larger by more than a few...
        ("delta_kv", [view("a", 0), view("b", 4, 1000)], "b"),
        ("delta_kv", [view("a", 0), view("b", 12, 1000)], "a"),
        # ...or its pool is full: 150 tokens to keep there cost more than 1000 elsewhere to move.
        (
            "delta_kv",
            [view("a", 4), view("b", 4, 950, added_tokens=95_000)],
            "a",
        ),
    ],
)
def test_who_wins(policy: str, views: list[View], winner: str) -> None:
    """Guards each formula against a lost term or sign; the order of candidates does not matter."""
    assert pick(policy, views) == winner
    assert pick(policy, views[::-1]) == winner


def test_an_lmetric_worker_without_requests_still_pays_for_what_it_has_to_prefill() -> None:
    """Guards against a factor of 0 that hides a worker's missing cache."""
    assert lmetric(view("a"), WORK, 0, Knobs()).score == 1000


def test_literal_lmetric_takes_any_idle_worker() -> None:
    """The published formula beside ours: an idle worker scores 0 whatever it lacks."""
    views = [view("holder", 1, matched=1000), view("busy", 2), view("idle")]
    assert pick("lmetric_literal", [view("short", 1, matched=900), view("idle")]) == "idle"
    assert pick("lmetric", [view("short", 1, matched=900), view("idle")]) == "short"
    assert pick("lmetric_literal", [*views[:2]]) == "holder"


def test_a_session_migrates_after_so_many_turns() -> None:
    """Guards the count, and that it goes to another worker, the least loaded one."""
    views = [view("a", matched=900), view("b", 2, ongoing=500), view("c", 1, ongoing=50)]
    knobs = Knobs(migrate_turns=3)
    stays = choose("linear", views, WORK, knobs, 0, 0, stayed=2)
    leaves = choose("linear", views, WORK, knobs, 0, 0, stayed=3)
    assert (stays.index, stays.reason) == (0, "pinned")
    assert (leaves.index, leaves.reason) == (2, "migrated")
    assert choose("linear", views[:1], WORK, knobs, 0, 0, stayed=9).index == 0
    assert choose("linear", views, WORK, Knobs(), 0, 0, stayed=9).reason == "pinned"


def test_round_robin_takes_turns_and_random_is_seeded() -> None:
    """Guards against a worker that is left out, and against runs that cannot be repeated."""
    views = [view("a"), view("b"), view("c")]
    assert [pick("round_robin", views, turn) for turn in range(4)] == ["a", "b", "c", "a"]
    drawn = [pick("random", views, turn) for turn in range(50)]
    assert drawn == [pick("random", views, turn) for turn in range(50)]
    assert set(drawn) == {"a", "b", "c"}
    other = [choose("random", views, WORK, Knobs(seed=1), turn, None).index for turn in range(50)]
    assert ["abc"[i] for i in other] != drawn


@pytest.mark.parametrize("policy", list(SCORES))
def test_equal_workers_take_turns(policy: str) -> None:
    """Guards against the first worker getting everything that ties."""
    views = [view("a"), view("b"), view("c")]
    assert {pick(policy, views, turn) for turn in range(3)} == {"a", "b", "c"}


def test_of_equal_scores_the_one_with_fewer_requests_wins() -> None:
    """Guards the order of the tie breakers."""
    views = [view("a", requests=2), view("b", requests=1)]
    assert {pick("linear", views, turn) for turn in range(2)} == {"b"}


def test_linear_keeps_a_session_on_its_worker_until_it_is_overloaded() -> None:
    """Guards the pin, and its end; no other policy may have either."""
    calm = [view("a", 1, ongoing=1000), view("b", 0)]
    assert pick("linear", calm, pinned=0) == "a"
    assert choose("linear", calm, WORK, Knobs(), 0, 0).reason == "pinned"
    loaded = [view("a", 3, ongoing=1200), view("b", 0)]
    choice = choose("linear", loaded, WORK, Knobs(), 0, 0)
    assert (choice.index, choice.reason) == (1, "overloaded")
    for policy in SCORES:
        if policy != "linear":
            for turn in range(2):
                assert pick(policy, loaded, turn, 0) == pick(policy, loaded, turn, None)


def test_a_lone_worker_is_never_overloaded() -> None:
    """Guards against a mean over nobody."""
    assert not overloaded([view("a", 9, ongoing=9000)], 0, WORK, Knobs())


views_ = st.builds(
    View,
    name=st.just("w"),
    requests=st.integers(0, 200),
    pending_tokens=st.integers(0, 10**6),
    ongoing_tokens=st.integers(0, 10**6),
    added_tokens=st.integers(0, 10**6),
    pool_tokens=st.integers(1, 10**6),
    matched_tokens=st.integers(0, 1000),
)
numbers = {
    name: st.integers(1, 1000)
    for name in ("requests", "pending_tokens", "ongoing_tokens", "added_tokens")
}


@given(views_, st.sampled_from(list(SCORES)), st.data())
def test_more_load_never_makes_a_worker_better(one: View, policy: str, data: st.DataObject) -> None:
    """Guards the sign of every load term."""
    field = data.draw(st.sampled_from(list(numbers)))
    more = one._replace(**{field: getattr(one, field) + data.draw(numbers[field])})
    score = SCORES[policy]
    assert score(more, WORK, 5.0, Knobs()).score >= score(one, WORK, 5.0, Knobs()).score


@given(views_, st.integers(1, 1000))
def test_a_longer_match_never_makes_a_worker_worse(one: View, more: int) -> None:
    """Guards the sign of every cache term."""
    better = one._replace(matched_tokens=min(1000, one.matched_tokens + more))
    for score in (linear, lmetric, lmetric_literal, least_pending, delta_kv):
        assert score(better, WORK, 5.0, Knobs()).score <= score(one, WORK, 5.0, Knobs()).score


@given(st.lists(views_, min_size=1, max_size=8), st.sampled_from(POLICIES), st.integers(0, 10**6))
def test_every_policy_names_a_candidate(views: list[View], policy: str, turn: int) -> None:
    """Guards against an index out of range; terms are given for each candidate or for none."""
    choice = choose(policy, views, WORK, Knobs(), turn, 0)
    assert 0 <= choice.index < len(views)
    assert len(choice.terms) in (0, len(views))


def test_delta_kv_does_not_pile_a_shared_prompt_on_one_worker() -> None:
    """Guards the term against piling up: of 32 requests for a prompt that only one of two workers
    holds, the other gets a fair part."""
    counts = [0, 0]
    for turn in range(32):
        views = [view("a", counts[0], 1000), view("b", counts[1])]
        counts[choose("delta_kv", views, WORK, Knobs(), turn, None).index] += 1
    assert counts[0] > counts[1] >= 32 // 6
