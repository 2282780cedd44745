"""Several ranks without a GPU: replicated KV heads, and ``--enable-dp-attention``, whose batches
are padded and whose rows are exchanged between ranks.

SGLang registers the exchange for GPUs only, and copies rows with a Triton kernel. gloo and torch do
the same.
"""

from __future__ import annotations

from typing import Any  # Any: modules that are edited, and their objects


def replicate_heads(model_runner: Any) -> None:
    """More ranks than KV heads: replicas of a head, as on GPUs. For a CPU, SGLang pads the heads
    instead, and only its AMX weight loader can fill the padding: pad only where GPUs could not lay
    out the heads either."""
    pad = model_runner.adjust_config_with_unaligned_cpu_tp

    def adjust(model_config: Any, load_config: Any, tp_size: int) -> Any:
        heads, kv_heads = model_config.num_attention_heads, model_config.get_total_num_kv_heads()
        if heads % tp_size == 0 and tp_size % kv_heads == 0:
            return model_config
        return pad(model_config, load_config, tp_size)

    model_runner.adjust_config_with_unaligned_cpu_tp = adjust


def pad_batches(module: Any) -> None:
    """A sequence of one token is the shortest that attention can be computed for."""
    module.TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda backend: 1


def copy_rows_in_torch(module: Any) -> None:
    module.memcpy_triton = copy_rows


def exchange_by_gloo(module: Any) -> None:
    groups = module._groups

    def gather(output: Any, input: Any, group_name: str) -> None:
        groups[group_name]()._all_gather_into_tensor(output, input)

    def reduce_scatter(output: Any, input: Any, group_name: str) -> None:
        group = groups[group_name]()  # gloo has no reduce_scatter
        whole = group.all_reduce(input.clone())
        output.copy_(whole.tensor_split(group.world_size)[group.rank_in_group])

    module.reg_all_gather_into_tensor = gather
    module.reg_reduce_scatter_tensor = reduce_scatter


def copy_rows(dst: Any, src: Any, dim: int, offset: Any, sz: Any, offset_src: bool) -> None:
    """Copy ``sz`` rows from (``offset_src``) or to row ``offset``; the first ones of the other."""
    start, end = int(offset), int(offset) + int(sz)
    if offset_src:
        dst[: end - start].copy_(src[start:end])
    else:
        dst[start:end].copy_(src[: end - start])
