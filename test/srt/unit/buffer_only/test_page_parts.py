"""Pages of host slots, and results per page from results per value. The storage backends' tests
check the bytes."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.mem_cache.buffer_only import host_pool as page_parts


def test_page_numbers_of_host_slots() -> None:
    """Slots of whole pages, in any order of the pages."""
    slots = torch.cat([torch.arange(8, 12), torch.arange(0, 4)])
    assert page_parts.page_numbers(slots, 4) == [2, 0]
    assert page_parts.page_numbers(torch.empty(0, dtype=torch.int64), 4) == []
    assert page_parts.page_numbers(torch.tensor([3, 1]), 1) == [3, 1]


@pytest.mark.parametrize("slots", [[0, 1, 2], [1, 2, 3, 4], [0, 1, 3, 2], [0, 1, 2, 4]])
def test_slots_that_are_no_pages_are_refused(slots: list[int]) -> None:
    """Guards against bytes of one page that are written to its neighbour."""
    with pytest.raises(ValueError, match="whole pages"):
        page_parts.page_numbers(torch.tensor(slots), 4)


def test_a_page_is_there_if_all_its_values_are() -> None:
    """Guards against a page that counts as present with one of its values missing."""
    assert page_parts.fold([True, True, True, False, False, True], 2, 3) == [True, False, False]
    assert page_parts.fold([True, False], 1, 2) == [True, False]
    assert page_parts.fold([], 2, 0) == []


@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_results_of_another_length_are_refused(count: int) -> None:
    """Guards against results by key that are read as results by page."""
    with pytest.raises(ValueError, match=f"{count} results for 1 pages of 2 values"):
        page_parts.fold([True] * count, 2, 1)
