"""EIC: several values a call, in registered memory where they lie in the pool."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sglang.srt.mem_cache.buffer_only import page_parts
from sglang.srt.mem_cache.buffer_only.storage_backends import PartStore, StoreError, is_stage

if TYPE_CHECKING:
    from sglang.srt.mem_cache.storage.eic.eic_storage import EICStorage

    class _Base(PartStore, EICStorage):
        pass

else:
    _Base = PartStore

#: Values a call, as many as SGLang asks for.
_BATCH = 1024


class EicParts(_Base):
    """All host tensors are registered; every value's own status counts."""

    @override
    def register_mem_pool_host(self, memory_pool_host: Any) -> None:
        super().register_mem_pool_host(memory_pool_host)  # registers the first tensor
        if not is_stage(memory_pool_host):
            return
        eic = _client_library()
        for tensor in page_parts.tensors(memory_pool_host)[1:]:
            info = eic.MemoryInfo()
            info.type = eic.MemoryType.MEMORY_CUDA  # as SGLang has it for host memory
            info.cuda_id = 0
            memory = eic.IOBuffers()
            memory.append(tensor.data_ptr(), tensor.numel() * tensor.element_size(), True)
            self.connection.register_memory(memory, info)
        described = page_parts.describe(memory_pool_host)
        split = self.use_zero_copy and not self.is_mla_model
        self.keep(memory_pool_host, (page_parts.apart if split else page_parts.together)(described))

    def value_key(self, page_hash: str, value: page_parts.Value) -> str:
        key = f"{page_hash}_{value.label}" if value.label else page_hash
        full: str = self._get_eic_key([key])[0]
        return full

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        eic = _client_library()
        option = eic.ExistOption()
        option.ns = self.eic_namespace
        found: list[bool] = []
        for at in range(0, len(keys), _BATCH):
            batch = keys[at : at + _BATCH]
            status, outcome = self.connection.mexist(_strings(batch), option)
            found.extend(_each(status, outcome, len(batch)))
        return found

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        eic = _client_library()
        option = eic.GetOption()
        option.ns = self.eic_namespace
        status, _, outcome = self.connection.mget(_strings(keys), option, self._buffers(memory))
        good = _each(status, outcome, len(keys))
        return [view.numel() if there else 0 for view, there in zip(memory, good, strict=True)]

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        eic = _client_library()
        option = eic.SetOption()
        option.ns = self.eic_namespace
        option.ttl_second = -1
        status, outcome = self.connection.mset(_strings(keys), self._buffers(memory), option)
        return _each(status, outcome, len(keys))

    def _buffers(self, memory: list[torch.Tensor]) -> Any:
        """Addresses, sizes, and whether the memory is registered: the pool's is, a copy's not."""
        pool = [
            range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
            for tensor in page_parts.tensors(self.part_pool)
        ]
        found = _client_library().IOBuffers()
        for view in memory:
            address = view.data_ptr()
            found.append(address, view.numel(), any(address in span for span in pool))
        return found


def _client_library() -> Any:
    return importlib.import_module("eic")  # loaded by SGLang's backend; has no types


def _strings(keys: list[str]) -> Any:
    found = _client_library().StringVector()
    for key in keys:
        found.append(key)
    return found


def _each(status: Any, outcome: Any, count: int) -> list[bool]:
    """Which of ``count`` values went well, by the status of the call and of each value."""
    codes = _client_library().StatusCode
    if status == codes.SUCCESS:
        return [True] * count
    each = list(outcome.status_codes)
    if status != codes.PARTIAL_FAILED or len(each) != count:
        raise StoreError(f"EIC status {status}")
    return [code == codes.SUCCESS for code in each]
