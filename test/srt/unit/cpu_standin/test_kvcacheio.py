"""The HiCache copies of the CPU stand-in, against a copy by slots."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpu_standin import kvcacheio

LAYERS, PAGES, ITEM = 3, 8, (2, 4)


def layer_first(page_size: int) -> list[torch.Tensor]:
    """Return one buffer per layer."""
    return list(torch.rand(LAYERS, PAGES * page_size, *ITEM))


def page_first(page_size: int) -> torch.Tensor:
    """Return one buffer for all layers."""
    return torch.rand(PAGES, LAYERS, page_size, *ITEM)


def slots_of(pages: list[int], page_size: int) -> torch.Tensor:
    """Return the slots of whole pages, in the order of the pages."""
    return torch.tensor([p * page_size + i for p in pages for i in range(page_size)])


@st.composite
def transfers(draw):
    """Draw a page size, and source and destination page lists of one length."""
    page_size = draw(st.sampled_from([1, 3, 16]))
    count = draw(st.integers(0, PAGES))
    shuffled = random.Random(draw(st.integers(0, 2**16)))
    src, dst = (shuffled.sample(range(PAGES), count) for _ in range(2))
    return page_size, slots_of(src, page_size).long(), slots_of(dst, page_size).long()


def by_slot(buffers: list[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Return a copy of either layout as [slots, layers, ...]."""
    if isinstance(buffers, list):
        return torch.stack(buffers, 1)
    return buffers.transpose(1, 2).flatten(0, 1)


@given(transfers(), st.integers(0, LAYERS - 1))
def test_kv_comes_to_its_slots(transfer, layer) -> None:
    """Guards against K and V, layers or pages mixed up on the way to the host and back, and against
    writes to slots that were not named, or to layers before their turn."""
    page_size, src, dst = transfer
    devices, others = ([layer_first(page_size) for _ in "kv"] for _ in range(2))
    all_devices, all_others = ([*keys, *values] for keys, values in (devices, others))
    hosts = [page_first(page_size) for _ in "kv"]

    backed_up = [by_slot(host) for host in hosts]
    for host, device in zip(backed_up, devices, strict=True):
        host[dst] = by_slot(device)[src]
    kvcacheio.transfer_kv_all_layer_direct_lf_pf(all_devices, hosts, src, dst, page_size)
    assert all(map(torch.equal, map(by_slot, hosts), backed_up))

    loaded = [by_slot(other) for other in others]
    for other, host in zip(loaded, hosts, strict=True):
        other[src, layer] = by_slot(host)[dst, layer]
    here = [other[layer] for other in others]
    kvcacheio.transfer_kv_per_layer_direct_pf_lf(hosts, here, dst, src, layer, page_size)
    assert all(map(torch.equal, map(by_slot, others), loaded))

    copied = [by_slot(other) for other in others]
    for other, device in zip(copied, devices, strict=True):
        other[dst] = by_slot(device)[src]
    kvcacheio.transfer_kv_direct(all_devices, all_others, src, dst, page_size)
    assert all(map(torch.equal, map(by_slot, others), copied))


def test_what_cannot_be_copied_is_refused() -> None:
    """Guards against a silently shifted layer if a buffer is missing, and against a puzzling
    failure with HiCache's default I/O backend."""
    none = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 layers"):
        kvcacheio.transfer_kv_all_layer_direct_lf_pf(
            layer_first(1), [page_first(1), page_first(1)], none, none, 1
        )
    with pytest.raises(NotImplementedError, match="--hicache-io-backend direct"):
        kvcacheio.transfer_kv_all_layer()
