"""Descriptors, compared with the bytes that a simple loop over pages and buffers would move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.nixl.descriptors import (
    Heads,
    Pool,
    Rows,
    SelectorOverflow,
    check_pair,
    is_selected_faster,
    prepared_strided,
    ranges,
    runs_of,
    select,
)

HIGH = 2**63


def pool(item_lens: tuple[int, ...], slots: int, base: int, device: int = 0) -> Pool:
    """Return consecutive buffers with a gap of 5 bytes between them, from ``base`` on."""
    starts = np.cumsum([0, *(length * slots + 5 for length in item_lens[:-1])])
    return Pool(tuple(base + int(start) for start in starts), item_lens, slots, device)


def page_lists(data: st.DataObject, slots: int) -> tuple[list[int], list[int]]:
    """Draw pages of either side: any order, with rising, falling and repeated stretches, so that
    runs of all kinds occur. Destinations do not repeat (announcements are checked on arrival)."""
    stretches = st.lists(st.tuples(st.integers(0, slots - 1), st.integers(1, 6), st.booleans()))
    sources: list[int] = []
    for first, length, falls in data.draw(stretches):
        stretch = [(first + step) % slots for step in range(length)]
        sources += reversed(stretch) if falls else stretch
    order = data.draw(st.sampled_from(["rising", "falling", "any"]))
    destinations = list(range(slots))
    if order == "any":
        destinations = data.draw(st.permutations(destinations))
    elif order == "falling":
        destinations.reverse()
    count = min(len(sources), slots)
    return sources[:count], destinations[:count]


def entries(some: Pool) -> Rows:
    """Return the prepared list, one row per entry."""
    listed = [
        (address + index * stride, length, device)
        for address, length, device, stride, number in prepared_strided(some).tolist()
        for index in range(number)
    ]
    return np.array(listed, np.uint64).reshape(-1, 3)


def moves_of(sources: Rows, destinations: Rows) -> dict[int, int]:
    """Return the moved bytes of two descriptor arrays: destination -> source."""
    moved: dict[int, int] = {}
    for ours, theirs in zip(sources.tolist(), destinations.tolist(), strict=True):
        assert ours[1] == theirs[1] > 0
        for byte in range(ours[1]):
            assert theirs[0] + byte not in moved
            moved[theirs[0] + byte] = ours[0] + byte
    return moved


#: First head on prefill, on decode, and number of heads; tokens have 4 heads on prefill, 5 on
#: decode.
PLANS = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 2))


@pytest.mark.hazard("foreign-geometry", "false-runs")
@given(
    sizes=st.lists(st.sampled_from([1, 3, 8]), min_size=1, max_size=4),
    page=st.sampled_from([1, 4, 16]),
    plan=st.none() | PLANS,
    pages=st.integers(1, 12),
    more_pages=st.integers(0, 5),
    base=st.sampled_from([0, 4096, HIGH - 100, HIGH, 2**64 - 32768]),
    data=st.data(),
)
def test_both_forms_move_the_same_bytes(
    sizes: list[int],
    page: int,
    plan: tuple[int, int, int] | None,
    pages: int,
    more_pages: int,
    base: int,
    data: st.DataObject,
) -> None:
    """Guards against bytes that are missing, twice, or at a wrong place, in whole pages and in
    heads of their tokens (``plan``; ``sizes``: bytes of a head, or of a page, by buffer): with
    unsorted and repeated pages, buffers of several lengths, another number of pages or heads on the
    other side, and addresses that a signed number cannot hold."""
    wide, sides = [], []
    page, (our_first, their_first, count) = (page, plan) if plan else (1, (0, 0, 1))
    ours_held, theirs_held = (4, 5) if plan else (1, 1)
    for first, held, slots in (
        (our_first, ours_held, pages),
        (their_first, theirs_held, pages + more_pages),
    ):
        all_heads = pool(tuple(held * page * size for size in sizes), slots, base, len(wide) + 1)
        wide.append(all_heads)
        some = Pool(
            tuple(at + first * size for at, size in zip(all_heads.bases, sizes, strict=True)),
            tuple(count * size for size in sizes),
            slots * page,
            all_heads.device,
            Heads(first, count, page, tuple(held * size for size in sizes)),
        )
        sides.append(some if plan else all_heads)
    source, destination = sides
    check_pair(source, destination)
    sources, destinations = page_lists(data, pages)
    expected = {}
    for buffer, size in enumerate(sizes):
        for ours, theirs in zip(sources, destinations, strict=True):
            for token in range(page):
                at = ((ours * page + token) * ours_held + our_first) * size
                to = ((theirs * page + token) * theirs_held + their_first) * size
                for byte in range(count * size):
                    expected[wide[1].bases[buffer] + to + byte] = wide[0].bases[buffer] + at + byte
    from_pages, to_pages = np.array(sources, np.int32), np.array(destinations, np.int32)
    runs = runs_of(from_pages, to_pages, source.heads)
    assert not plan or len(runs) == len(sources) * page
    picks = select(source, from_pages), select(destination, to_pages)
    assert picks[0].dtype == picks[1].dtype == np.int32
    as_ranges = ranges(source, destination, runs)
    assert all(each.dtype == np.uint64 and each.flags.c_contiguous for each in as_ranges)
    for rows in (as_ranges, (entries(source)[picks[0]], entries(destination)[picks[1]])):
        assert moves_of(*rows) == expected
        assert [set(each[:, 2].tolist()) for each in rows] == [{1}, {2}] or not sources


def slices(slots: int, page: int, token: int = 8) -> Pool:
    """Return the second half of each token of one buffer."""
    return Pool((4,), (4,), slots, 0, Heads(1, 1, page, (token,)))


def test_limits_of_slices() -> None:
    """Guards against pages counted in tokens, tokens that no selector can name, and slices that
    reach into the next token or out of the address space."""
    some = slices(64, 16)
    for page in (-1, 4):
        for check in (some.check, lambda pages: select(some, pages)):
            with pytest.raises(ValueError, match=f"page {page} of a pool of 4"):
                check(np.array([page]))
    for make in (prepared_strided, lambda pool: select(pool, np.array([0]))):
        with pytest.raises(SelectorOverflow):
            make(slices(2**31, 16))
    assert select(slices(2**31 - 16, 16), np.array([2**27 - 2]))[-1] == 2**31 - 17
    with pytest.raises(ValueError, match="pages of 16 slots cannot be written to pages of 1"):
        check_pair(some, slices(64, 1))
    for impossible in (lambda: slices(63, 16), lambda: slices(64, 16, 3)):
        with pytest.raises(ValueError):
            impossible()
    top = Pool((2**64 - 60,), (4,), 8, 0, Heads(1, 1, 4, (8,)))
    assert entries(top)[-1].tolist() == [2**64 - 4, 4, 0]
    with pytest.raises(ValueError, match="64 bits"):
        Pool((2**64 - 59,), (4,), 8, 0, Heads(1, 1, 4, (8,)))


@pytest.mark.hazard("false-runs")
@given(st.data())
def test_runs_are_as_long_as_they_can_be(data: st.DataObject) -> None:
    """Guards against merging if only one side rises, and against not merging if both do."""
    sources, destinations = page_lists(data, 24)
    expected: list[list[int]] = []
    for source, destination in zip(sources, destinations, strict=True):
        if expected and (source, destination) == (
            expected[-1][0] + expected[-1][2],
            expected[-1][1] + expected[-1][2],
        ):
            expected[-1][2] += 1
        else:
            expected.append([source, destination, 1])
    runs = runs_of(np.array(sources, np.int32), np.array(destinations, np.int32))
    columns = runs.sources.tolist(), runs.destinations.tolist(), runs.counts.tolist()
    assert [list(row) for row in zip(*columns, strict=True)] == expected
    assert len(runs) == len(expected)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_falling_pages_of_every_type(dtype: type[np.integer]) -> None:
    """Guards against differences of unsigned or small types that wrap around to one."""
    pages = np.array([2**31 - 1, 0, 1], dtype)
    runs = runs_of(pages, pages[::-1].copy())
    assert runs.counts.tolist() == [1, 1, 1]
    assert runs.sources.tolist() == [2**31 - 1, 0, 1]


@pytest.mark.hazard("peer-ignores-prefix", "lists-cut-to-fit")
def test_different_numbers_of_pages() -> None:
    """Guards against a list that is cut, or repeated by broadcasting."""
    for ours, theirs in ((5, 3), (3, 5), (1, 3), (3, 1), (0, 1)):
        with pytest.raises(ValueError, match=f"{ours} pages .* {theirs}"):
            runs_of(np.arange(ours), np.arange(theirs))


@pytest.mark.hazard("foreign-geometry")
@example(buffers=2, slots=2**30, page=2**30 - 1)
@example(buffers=2**11, slots=2**20, page=2**20 - 1)
@given(buffers=st.integers(1, 128), slots=st.integers(1, 2**26), page=st.integers(0, 2**26 - 1))
def test_selectors_near_their_limit(buffers: int, slots: int, page: int) -> None:
    """Guards against selectors that wrap around in large pools: they must be right or refused."""
    some = Pool((0,) * buffers, (1,) * buffers, slots, 0)
    last = (buffers - 1) * slots + page
    if buffers * slots > 2**31:
        with pytest.raises(SelectorOverflow, match=str(buffers * slots)):
            select(some, np.array([page]))
    elif page >= slots:
        with pytest.raises(ValueError, match=f"page {page} of a pool of {slots}"):
            select(some, np.array([0, page]))
    else:
        selected = select(some, np.array([page])).tolist()
        assert selected == list(range(page, last + 1, slots))


@pytest.mark.parametrize(("buffers", "slots"), [(3, 2**30), (1, 2**31), (128, 2**25)])
def test_pools_that_selectors_cannot_name(buffers: int, slots: int) -> None:
    """Guards against preparing a list of gigabytes of which a part can never be selected, and
    against a caller that cannot tell this from bad pages: it must fall back to ranges."""
    some = Pool((HIGH,) * buffers, (2,) * buffers, slots, 0)
    for make in (prepared_strided, lambda pool: select(pool, np.array([0]))):
        with pytest.raises(SelectorOverflow):
            make(some)
    page = np.array([slots - 1])
    ours, _ = ranges(some, some, runs_of(page, page))
    assert ours[:, 0].tolist() == [HIGH + 2 * (slots - 1)] * buffers


@pytest.mark.parametrize("pages", [[-1], [0, -7], [4], [0, 2**40]])
def test_pages_that_are_not_there(pages: list[int]) -> None:
    """Guards against an index that selects another buffer's page, or one that is cut to 32 bits."""
    some = pool((8, 8), 4, 4096)
    with pytest.raises(ValueError, match=f"page {pages[-1]} of a pool of 4"):
        some.check(np.array(pages))
    with pytest.raises(ValueError, match=f"page {pages[-1]} of a pool of 4"):
        select(some, np.array(pages))


