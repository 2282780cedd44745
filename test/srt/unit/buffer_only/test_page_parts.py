"""Parts of pages, their keys and their memory, without SGLang's pools."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.mem_cache.buffer_only import page_parts


def part(label: str, *widths: int, pages: int = 5, extra: bool = False) -> page_parts.Part:
    """A part of one piece, or of one a layer."""
    pieces = tuple(torch.randint(0, 256, (pages, width), dtype=torch.uint8) for width in widths)
    return page_parts.Part(label, pieces, extra=extra)


def test_lists_go_page_by_page_in_one_order() -> None:
    """Guards against keys and addresses that are listed in different orders."""
    k, v = part("k", 8), part("v", 4)
    values = page_parts.apart([k, v])
    names = page_parts.keys(values, ["a", "b"], lambda page, value: f"{page}_{value.label}")
    assert names == ["a_k", "a_v", "b_k", "b_v"]
    addresses, sizes = page_parts.buffers(values, [3, 1])
    assert addresses == [side.pieces[0][page].data_ptr() for page in (3, 1) for side in (k, v)]
    assert sizes == [8, 4, 8, 4] == page_parts.sizes(values, 2)


def test_how_a_page_may_be_kept() -> None:
    """Guards against a flat page that contains what SGLang does not know."""
    latent, index = part("k", 8), part("index", 4, extra=True)
    assert [value.label for value in page_parts.apart([latent, index])] == ["k", "index"]
    assert [value.label for value in page_parts.together([latent, index])] == ["", "index"]
    assert page_parts.Value("", (latent, index)).size == 12


def test_pieces_are_gathered_and_scattered_in_order() -> None:
    """Guards against layers that change places on their way through a store."""
    value = page_parts.Value("", (part("k", 3, 5), part("v", 2, 4)))
    before = value.gather(1)
    assert len(before) == value.size == 14
    untouched = [piece[2].clone() for piece in value.pieces]
    value.scatter(4, before)
    assert torch.equal(value.gather(4), before)
    assert all(map(torch.equal, untouched, [piece[2] for piece in value.pieces]))
    assert not value.in_place


def test_memory_is_the_pools_own() -> None:
    """Guards against a copy where a store is to read and write the pool."""
    (value,) = page_parts.apart([part("k", 6)])
    value.memory(2).fill_(7)
    assert value.pieces[0][2].tolist() == [7] * 6


def test_page_numbers_of_host_slots() -> None:
    """Slots of whole pages, in any order of the pages."""
    slots = torch.cat([torch.arange(8, 12), torch.arange(0, 4)])
    assert page_parts.page_numbers(slots, 4) == [2, 0]
    assert page_parts.page_numbers(torch.empty(0, dtype=torch.int64), 4) == []
    assert page_parts.page_numbers(torch.tensor([3, 1]), 1) == [3, 1]


@pytest.mark.parametrize("slots", [[0, 1, 2], [1, 2, 3, 4], [0, 1, 3, 2], [0, 1, 2, 4]])
def test_slots_that_are_no_pages_are_refused(slots: list[int]) -> None:
    """Guards against bytes of one page that land in its neighbour."""
    with pytest.raises(ValueError, match="whole pages"):
        page_parts.page_numbers(torch.tensor(slots), 4)


def test_a_page_is_there_if_all_its_values_are() -> None:
    """Guards against a page that counts with one of its values missing."""
    assert page_parts.fold([True, True, True, False, False, True], 2, 3) == [True, False, False]
    assert page_parts.fold([True, False], 1, 2) == [True, False]
    assert page_parts.fold([], 2, 0) == []


@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_results_of_another_length_are_refused(count: int) -> None:
    """Guards against results by key that are read as results by page."""
    with pytest.raises(ValueError, match=f"{count} results for 1 pages of 2 values"):
        page_parts.fold([True] * count, 2, 1)


def test_only_leading_pages_count() -> None:
    """Guards against a hole that moves the pages behind it."""
    assert page_parts.leading([True, True, False, True]) == 2
    assert page_parts.leading([False, True]) == 0
    assert page_parts.leading([]) == 0
    assert page_parts.leading([True] * 3) == 3
