"""A rank of prefill or decode with memory of numpy."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang.srt.disaggregation.delta.pages import heads_of
from sglang.srt.disaggregation.nixl import conn
from unit.delta.nixl.fakes import Memory

PAGE, LAYERS = 4, 2
KEY_BYTES, VALUE_BYTES = 3, 2
METADATA, STATE = (8, 24, 3), (16, 40)
#: Address of a decode rank's listener.
FROM = (b"10.0.0.2", b"4000")


class Side:
    """One rank: rank ``rank`` of ``size`` of a model with ``total`` KV heads."""

    def __init__(
        self,
        base: int,
        slots: int,
        rank: int = 0,
        size: int = 1,
        total: int = 2,
        is_mla: bool = False,
        state_type: str = "mamba",
    ) -> None:
        self.memory = Memory(base, seed=base % 1009)
        self.heads = range(1) if is_mla else heads_of(rank, size, total)
        self.rank, self.size, self.total, self.is_mla = rank, size, total, is_mla
        lens = [PAGE * len(self.heads) * KEY_BYTES] * LAYERS
        if not is_mla:
            lens += [PAGE * len(self.heads) * VALUE_BYTES] * LAYERS
        self.kv = [self.memory.allocate(slots, length) for length in lens]
        self.metadata = [self.memory.allocate(5, length) for length in METADATA]
        self.state = [self.memory.allocate(6, length) for length in STATE]
        self.slots = slots
        self.args = SimpleNamespace(
            kv_data_ptrs=[address for address, _ in self.kv],
            kv_data_lens=[view.nbytes for _, view in self.kv],
            kv_item_lens=lens,
            aux_data_ptrs=[address for address, _ in self.metadata],
            aux_data_lens=[view.nbytes for _, view in self.metadata],
            aux_item_lens=list(METADATA),
            state_data_ptrs=[address for address, _ in self.state],
            state_data_lens=[view.nbytes for _, view in self.state],
            state_item_lens=list(STATE),
            state_type=state_type,
            gpu_id=rank + 1,
            page_size=PAGE,
            kv_head_num=len(self.heads),
            total_kv_head_num=total,
            engine_rank=rank,
            prefill_start_layer=0,
        )

    def registration(self, name: str, **own: Any) -> list[bytes]:
        """Return the registration as stock SGLang sends it to prefill; ``own``: fields that differ:
        the addresses of ``kv`` and the bytes of a page (``item``)."""
        args = self.args
        addresses = [own.get("kv", args.kv_data_ptrs), args.aux_data_ptrs, args.state_data_ptrs]
        numbers = args.gpu_id, self.size, self.rank, own.get("item", args.kv_item_lens[0])
        return [
            *(conn.GUARD, b"None", *FROM, name.encode(), name.encode()),
            *(struct.pack(f"{len(each)}Q", *each) for each in addresses),
            *(str(number).encode() for number in numbers),
        ]

    def snapshot(self) -> list[npt.NDArray[np.uint8]]:
        """Return a copy of all buffers."""
        return [view.copy() for _, view in (*self.kv, *self.metadata, *self.state)]
