"""Mooncake's store, which reads and writes the pool's own memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from sglang.srt.mem_cache.buffer_only import page_parts
from sglang.srt.mem_cache.buffer_only.storage_backends import PartStore, StoreError, is_stage

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

    class _Mooncake(PartStore, MooncakeStore):
        pass

else:
    _Mooncake = PartStore

logger = logging.getLogger(__name__)

WARMUP_S = 20.0
"""The master gives out the memory of a server that was killed until its ``--client_ttl``, 10 s by
default, has passed."""

LOG_EVERY_S = 30.0
"""Between two lines about writes that were refused."""


class MooncakeParts(_Mooncake):
    """All host tensors are registered, and a value of another length than asked is a miss."""

    _next_log = 0.0

    @override
    def warmup(self) -> None:
        # SGLang's first write fails if the master puts it where a killed server was; this one may
        # be just that server, started again.
        deadline = time.monotonic() + WARMUP_S
        while True:
            try:
                super().warmup()
                return
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
            logger.warning(
                "Mooncake does not store what this server writes; the server retries in 1 s"
            )
            time.sleep(1.0)

    @override
    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)  # registers the first tensor
        if not is_stage(mem_pool_host):
            return
        for tensor in page_parts.tensors(mem_pool_host)[1:]:
            self.register_buffer(tensor)
        described = page_parts.describe(mem_pool_host, self.split_factor or 1)
        self.keep(mem_pool_host, page_parts.apart(described))

    def value_key(self, page_hash: str, value: page_parts.Value) -> str:
        (part,) = value.parts
        if part.shared:
            suffix = self.mla_suffix
        else:
            suffix = self.mha_suffix[part.group] if self.split_factor else self.mha_suffix
        tag = "" if self.extra_backend_tag is None else f"{self.extra_backend_tag}_"
        return f"{tag}{page_hash}_{suffix}_{value.label}"

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        codes = self._batch_exist(keys)
        failed = next((code for code in codes if code < 0), None)
        if failed is not None:  # no answer, for instance without its master
            raise StoreError(f"Mooncake error {failed}")
        return [code == 1 for code in codes]

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        start = time.perf_counter()
        counts = self._get_batch_zero_copy_impl(keys, *_addresses(memory))
        if self.enable_storage_metrics:
            self._measured(self.prefetch_pgs, self.prefetch_bandwidth, memory, start)
        return list(counts)

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        start = time.perf_counter()
        codes = self._put_batch_zero_copy_impl(keys, *_addresses(memory))
        if self.enable_storage_metrics:
            self._measured(self.backup_pgs, self.backup_bandwidth, memory, start)
        self._log_refused([code for code in codes if code], len(codes))
        return [code == 0 for code in codes]

    def _log_refused(self, codes: Sequence[int], of: int) -> None:
        """Failed writes cost hits, whatever the reason; the codes are what tells full from gone."""
        now = time.monotonic()
        if not codes or now < self._next_log:
            return
        self._next_log = now + LOG_EVERY_S
        logger.warning(
            "Mooncake refused %d of %d values, error codes %s: their pages are not stored, and "
            "are computed again once they leave the device (logged at most every %.0f s)",
            *(len(codes), of, sorted(set(codes)), LOG_EVERY_S),
        )

    def _measured(
        self, pages: list[float], bandwidth: list[float], memory: Sequence[torch.Tensor], at: float
    ) -> None:
        size = sum(view.numel() for view in memory)
        pages.append(len(memory) / len(self.page_values))
        bandwidth.append(size / (1 << 30) / max(time.perf_counter() - at, 1e-9))


def _addresses(memory: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    return [view.data_ptr() for view in memory], [view.numel() for view in memory]
