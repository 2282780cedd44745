"""The HiCache copies of the CPU stand-in, against a reference that goes slot by slot."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.hardware_backend.cpu_standin import kvcacheio

LAYERS, PAGES, ITEM = 3, 8, (2, 4)


def layer_first(page_size: int) -> list[torch.Tensor]:
    """One buffer a layer."""
    return list(torch.rand(LAYERS, PAGES * page_size, *ITEM))


def page_first(page_size: int) -> torch.Tensor:
    """One buffer for all layers."""
    return torch.rand(PAGES, LAYERS, page_size, *ITEM)


def slots_of(pages: list[int], page_size: int) -> torch.Tensor:
    """Slots of whole pages, in the order of the pages."""
    return torch.tensor([p * page_size + i for p in pages for i in range(page_size)])


@st.composite
def transfers(draw):
    """Page size, and two page lists of one length: where from, where to."""
    page_size = draw(st.sampled_from([1, 3, 16]))
    count = draw(st.integers(0, PAGES))
    shuffled = random.Random(draw(st.integers(0, 2**16)))
    src, dst = (shuffled.sample(range(PAGES), count) for _ in range(2))
    return page_size, slots_of(src, page_size).long(), slots_of(dst, page_size).long()


@given(transfers())
def test_direct(transfer) -> None:
    """Guards against slots mixed up, or slots changed that were not named."""
    page_size, src, dst = transfer
    k, v, host_k, host_v = (layer_first(page_size) for _ in range(4))
    expected = [h.clone() for h in host_k + host_v]
    for device, host in zip(k + v, expected, strict=True):
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            host[b] = device[a]
    kvcacheio.transfer_kv_direct(k + v, host_k + host_v, src, dst, page_size)
    assert all(map(torch.equal, host_k + host_v, expected))


@given(transfers())
def test_back_up_all_layers(transfer) -> None:
    """Guards against K and V, layers, or pages mixed up on the way to the host."""
    page_size, src, dst = transfer
    k, v = layer_first(page_size), layer_first(page_size)
    hosts = [page_first(page_size), page_first(page_size)]
    expected = [h.clone() for h in hosts]
    for device, host in zip((k, v), expected, strict=True):
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            for layer in range(LAYERS):
                host[b // page_size, layer, b % page_size] = device[layer][a]
    kvcacheio.transfer_kv_all_layer_direct_lf_pf(k + v, hosts, src, dst, page_size)
    assert all(map(torch.equal, hosts, expected))


@given(transfers(), st.integers(0, LAYERS - 1))
def test_load_one_layer(transfer, layer) -> None:
    """Guards against another layer's or page's content on the way back, and against writes to
    layers whose turn has not come."""
    page_size, src, dst = transfer
    hosts = [page_first(page_size), page_first(page_size)]
    devices = [layer_first(page_size)[layer] for _ in hosts]
    expected = [d.clone() for d in devices]
    for device, host in zip(expected, hosts, strict=True):
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            device[b] = host[a // page_size, layer, a % page_size]
    kvcacheio.transfer_kv_per_layer_direct_pf_lf(hosts, devices, src, dst, layer, page_size)
    assert all(map(torch.equal, devices, expected))


def test_what_cannot_be_copied_is_refused() -> None:
    """Guards against a silently shifted layer where a buffer is forgotten, and against a puzzling
    failure with HiCache's default I/O backend."""
    none = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 layers"):
        kvcacheio.transfer_kv_all_layer_direct_lf_pf(
            layer_first(1), [page_first(1), page_first(1)], none, none, 1
        )
    with pytest.raises(NotImplementedError, match="--hicache-io-backend direct"):
        kvcacheio.transfer_kv_all_layer()
