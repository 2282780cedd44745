"""Descriptors, compared with the bytes that one loop over pages and buffers would move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.nixl.descriptors import (
    Costs,
    Form,
    Heads,
    Pool,
    Rows,
    Runs,
    SelectorOverflow,
    check_pair,
    choose,
    prepared,
    prepared_strided,
    ranges,
    runs_of,
    select,
)

HIGH = 2**63
ITEM_LENS = st.lists(st.sampled_from([1, 8, 64, 4096]), min_size=1, max_size=4).map(tuple)


def pool(item_lens: tuple[int, ...], slots: int, base: int, device: int = 0) -> Pool:
    """Buffers one behind the other, with a gap of 5 bytes between them, from ``base`` on."""
    starts = np.cumsum([0, *(length * slots + 5 for length in item_lens[:-1])])
    return Pool(tuple(base + int(start) for start in starts), item_lens, slots, device)


def page_lists(data: st.DataObject, slots: int) -> tuple[list[int], list[int]]:
    """Pages of either side: any order, with rising, falling and repeated stretches, so that runs of
    all kinds come up. Destinations do not repeat (they are checked when they arrive)."""
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


def moves(
    source: Pool, destination: Pool, sources: list[int], destinations: list[int]
) -> dict[int, int]:
    """Destination address of every byte -> its source address, by a plain loop over integers."""
    moved: dict[int, int] = {}
    for buffer, length in enumerate(source.item_lens):
        for page, target in zip(sources, destinations, strict=True):
            for byte in range(length):
                to = destination.bases[buffer] + target * length + byte
                moved[to] = source.bases[buffer] + page * length + byte
    return moved


def moves_of(sources: Rows, destinations: Rows) -> dict[int, int]:
    """The same of two descriptor arrays."""
    moved: dict[int, int] = {}
    for ours, theirs in zip(sources.tolist(), destinations.tolist(), strict=True):
        assert ours[1] == theirs[1] > 0
        for byte in range(ours[1]):
            assert theirs[0] + byte not in moved
            moved[theirs[0] + byte] = ours[0] + byte
    return moved


@pytest.mark.hazard("foreign-geometry", "false-runs")
@given(
    item_lens=st.lists(st.sampled_from([1, 3, 8]), min_size=1, max_size=4).map(tuple),
    slots=st.integers(1, 24),
    more_slots=st.integers(0, 9),
    base=st.sampled_from([0, 4096, HIGH - 100, HIGH, 2**64 - 4096]),
    data=st.data(),
)
def test_both_forms_move_the_same_bytes(
    item_lens: tuple[int, ...], slots: int, more_slots: int, base: int, data: st.DataObject
) -> None:
    """Guards against bytes that are missing, twice, or at a wrong place: with unsorted and repeated
    pages, buffers of several lengths, another number of slots on the other side, and addresses that
    a signed number cannot hold."""
    source = pool(item_lens, slots, base, device=1)
    destination = pool(item_lens, slots + more_slots, base, device=2)
    check_pair(source, destination)
    sources, destinations = page_lists(data, slots)
    expected = moves(source, destination, sources, destinations)
    from_pages, to_pages = np.array(sources, np.int32), np.array(destinations, np.int32)

    ours, theirs = ranges(source, destination, runs_of(from_pages, to_pages))
    assert ours.dtype == theirs.dtype == np.uint64 and ours.shape == theirs.shape
    assert ours.flags.c_contiguous and theirs.flags.c_contiguous
    assert set(ours[:, 2].tolist()) <= {1} and set(theirs[:, 2].tolist()) <= {2}
    assert moves_of(ours, theirs) == expected

    our_picks, their_picks = select(source, from_pages), select(destination, to_pages)
    assert our_picks.dtype == their_picks.dtype == np.int32
    ours, theirs = prepared(source)[our_picks], prepared(destination)[their_picks]
    assert set(ours[:, 2].tolist()) <= {1} and set(theirs[:, 2].tolist()) <= {2}
    assert moves_of(ours, theirs) == expected


@given(
    token=st.lists(st.sampled_from([1, 3, 8]), min_size=1, max_size=3),
    page=st.sampled_from([1, 4, 16]),
    plan=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 2)),
    pages=st.integers(1, 12),
    more_pages=st.integers(0, 5),
    base=st.sampled_from([0, HIGH - 100, 2**64 - 32768]),
    data=st.data(),
)
def test_both_forms_move_the_same_heads(
    token: list[int],
    page: int,
    plan: tuple[int, int, int],
    pages: int,
    more_pages: int,
    base: int,
    data: st.DataObject,
) -> None:
    """Guards against heads that are missing, twice, or at a wrong place, in either form, where the
    two sides hold other numbers of heads and of pages; ``token``: bytes of a head, by buffer."""
    our_first, their_first, count = plan
    sides, layouts = [], []
    for first, held, slots in ((our_first, 4, pages), (their_first, 5, pages + more_pages)):
        wide = pool(tuple(held * page * size for size in token), slots, base, device=held)
        layouts.append(wide)
        sides.append(
            Pool(
                tuple(at + first * size for at, size in zip(wide.bases, token, strict=True)),
                tuple(count * size for size in token),
                slots * page,
                wide.device,
                Heads(first, count, page, tuple(held * size for size in token)),
            )
        )
    source, destination = sides
    check_pair(source, destination)
    sources, destinations = page_lists(data, pages)
    expected = {}
    for buffer, size in enumerate(token):
        for ours, theirs in zip(sources, destinations, strict=True):
            for number in range(page):
                for byte in range(count * size):
                    expected[
                        layouts[1].bases[buffer]
                        + ((theirs * page + number) * 5 + their_first) * size
                        + byte
                    ] = (
                        layouts[0].bases[buffer]
                        + ((ours * page + number) * 4 + our_first) * size
                        + byte
                    )
    from_pages, to_pages = np.array(sources, np.int32), np.array(destinations, np.int32)
    runs = runs_of(from_pages, to_pages, source.heads)
    assert len(runs) == len(sources) * page
    rows = ranges(source, destination, runs)
    assert all(each.dtype == np.uint64 and each.flags.c_contiguous for each in rows)
    assert moves_of(*rows) == expected
    picks = select(source, from_pages), select(destination, to_pages)
    assert picks[0].dtype == picks[1].dtype == np.int32
    assert moves_of(prepared(source)[picks[0]], prepared(destination)[picks[1]]) == expected
    for some in sides:
        assert prepared(some).tolist() == [
            [address + index * stride, length, device]
            for address, length, device, stride, number in prepared_strided(some).tolist()
            for index in range(number)
        ]


def slices(slots: int, page: int, token: int = 8) -> Pool:
    """The second half of each token of one buffer."""
    return Pool((4,), (4,), slots, 0, Heads(1, 1, page, (token,)))


def test_limits_of_slices() -> None:
    """Guards against pages that are counted in tokens, tokens that no selector can name, and slices
    that lap over into the next token or out of the address space."""
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
    assert prepared(top)[-1].tolist() == [2**64 - 4, 4, 0]
    with pytest.raises(ValueError, match="64 bits"):
        Pool((2**64 - 59,), (4,), 8, 0, Heads(1, 1, 4, (8,)))


@pytest.mark.hazard("false-runs")
@given(st.data())
def test_runs_are_as_long_as_they_can_be(data: st.DataObject) -> None:
    """Guards against merging where only one side rises, and against not merging where both do."""
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
    found = [list(row) for row in zip(*map(np.ndarray.tolist, _columns(runs)), strict=True)]
    assert found == expected and len(runs) == len(expected)


def _columns(runs: Runs) -> tuple[Rows, Rows, Rows]:
    return runs.sources, runs.destinations, runs.counts


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


def test_no_pages() -> None:
    """Guards against a full prefix hit that raises or moves something."""
    some = pool((8, 8), 4, 4096)
    nothing = np.empty(0, np.int32)
    ours, theirs = ranges(some, some, runs_of(nothing, nothing))
    assert ours.shape == theirs.shape == (0, 3)
    assert select(some, nothing).shape == (0,)


@given(item_lens=ITEM_LENS, slots=st.integers(1, 40), base=st.sampled_from([0, HIGH, HIGH + 77]))
def test_the_short_form_lists_the_same(item_lens: tuple[int, ...], slots: int, base: int) -> None:
    """Guards against a stride, a count or an order other than that of the long list."""
    some = pool(item_lens, slots, base, device=3)
    long = [
        (address + index * stride, length, device)
        for address, length, device, stride, count in prepared_strided(some).tolist()
        for index in range(count)
    ]
    assert [tuple(row) for row in prepared(some).tolist()] == long


@pytest.mark.hazard("foreign-geometry")
@example(buffers=2, slots=2**30, page=2**30 - 1)
@example(buffers=2**11, slots=2**20, page=2**20 - 1)
@given(buffers=st.integers(1, 128), slots=st.integers(1, 2**26), page=st.integers(0, 2**26 - 1))
def test_selectors_near_their_limit(buffers: int, slots: int, page: int) -> None:
    """Guards against selectors that wrap around in large pools: they are right or refused."""
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
    against a caller that cannot tell this from bad pages: it sends ranges, which work."""
    some = Pool((HIGH,) * buffers, (2,) * buffers, slots, 0)
    for make in (prepared, prepared_strided):
        with pytest.raises(SelectorOverflow):
            make(some)
    with pytest.raises(SelectorOverflow):
        select(some, np.array([0]))
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
    """Guards against numbers of a registration that would become addresses elsewhere."""
    with pytest.raises(ValueError):
        Pool(bases, item_lens, slots, device)


