"""Several ranks on a CPU: replicated KV heads, and the exchange of attention data parallel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cpu_standin import edits


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_size", "padded"),
    [
        (4, 1, 2, False),  # a replica on each rank
        (8, 2, 4, False),
        (4, 2, 2, False),  # a head on each rank
        (6, 3, 2, True),  # no GPU could lay it out
        (3, 1, 2, True),
    ],
)
def test_heads_are_padded_only_where_replicas_do_not_do(
    heads: int, kv_heads: int, tp_size: int, padded: bool
) -> None:
    """Guards against a model with few KV heads that two ranks cannot load, and against one that
    needs the padding and does not get it."""
    calls: list[int] = []

    def pad(config: object, load_config: object, tp_size: int) -> object:
        calls.append(tp_size)
        return config

    module = SimpleNamespace(adjust_config_with_unaligned_cpu_tp=pad)
    edits.replicate_heads(module)
    config = SimpleNamespace(num_attention_heads=heads, get_total_num_kv_heads=lambda: kv_heads)
    assert module.adjust_config_with_unaligned_cpu_tp(config, None, tp_size) is config
    assert bool(calls) == padded


def test_rows_are_copied_from_and_to_an_offset() -> None:
    """Guards against another rank's rows overwritten, or used as this rank's own."""
    whole, part = torch.arange(12.0).reshape(6, 2), torch.zeros(3, 2)
    edits.copy_rows(part, whole, 0, torch.tensor(2), torch.tensor(2), True)
    assert part.tolist() == [[4, 5], [6, 7], [0, 0]]
    edits.copy_rows(whole, part, 0, torch.tensor(4), torch.tensor(1), False)
    assert whole.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [4, 5], [10, 11]]


def test_no_memory_is_pinned() -> None:
    """Guards against a batch that needs a driver; the rest of torch is unchanged."""
    module = SimpleNamespace(torch=torch)
    edits.without_pinning(module)
    assert module.torch.tensor([1, 2], pin_memory=True).tolist() == [1, 2]
    assert module.torch.int64 is torch.int64


def test_no_memory_is_pinned_for_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server with LoRA adapters whose first batch needs a driver."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)  # restored afterwards
    module = SimpleNamespace(torch=torch)
    edits.without_pinning_of_adapters(module)
    assert module.torch.zeros((2,), dtype=torch.int32, pin_memory=True).tolist() == [0, 0]
    assert module.torch.tensor([1], pin_memory=True).pin_memory().tolist() == [1]
