"""LoRA by SGLang's torch backend (``--lora-backend torch_native``), without pinned memory."""

from __future__ import annotations

from typing import Any  # Any: modules that are edited, and their objects

from .dp_attention import UnpinningTorch


def edit(module: Any) -> None:
    """Have the lengths and ranks of a batch's segments made in ordinary memory."""
    module.torch.Tensor.pin_memory = _stay
    module.torch = UnpinningTorch(module.torch)


def _stay(tensor: Any, device: object = None) -> Any:
    """The tensor itself: no device would copy it."""
    return tensor
