"""Mixin for ``NSATokenToKVPool``: the index of sparse attention is loaded before it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.memory_pool import NSATokenToKVPool
else:
    NSATokenToKVPool = object


class LoadedIndexPool(NSATokenToKVPool):
    """SGLang's own, where nothing is loaded from host memory."""

    @override
    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        # A layer stores its new tokens, and then selects among all. SGLang waits for what is loaded
        # of the layer where a fused kernel stores them, and nowhere where that cannot be built.
        self.get_index_k_with_scale_buffer(layer_id)
        super().set_index_k_scale_buffer(layer_id, loc, index_k, index_k_scale)