def test_the_last_byte_of_the_address_space() -> None:
    """Guards against a check that is off by one."""
    top = Pool((2**64 - 32,), (8,), 4, 0)
    assert prepared(top)[-1].tolist() == [2**64 - 8, 8, 0]


@pytest.mark.hazard("lists-cut-to-fit")
def test_pools_that_do_not_fit() -> None:
    """Guards against writing slots of one size to slots of another, or leaving buffers out; another
    number of slots is fine."""
    ours = pool((8, 16), 4, 0)
    check_pair(ours, pool((8, 16), 99, HIGH))
    for item_lens in ((8,), (8, 16, 16), (16, 8), (8, 8)):
        with pytest.raises(ValueError, match="2 buffers with slots of 8, 16 bytes"):
            check_pair(ours, pool(item_lens, 4, 0))


def test_choice() -> None:
    """Guards against prepared lists where there are none, or where pages are neighbours, and
    against ranges where they are scattered."""
    costs = Costs(ranges_fixed=10, ranges_each=3, prepared_fixed=20, prepared_each=1)

    def chosen(pages: int, runs: int, has_prepared: bool = True) -> Form:
        return choose(buffers=2, pages=pages, runs=runs, has_prepared=has_prepared, costs=costs)

    assert chosen(2048, 1) is Form.RANGES
    assert chosen(2048, 2048) is Form.PREPARED
    assert chosen(2048, 2048, has_prepared=False) is Form.RANGES
    assert chosen(30, 11) is Form.RANGES  # 76 against 80
    assert chosen(30, 12) is Form.PREPARED  # 82 against 80
    assert chosen(1, 1) is Form.RANGES
    assert chosen(0, 0) is Form.RANGES
