"""One chunk, cut from decode ranks' announcements: right or refused, and independent of later
changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.nixl.conn import cut_chunk
from sglang.srt.disaggregation.delta.pages import DeltaMismatch
from unit.delta.fakes import announcement


def rank(name: str, *pages: int, **fields: Any) -> Any:
    """Return one decode rank's announcement."""
    return announcement(
        7,
        agent_name=name,
        dst_kv_indices=np.array(pages, np.int32),
        dst_aux_index=fields.pop("slot", 2),
        dst_state_indices=fields.pop("state", []),
        **fields,
    )


def cut(announcements: list[Any], pages: Any, start: int = 0, **changes: Any) -> Any:
    """Cut a chunk of ``pages`` from the ``start``th of the room's pages on."""
    fields = {"chunk_id": 1, "metadata_slot": None, "state_pages": None} | changes
    return cut_chunk(7, announcements, np.array(pages), slice(start, start + len(pages)), **fields)


@given(count=st.integers(0, 9), start=st.integers(0, 9), data=st.data())
def test_the_place_of_a_chunk(count: int, start: int, data: st.DataObject) -> None:
    """Guards against pages at another chunk's place."""
    count = min(count, 9 - start)
    pages = data.draw(st.permutations(range(100, 109)))
    made = cut([rank("a", *pages)], list(range(count)), start)
    assert made.destinations["a"].pages.tolist() == pages[start : start + count]


@pytest.mark.hazard("lists-cut-to-fit")
@pytest.mark.parametrize("listed", [0, 1, 2, 4])
@pytest.mark.parametrize("good_first", [True, False])
def test_a_rank_that_listed_another_number(listed: int, good_first: bool) -> None:
    """Guards against pages that are cut to the shorter list, for this rank or the next; the last
    place of a longer list is another chunk's."""
    good, bad = rank("good", 5, 6, 7, 8), rank("bad", *range(listed))
    both = [good, bad] if good_first else [bad, good]
    pages = np.array([1, 2, 3, 4] if listed < 4 else [1, 2, 3, 4, 9], np.int64)
    before = pages.copy()
    if listed == 4:
        good.dst_kv_indices = np.arange(5)
    with pytest.raises(
        DeltaMismatch, match=f"chunk 1 has {len(pages)} pages.* bad listed {listed}"
    ):
        cut(both, pages)
    assert pages.tolist() == before.tolist()
    assert len(good.dst_kv_indices) == (5 if listed == 4 else 4)


def test_two_ranks() -> None:
    """Guards against one rank's pages, slot or pool used for another rank."""
    frame = announcement(7).delta
    sized = type(frame)(
        decode_prefix_len=0, num_pages=2, is_dummy=False, pool_pages=9, metadata_slots=4
    )
    made = cut(
        [
            rank("a", 5, 6, delta=sized, slot=1, state=[3]),
            rank("b", 8, 7, slot=3),
            rank("c", dummy=True),
            rank("d", 1, 2, stock=True),
        ],
        [1, 2],
        state_pages=[9],
    )
    found = {
        name: (
            to.pages.tolist(),
            to.metadata_slot,
            to.state_pages.tolist(),
            to.pool_pages,
            to.metadata_slots,
        )
        for name, to in made.destinations.items()
    }
    assert found == {
        "a": ([5, 6], 1, [3], 9, 4),
        "b": ([8, 7], 3, [], None, None),  # its frame has no sizes
        "d": ([1, 2], 2, [], None, None),
    }


@pytest.mark.hazard("source-given-away")
def test_nothing_is_alive() -> None:
    """Guards against a queued chunk that changes when the scheduler reuses its pages for another
    request."""
    table = np.array([4, 5, 6, 7], np.int32)
    state = [8, 9]
    made = cut_chunk(7, [rank("a", 1, 2)], table[1:3], slice(0, 2), 0, 3, state)
    table[:], state[0] = 99, 99
    assert made.pages.tolist() == [5, 6] and made.pages.dtype == np.int32
    assert made.state_pages.tolist() == [8, 9]
    for pages in (made.pages, made.state_pages):
        with pytest.raises(ValueError, match="read-only"):
            pages[0] = 1
    with pytest.raises(AttributeError):
        made.chunk_id = 5


@pytest.mark.parametrize(
    ("given_", "numbers"),
    [
        (None, []),
        ([], []),
        (np.array([], np.int32), []),
        ([3], [3]),
        ([np.int64(3), 4], [3, 4]),
        (np.array([3, 4], np.int32), [3, 4]),
        ([np.array(3)], [3]),
        ([np.array([3])], [3]),
        ([np.array([3, 4]), np.array([5, 6])], [3, 4, 5, 6]),
        (np.array([[3], [4]]), [3, 4]),
        ([2**31 - 1], [2**31 - 1]),
    ],
)
def test_state_of_any_shape(given_: Any, numbers: list[int]) -> None:
    """Guards against a scheduler that fails on the shape of a model's state indices: they come as
    numbers, arrays, and lists of arrays."""
    made = cut([rank("a", state=given_)], [], state_pages=given_)
    for pages in (made.state_pages, made.destinations["a"].state_pages):
        assert pages.tolist() == numbers and pages.dtype == np.int32 and pages.ndim == 1


def test_state_goes_with_the_last_chunk() -> None:
    """Guards against the scheduler reading all pages of state of all decode ranks for each chunk: a
    list of 131,072 takes 10 ms."""

    class Unread(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("a chunk before the last one needs no state")

        __array__ = __len__ = __iter__

    made = cut([rank("a", 5, state=Unread([1]))], [5])
    assert not len(made.state_pages) and not len(made.destinations["a"].state_pages)


def test_no_rank_wants_anything() -> None:
    """Guards against an error if this rank sends no pages."""
    assert cut([rank("a", dummy=True)], [1]).destinations == {}
