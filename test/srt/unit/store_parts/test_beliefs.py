"""What is believed to be stored, and what changes that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.mem_cache.store_parts.beliefs import StoredPages

KEYS = ["a", "b", "c", "d"]


def test_the_longest_unseen_are_forgotten_first() -> None:
    """Guards against beliefs that grow without bound, and against losing the popular ones."""
    pages = StoredPages(3)
    pages.stored(["a", "b", "c"])
    pages.stored(["a"])
    pages.stored(["d"])
    assert [key in pages for key in KEYS] == [True, False, True, True]
    assert len(pages) == 3


def test_asking_changes_nothing() -> None:
    """Guards against ranks that ask at different times and then forget different keys."""
    pages = StoredPages(2)
    pages.stored(["a", "b"])
    assert "a" in pages and pages.believed(["a", "b", "c"]) == 2
    pages.stored(["c"])
    assert "a" not in pages and "b" in pages


def test_a_query_that_finds_less_heals() -> None:
    """Guards against a key that the store has evicted and that is never written again."""
    pages = StoredPages(10)
    pages.stored(KEYS)
    pages.queried(KEYS, 1)
    assert [key in pages for key in KEYS] == [True, False, False, False]
    assert pages.healed == 3


def test_a_query_that_finds_more_teaches() -> None:
    """What another server wrote need not be written again."""
    pages = StoredPages(10)
    pages.queried(KEYS, 2)
    assert pages.believed(KEYS) == 2
    assert pages.healed == 0


def test_a_failed_query_is_evidence_of_nothing() -> None:
    """Guards against rewriting everything whenever a store is slow."""
    pages = StoredPages(10)
    pages.stored(KEYS)
    pages.queried(KEYS, None)
    assert pages.believed(KEYS) == 4


def test_clear() -> None:
    """Guards against beliefs that outlive the store's content."""
    pages = StoredPages(10)
    pages.stored(KEYS)
    pages.clear()
    assert pages.believed(KEYS) == len(pages) == 0


def test_believed_is_about_leading_pages() -> None:
    """Guards against a child that counts as stored behind a parent that is not."""
    pages = StoredPages(10)
    pages.stored(["a", "c"])
    assert pages.believed(["a", "b", "c"]) == 1


def test_no_room_is_refused() -> None:
    """A capacity that could hold nothing is a mistake of the caller."""
    with pytest.raises(ValueError, match="room for 0"):
        StoredPages(0)


_STEP = st.one_of(
    st.tuples(st.just("stored"), st.lists(st.sampled_from("abcdef"))),
    st.tuples(
        st.just("queried"),
        st.lists(st.sampled_from("abcdef"), unique=True),
        st.one_of(st.none(), st.integers(0, 6)),
    ),
)


@given(st.lists(_STEP), st.lists(st.lists(st.sampled_from("abcdef"))))
def test_ranks_that_hear_the_same_believe_the_same(
    steps: list[tuple[object, ...]], questions: list[list[str]]
) -> None:
    """Guards against anything but the agreed steps, such as a rank's own look-ups, that changes
    what it believes; and against more keys than there is room for."""
    one, other = StoredPages(4), StoredPages(4)
    for number, (name, *arguments) in enumerate(steps):
        getattr(one, str(name))(*arguments)
        getattr(other, str(name))(*arguments)
        for question in questions[: number % 3]:
            other.believed(question)
        assert list(one._keys) == list(other._keys)
        assert len(one) <= 4
