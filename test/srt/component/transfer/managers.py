"""A rank's transfer manager as SGLang's own ``__init__`` leaves it, without an engine behind it.

Nothing of ours is imported: ``component.interop`` uses it under a later release too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

#: What a manager keeps of its rooms and peers.
TABLES = (
    "request_status",
    "failure_records",
    "transfer_infos",
    "decode_kv_args_table",
    "required_prefill_response_num_table",
    "prefill_info_table",
    "connection_pool",
)


def without_engine(kind: Any, **own: Any) -> Any:
    """A manager of the class ``kind``, the only rank of its server; ``own`` is what its backend,
    its release or a test adds."""
    manager = kind.__new__(kind)
    manager.__dict__.update({table: {} for table in TABLES})
    manager.__dict__.update(
        server_args=SimpleNamespace(
            dp_size=1, disaggregation_decode_enable_radix_cache=True, enable_hisparse=False
        ),
        is_mla_backend=False,
        attn_tp_size=1,
        attn_tp_rank=0,
        attn_cp_size=1,
        attn_cp_rank=0,
        pp_size=1,
        pp_rank=0,
        bootstrap_timeout=300,
        enable_staging=False,
        is_dummy_cp_rank=False,
        enable_all_cp_ranks_for_transfer=False,
        failure_lock=threading.Lock(),
        connection_lock=threading.Lock(),
        addr_to_rooms_tracker=defaultdict(set),
    )
    manager.__dict__.update(own)
    return manager


def buffers(kv: list[torch.Tensor], aux: torch.Tensor, page: int) -> Any:
    """What a scheduler tells its manager of KV and metadata: ``kv`` has (pages, elements of one)
    for each layer, first keys, then values; ``aux`` has (slots, elements of one)."""
    return SimpleNamespace(
        kv_data_ptrs=[layer.data_ptr() for layer in kv],
        kv_data_lens=[layer.nbytes for layer in kv],
        kv_item_lens=[layer[0].nbytes for layer in kv],
        aux_data_ptrs=[aux.data_ptr()],
        aux_data_lens=[aux.nbytes],
        aux_item_lens=[aux[0].nbytes],
        state_data_ptrs=[],
        state_data_lens=[],
        state_item_lens=[],
        state_type="none",
        gpu_id=0,
        pp_rank=0,
        prefill_start_layer=0,
        engine_rank=0,
        page_size=page,
        kv_head_num=2,
    )
