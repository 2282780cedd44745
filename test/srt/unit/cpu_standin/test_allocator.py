"""Paged allocation of the CPU stand-in, against a reference that proceeds token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu_standin import allocator

PAGE_SIZES = st.sampled_from([1, 2, 16, 64])


def slots_one_by_one(prefix, seq, last, free, page_size):
    """Return the slots by walking every token, or None if the free pages run out."""
    free, slots = iter(free), []
    for begin, end, slot in zip(prefix, seq, last, strict=True):
        for position in range(begin, end):
            if position % page_size == 0:
                page = next(free, None)
                if page is None:
                    return None
                slot = page * page_size
            else:
                slot += 1
            slots.append(slot)
    return slots


@st.composite
def batches(draw, decode=False):
    """Draw page size, prefix and sequence lengths, last slots, free pages (sometimes too few)."""
    page_size = draw(PAGE_SIZES)
    size = draw(st.integers(1, 6))
    prefix = draw(st.lists(st.integers(0, 200), min_size=size, max_size=size))
    added = st.just(1) if decode else st.integers(0, 150)
    seq = [p + draw(added) for p in prefix]
    # A prefix's last slot lies in its own page, at the offset of the prefix's length.
    last = [(1000 + i) * page_size + (p - 1) % page_size if p else -1 for i, p in enumerate(prefix)]
    need = sum(-(-s // page_size) - -(-p // page_size) for p, s in zip(prefix, seq, strict=True))
    count = draw(st.sampled_from([need, need + 5, max(need - 1, 0)]))
    free = draw(st.permutations(range(1, count + 1)))
    return page_size, prefix, seq, last, free


def same(result, expected):
    return (result is None) == (expected is None) and (
        expected is None or result.tolist() == expected
    )


@given(batches(), batches(decode=True))
def test_every_slot_is_that_of_its_token(extended, decoded) -> None:
    """Guards against slots of another page or another request, for every mix of partial pages,
    empty extends and full pools; and for one more token a request."""
    page_size, prefix, seq, last, free = extended
    result = allocator.extend_slots(*map(ints, (prefix, seq, last, free)), page_size)
    assert same(result, slots_one_by_one(prefix, seq, last, free, page_size))
    page_size, prefix, seq, last, free = decoded
    result = allocator.decode_slots(*map(ints, (seq, last, free)), page_size)
    assert same(result, slots_one_by_one(prefix, seq, last, free, page_size))


def ints(values):
    return np.asarray(values, dtype=np.int64)


def test_edit_needs_the_kernels() -> None:
    """Guards against another SGLang release, where the Triton kernels would silently stay."""
    with pytest.raises(ImportError, match="alloc_extend_kernel"):
        allocator.edit(type("Module", (), {"__name__": "allocator"})())
