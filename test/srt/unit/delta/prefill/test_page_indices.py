"""Pages of a chunk, from the scheduler's table on the device to a list on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.pages import RECURRENT, moved_state, page_indices
from sglang.srt.disaggregation.delta.prefill.scheduler import DeltaPrefill
from sglang.srt.disaggregation.utils import kv_to_page_indices


class OnDevice:
    """A tensor that records the amount copied to the host. It supports neither arithmetic nor
    strides: either would be a kernel on the scheduler's stream."""

    def __init__(self, tensor: torch.Tensor, copied: list[int]) -> None:
        self._tensor = tensor
        self._copied = copied

    def __getitem__(self, part: slice) -> OnDevice:
        assert part.step in (None, 1)
        return OnDevice(self._tensor[part], self._copied)

    def cpu(self) -> torch.Tensor:
        self._copied.append(self._tensor.numel())
        return self._tensor


def row_of(pages: list[int], page: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a request's row of token slots in these pages; slots past its end are another
    request's."""
    slots = torch.tensor(pages)[:, None] * page + torch.arange(page)
    return slots.reshape(-1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page", [1, 16, 64])
@given(data=st.data())
def test_same_pages_as_stock(page: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """Guards against pages that differ from SGLang's, at any cut, including a partly filled last
    page; against copying more than once, or more than one piece of memory; and against another type
    than the one that is sent."""
    pages = data.draw(st.permutations(range(1, 13)))
    start = data.draw(st.integers(0, len(pages))) * page
    end = data.draw(st.integers(start, len(pages) * page))
    row = row_of(pages, page, dtype)
    copied: list[int] = []
    found = page_indices(OnDevice(row, copied), start, end, page)
    expected = kv_to_page_indices(row[start:end].numpy(), page)
    assert found.tolist() == expected.tolist() == pages[start // page : -(-end // page)]
    assert found.dtype == np.int32 and found.ndim == 1
    assert copied == [end - start]


def test_an_end_before_the_start() -> None:
    """Guards against pages for a chunk if decode holds more than was computed."""
    assert page_indices(row_of([4, 5, 6], 16, torch.int32), 32, 16, 16).tolist() == []


def test_the_index_of_a_recurrent_state_is_copied_as_it_lies() -> None:
    """Guards against a list of rows or a conversion on the device, behind its queued kernels; and
    against an index that changes with the table when the row gets another request."""
    copied: list[int] = []
    table = torch.tensor([7, 5, 9], dtype=torch.int32)
    rows = SimpleNamespace(get_mamba_indices=OnDevice(table, copied).__getitem__)
    pool: Any = SimpleNamespace(**{RECURRENT: None})
    found = moved_state(pool, rows, SimpleNamespace(req_pool_idx=1), lambda: None)
    table[1] = 8
    assert found.tolist() == [5] and found.dtype == np.int32 and copied == [1]


class Stock:
    """SGLang's own method, which records its calls."""

    def send_kv_chunk(self, *call: Any) -> None:
        self.stock_calls.append(call)


class Prefill(DeltaPrefill, Stock):
    """A scheduler with a pool of 4 tokens per page."""

    def __init__(self, pool: Any) -> None:
        self.stock_calls: list[Any] = []
        self.sent: list[Any] = []
        self.copied: list[int] = []
        self.token_to_kv_pool_allocator = SimpleNamespace(page_size=4, get_kvcache=lambda: pool)
        row = OnDevice(row_of([7, 3, 5], 4, torch.int64), self.copied)
        self.req_to_token_pool = SimpleNamespace(req_to_token=[row])
        self.disagg_metadata_buffers = SimpleNamespace(set_buf=lambda req: None)

    def send(self, prompt: int, *chunks: int, **sender: Any) -> None:
        """Compute a request of ``prompt`` tokens up to each of ``chunks``; the last chunk ends
        it."""
        sender["send"] = lambda pages, state: self.sent.append(
            (pages.tolist(), None if state is None else state.tolist())
        )
        request = SimpleNamespace(
            origin_input_ids=[0] * prompt,
            start_send_idx=0,
            req_pool_idx=0,
            disagg_kv_sender=SimpleNamespace(**sender),
        )
        for computed in chunks:
            request.fill_ids = [0] * computed
            self.send_kv_chunk(request, last_chunk=computed == chunks[-1])


PLAIN = SimpleNamespace()
HYBRID = SimpleNamespace(get_state_buf_infos=lambda: None)
INDEXED = SimpleNamespace(index_k_with_scale_buffer=["layer"], **vars(HYBRID))


@pytest.mark.parametrize(
    ("pool", "prefix", "prompt", "chunks", "sent"),
    [
        pytest.param(PLAIN, 0, 11, [12], [([7, 3, 5], None)], id="eleven tokens in three pages"),
        pytest.param(PLAIN, 0, 11, [6, 12], [([7], None), ([3, 5], None)], id="whole pages first"),
        pytest.param(PLAIN, 8, 11, [6, 12], [([5], None)], id="behind decode's prefix"),
        pytest.param(PLAIN, 8, 8, [8], [([], None)], id="a full hit"),
        pytest.param(INDEXED, 0, 11, [6, 11], [([7], None), ([3, 5], [7, 3, 5])], id="an index"),
        pytest.param(INDEXED, 4, 11, [6, 11], [([3, 5], [3, 5])], id="an index behind a prefix"),
        pytest.param(INDEXED, 8, 11, [6, 11], [([5], [5])], id="an index behind two pages"),
        pytest.param(INDEXED, 8, 8, [8], [([], None)], id="an index, of a full hit"),
    ],
)
def test_what_a_chunk_sends(
    pool: Any, prefix: int, prompt: int, chunks: list[int], sent: list[Any]
) -> None:
    """Guards against pages of tokens beyond the prompt, or that decode has; against state for a
    model without state; and against pages of an index that decode did not list, that differ from
    those of the KV, or that are empty, for which decode would wait."""
    prefill = Prefill(pool)
    prefill.send(prompt, *chunks, decode_prefix_len=prefix)
    assert prefill.sent == sent and prefill.stock_calls == []
    assert sum(prefill.copied) >= prompt - prefix


@pytest.mark.parametrize(
    ("pool", "sender", "sent"),
    [(HYBRID, {"decode_prefix_len": 0}, [([7], None)]), (PLAIN, {}, [])]
    + [(PLAIN, {"decode_prefix_len": None}, [])],
    ids=["state", "another backend", "a group that is not attached"],
)
def test_what_goes_sglangs_own_way(pool: Any, sender: dict[str, Any], sent: list[Any]) -> None:
    """Guards against a hybrid model whose state is never sent, because only SGLang's own method
    knows its kind (its other chunks are like those of any model); and against a change of a backend
    that moves no delta."""
    prefill = Prefill(pool)
    prefill.send(11, 6, 11, **sender)
    assert prefill.sent == sent
    assert [is_last for _, is_last, _ in prefill.stock_calls] == [False, True][len(sent) :]


@pytest.mark.parametrize(
    ("pool", "is_hybrid"),
    [
        ("MHATokenToKVPool", False),
        ("MLATokenToKVPool", False),
        ("HybridLinearKVPool", True),
        ("NSATokenToKVPool", True),
        ("swa_memory_pool.SWAKVPool", True),
    ],
)
def test_which_pools_have_state(pool: str, is_hybrid: bool) -> None:
    """Guards against a SGLang in which pools with state are marked differently."""
    from importlib import import_module

    module, _, name = f"memory_pool.{pool}".rpartition(".")
    module = module.removeprefix("memory_pool.") or "memory_pool"
    kind = getattr(import_module(f"sglang.srt.mem_cache.{module}"), name)
    assert hasattr(kind, "get_state_buf_infos") is is_hybrid
