"""Both arms get the same host memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.hicache_buffer_only.memory import Split


@given(
    device=st.integers(1000, 100_000),
    page=st.integers(1, 64),
    ratio=st.floats(1.1, 8),
    share=st.floats(0.0, 2.0),
    stage=st.floats(0.02, 0.5),
)
def test_equal_totals(device: int, page: int, ratio: float, share: float, stage: float) -> None:
    """A comparison at unequal memory would show nothing but that."""
    split = Split(ratio, share, stage)
    cache = split.cache(device, page, page_bytes=page * 2048, workers=2)
    if int(cache.pool_pages * stage) < 2:
        with pytest.raises(ValueError, match="stage"):
            split.buffer_only(cache)
        return
    buffer_only = split.buffer_only(cache)
    assert buffer_only.total_bytes == cache.total_bytes
    assert buffer_only.pinned_bytes <= stage * cache.pinned_bytes


def test_the_pool_that_sglang_makes() -> None:
    """SGLang rounds down and adds a page; the benchmark compares this with what servers report."""
    memory = Split().cache(32_768, 16, page_bytes=16 * 2048, workers=2)
    assert memory.pool_pages == 4097
    assert memory.pinned_bytes == 2 * 4097 * 16 * 2048
    assert memory.segment_bytes == 1065 * 16 * 2048
