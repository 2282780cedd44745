"""``--enable-dp-attention``: batches padded and rows exchanged between ranks without a GPU.

SGLang registers the exchange for GPUs only, copies rows with a Triton kernel, and makes the counts
of tokens in pinned memory. gloo, torch and ordinary memory do the same.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any  # Any: modules that are edited, and their objects


def edit(module: Any) -> None:
    """After any of the modules of ``_EDITS``."""
    _EDITS[module.__name__](module)


def _attention_backend(module: Any) -> None:
    # A sequence of one token is the shortest that attention can be computed for.
    module.TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda backend: 1


def _pinned_memory(module: Any) -> None:
    module.torch = UnpinningTorch(module.torch)


def _row_copies(module: Any) -> None:
    module.memcpy_triton = copy_rows


def _collectives(module: Any) -> None:
    groups = module._groups

    def gather(output: Any, input: Any, group_name: str) -> None:
        groups[group_name]()._all_gather_into_tensor(output, input)

    def reduce_scatter(output: Any, input: Any, group_name: str) -> None:
        group = groups[group_name]()  # gloo has no reduce_scatter
        whole = group.all_reduce(input.clone())
        output.copy_(whole.tensor_split(group.world_size)[group.rank_in_group])

    module.reg_all_gather_into_tensor = gather
    module.reg_reduce_scatter_tensor = reduce_scatter


_EDITS = {
    "sglang.srt.layers.attention.torch_native_backend": _attention_backend,
    "sglang.srt.model_executor.forward_batch_info": _pinned_memory,
    "sglang.srt.layers.dp_attention": _row_copies,
    "sglang.srt.distributed.parallel_state": _collectives,
}


class UnpinningTorch:
    """``torch``, except that ``tensor`` and ``zeros`` pin nothing."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def tensor(self, data: Any, *, pin_memory: bool = False, **options: Any) -> Any:
        """As ``torch.tensor``; ``pin_memory`` is ignored."""
        return self._torch.tensor(data, **options)

    def zeros(self, *size: Any, pin_memory: bool = False, **options: Any) -> Any:
        """As ``torch.zeros``; ``pin_memory`` is ignored."""
        return self._torch.zeros(*size, **options)


def copy_rows(dst: Any, src: Any, dim: int, offset: Any, sz: Any, offset_src: bool) -> None:
    """Copy ``sz`` rows from (``offset_src``) or to row ``offset``; the first ones of the other."""
    start, end = int(offset), int(offset) + int(sz)
    if offset_src:
        dst[: end - start].copy_(src[start:end])
    else:
        dst[start:end].copy_(src[: end - start])
