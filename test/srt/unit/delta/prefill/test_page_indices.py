"""Pages of a chunk, from the scheduler's table on the device to a list on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.prefill.scheduler import DeltaPrefill, page_indices
from sglang.srt.disaggregation.utils import kv_to_page_indices


class OnDevice:
    """A tensor that says how much of it is copied to the host. It has no arithmetic and no steps:
    either would be a kernel on the scheduler's stream."""

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
    """A request's row of token slots that lies in these pages; behind its end, another's."""
    slots = torch.tensor(pages)[:, None] * page + torch.arange(page)
    return slots.reshape(-1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page", [1, 16, 64])
@given(data=st.data())
def test_same_pages_as_stock(page: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """Guards against pages other than SGLang's, at any cut, a partly filled last page included;
    against copying more than once, or anything but one piece of memory; and against another type
    than the one that goes over the wire."""
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
    """Guards against pages for a chunk of which decode holds more than was computed."""
    assert page_indices(row_of([4, 5, 6], 16, torch.int32), 32, 16, 16).tolist() == []


class Stock:
    """SGLang's own method, which notes its calls."""

    def send_kv_chunk(self, *call: Any) -> None:
        self.stock_calls.append(call)


class Prefill(DeltaPrefill, Stock):
    """A scheduler with a pool of 4 tokens a page."""

    def __init__(self, pool: Any) -> None:
        self.stock_calls: list[Any] = []
        self.sent: list[Any] = []
        self.copied: list[int] = []
        self.token_to_kv_pool_allocator = SimpleNamespace(page_size=4, get_kvcache=lambda: pool)
        row = OnDevice(row_of([7, 3, 5], 4, torch.int64), self.copied)
        self.req_to_token_pool = SimpleNamespace(req_to_token=[row])
        self.disagg_metadata_buffers = SimpleNamespace(set_buf=lambda req: None)

    def request(self, computed: int) -> Any:
        """A request whose prompt of 11 tokens is computed so far."""
        sender = SimpleNamespace(
            decode_prefix_len=0, send=lambda pages, state: self.sent.append((pages.tolist(), state))
        )
        return SimpleNamespace(
            fill_ids=[0] * computed,
            origin_input_ids=[0] * 11,
            start_send_idx=0,
            req_pool_idx=0,
            disagg_kv_sender=sender,
        )


HYBRID = SimpleNamespace(get_state_buf_infos=lambda: None)


def test_state_goes_sglangs_own_way() -> None:
    """Guards against a hybrid model whose state never goes, because only SGLang's own method knows
    which it is; its other chunks are like those of any model."""
    prefill = Prefill(HYBRID)
    request = prefill.request(6)
    prefill.send_kv_chunk(request, last_chunk=False, end_idx=None)
    assert prefill.sent == [([7], None)] and prefill.stock_calls == []
    assert request.start_send_idx == 4
    prefill.send_kv_chunk(request, last_chunk=True, end_idx=9)
    assert prefill.stock_calls == [(request, True, 9)] and len(prefill.sent) == 1


@pytest.mark.parametrize(
    ("prefix", "state"), [(0, [7, 3, 5]), (4, [3, 5]), (8, [5])], ids=["miss", "4", "8"]
)
def test_an_index_goes_along_behind_the_prefix(prefix: int, state: list[int]) -> None:
    """Guards against pages of an index that decode did not list, or that are not those of the KV;
    they go with the last chunk, whatever went with the others."""
    prefill = Prefill(SimpleNamespace(index_k_with_scale_buffer=["layer"]))
    request = prefill.request(6)
    request.disagg_kv_sender.decode_prefix_len = prefix
    prefill.send_kv_chunk(request, last_chunk=False, end_idx=None)
    prefill.send_kv_chunk(request, last_chunk=True, end_idx=11)
    pages, found = prefill.sent[-1]
    assert found.tolist() == state and pages == state[-len(pages) :]
    assert [sent for _, sent in prefill.sent[:-1]] == [None] * (prefix == 0)
    assert prefill.stock_calls == []


def test_of_a_full_hit_no_index_goes() -> None:
    """Guards against a list of no pages, for which decode would wait."""
    prefill = Prefill(SimpleNamespace(index_k_with_scale_buffer=["layer"]))
    request = prefill.request(8)
    request.origin_input_ids = [0] * 8
    request.disagg_kv_sender.decode_prefix_len = 8
    prefill.send_kv_chunk(request, last_chunk=True)
    assert prefill.sent == [([], None)]


@pytest.mark.parametrize("sender", [SimpleNamespace(), SimpleNamespace(decode_prefix_len=None)])
def test_senders_of_other_backends_are_left_alone(sender: Any) -> None:
    """Guards against a change of a backend that moves no delta, or whose group is not attached."""
    prefill = Prefill(SimpleNamespace())
    request = prefill.request(12)
    request.disagg_kv_sender = sender
    prefill.send_kv_chunk(request, last_chunk=True)
    assert prefill.stock_calls == [(request, True, None)] and prefill.sent == []


def test_a_model_without_state() -> None:
    """Guards against state where there is none, and against pages of tokens that are no part of the
    prompt: eleven tokens in three pages."""
    prefill = Prefill(SimpleNamespace())
    request = prefill.request(12)
    prefill.send_kv_chunk(request, last_chunk=True)
    assert prefill.sent == [([7, 3, 5], None)] and prefill.stock_calls == []
    assert prefill.copied == [11]


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
    """Guards against a SGLang in which the sign that a pool has state is another one."""
    from importlib import import_module

    module, _, name = f"memory_pool.{pool}".rpartition(".")
    module = module.removeprefix("memory_pool.") or "memory_pool"
    kind = getattr(import_module(f"sglang.srt.mem_cache.{module}"), name)
    assert hasattr(kind, "get_state_buf_infos") is is_hybrid
