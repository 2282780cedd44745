"""Page arithmetic, and the plan of a delta transfer: exact, or refused with both numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.pages import (
    DeltaMismatch,
    chunk_end,
    page_ceil,
    page_floor,
    plan_delta,
    share_of_chunk,
)

PAGES = st.sampled_from([1, 4, 16, 64])


@dataclass(frozen=True)
class Listed:
    """One destination's announcement."""

    decode_prefix_len: int
    num_pages: int


@given(tokens=st.integers(0, 10_000), page=PAGES)
def test_rounding(tokens: int, page: int) -> None:
    """Guards against page arithmetic that is off by one at a page border."""
    assert page_floor(tokens, page) <= tokens <= page_ceil(tokens, page)
    assert page_floor(tokens, page) % page == page_ceil(tokens, page) % page == 0
    assert page_ceil(tokens, page) - page_floor(tokens, page) == (page if tokens % page else 0)


@pytest.mark.parametrize(
    ("computed", "page", "last", "end"),
    [
        (40, 16, False, 32),
        (40, 16, True, 40),
        (32, 16, False, 32),
        (15, 16, False, 0),
        (7, 1, False, 7),
        (0, 16, True, 0),
    ],
)
def test_chunk_end(computed: int, page: int, last: bool, end: int) -> None:
    """Guards against a half-computed page that is sent, or a last page that is not."""
    assert chunk_end(computed, page, last) == end


@pytest.mark.hazard("ranks-disagree-on-prefix")
@pytest.mark.parametrize(
    ("announced", "prompt", "page", "numbers"),
    [
        ([(-16, 3)], 2, 16, ["-16", "16 tokens"]),
        ([(17, 1)], 3, 16, ["17", "16 tokens"]),
        ([(64, 0)], 3, 16, ["64", "3 pages"]),
        ([(16, 3)], 3, 16, ["3 destination pages", "2 of the prompt's 3"]),
        ([(16, 1)], 3, 16, ["1 destination pages", "2 of the prompt's 3"]),
        ([(0, 0)], 3, 16, ["0 destination pages", "3 of the prompt's 3"]),
        ([(16, 2), (32, 1)], 3, 16, ["[16, 32]"]),
        ([(16, 2), (16, 1)], 3, 16, ["1 destination pages", "2 of"]),
    ],
    ids=[
        "negative",
        "unaligned",
        "longer than the prompt",
        "too many pages",
        "too few pages",
        "no pages where some are left",
        "ranks disagree about the prefix",
        "ranks disagree about the pages",
    ],
)
def test_plan_refuses(
    announced: list[tuple[int, int]], prompt: int, page: int, numbers: list[str]
) -> None:
    """Guards against a mismatch that is cut to fit, which writes the start of a prompt into the
    pages of its tail; the message has to name the room and both numbers."""
    with pytest.raises(DeltaMismatch) as error:
        plan_delta(41, [Listed(*pair) for pair in announced], prompt, page)
    message = str(error.value)
    assert "room 41" in message
    for number in numbers:
        assert number in message


@given(
    pages=st.lists(st.integers(0, 99), unique=True, max_size=12),
    size=st.integers(1, 5),
    start=st.integers(0, 9),
)
def test_ranks_share_a_chunk(pages: list[int], size: int, start: int) -> None:
    """Guards against pages that none of the ranks of a context parallel group sends, whatever their
    numbers; and against one rank that sends most of them."""
    chunk, part = np.array(pages, np.int32), slice(start, start + len(pages))
    shares = [share_of_chunk(chunk, part, rank, size) for rank in range(size)]
    places = range(9 + 12)
    sent = [pair for own, at in shares for pair in zip(places[at], own.tolist(), strict=True)]
    assert sent == list(enumerate(pages, start))
    lengths = [len(own) for own, _ in shares]
    assert sum(lengths) == len(pages) and max(lengths) - min(lengths) <= 1


#: Pages of a prefix, and what is wrong with an announcement: of its prefix, and of its pages.
ANNOUNCED = st.tuples(st.integers(0, 12), st.sampled_from([0, 0, 0, 1, -80]), st.integers(-1, 1))


@pytest.mark.hazard("prefix-rounding")
@given(page=PAGES, prompt=st.integers(1, 12), ranks=st.lists(ANNOUNCED, max_size=3))
def test_plan_accepts_exactly_the_right_combination(
    page: int, prompt: int, ranks: list[tuple[int, int, int]]
) -> None:
    """Guards against any accepted combination that would move a page to a wrong place, and against
    a refused one that would not: a full hit, or a room whose ranks are all dummies."""
    announced = {(cached * page + off, prompt - cached + more) for cached, off, more in ranks}
    destinations = [Listed(*each) for each in announced]
    prefix, pages = next(iter(announced), (0, prompt))
    is_whole = prefix in range(0, prompt * page + 1, page)
    if len(announced) <= 1 and is_whole and prefix // page + pages == prompt:
        plan = plan_delta(1, 2 * destinations, prompt, page)
        assert (plan.prefix_len, plan.num_pages) == (prefix, pages)
    else:
        with pytest.raises(DeltaMismatch):
            plan_delta(1, destinations, prompt, page)