@pytest.mark.parametrize(
    ("bases", "item_lens", "slots", "device"),
    [
        ((0, 0), (8,), 4, 0),
        ((-8,), (8,), 4, 0),
        ((0,), (0,), 4, 0),
        ((0,), (8,), 0, 0),
        ((0,), (8,), 4, -1),
        ((2**64 - 31,), (8,), 4, 0),
        ((2**64,), (8,), 1, 0),
    ],
)
def test_geometry_that_cannot_be(
    bases: tuple[int, ...], item_lens: tuple[int, ...], slots: int, device: int
) -> None:
    """Guards against registered numbers that would become other addresses."""
    with pytest.raises(ValueError):
        Pool(bases, item_lens, slots, device)
    top = Pool((2**64 - 32,), (8,), 4, 0)
    assert entries(top)[-1].tolist() == [2**64 - 8, 8, 0], "the last byte of the address space"


@pytest.mark.hazard("lists-cut-to-fit")
def test_pools_that_do_not_fit() -> None:
    """Guards against writing slots of one size to slots of another, or omitting buffers; another
    number of slots is allowed."""
    ours = pool((8, 16), 4, 0)
    check_pair(ours, pool((8, 16), 99, HIGH))
    for item_lens in ((8,), (8, 16, 16), (16, 8), (8, 8)):
        with pytest.raises(ValueError, match="2 buffers with slots of 8, 16 bytes"):
            check_pair(ours, pool(item_lens, 4, 0))


@pytest.mark.parametrize(
    ("pages", "runs", "is_selected"),
    # For 2 buffers: 60,000 pages 351 us, in 2,000 runs 331 us, in 3,000 459 us.
    [(2048, 1, True), (60_000, 1, False), (60_000, 2000, False), (60_000, 3000, True)],
)
def test_choice(pages: int, runs: int, is_selected: bool) -> None:
    """Guards against prepared lists for contiguous pages, and against ranges for scattered ones."""
    assert is_selected_faster(2, pages, runs) == is_selected
