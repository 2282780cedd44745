"""HF3FS: values in the equal slots of one file, found by way of a metadata service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from sglang.srt.mem_cache.buffer_only import page_parts
from sglang.srt.mem_cache.buffer_only.storage_backends import PartStore, StoreError, is_stage

if TYPE_CHECKING:
    from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS

    class _Base(PartStore, HiCacheHF3FS):
        pass

else:
    _Base = PartStore


class Hf3fsParts(_Base):
    """K and V have a slot each, as with SGLang; all else of a page shares one slot, since SGLang
    makes slots as large as that."""

    @override
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)  # sets is_zero_copy from the layout
        if not is_stage(mem_pool_host):
            return
        described = page_parts.describe(mem_pool_host)
        split = self.is_zero_copy and not self.is_mla_model
        values = page_parts.apart(described) if split else page_parts.packed(described)
        largest = max(value.size for value in values)
        if largest > self.bytes_per_page:
            raise ValueError(
                f"HF3FS slots of {self.bytes_per_page} bytes do not hold the {largest} bytes of a "
                f"value of layout {mem_pool_host.layout} (--hicache-mem-layout)"
            )
        self.keep(mem_pool_host, values)

    def value_key(self, page_hash: str, value: page_parts.Value) -> str:
        return f"{page_hash}-{value.label}" if value.label else page_hash

    def has_values(self, keys: list[str], sizes: list[int]) -> list[bool]:
        found: list[bool] = self.metadata_client.exists(self.rank, keys)
        return found

    def get_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[int]:
        slots = self._slots(keys)
        found = [at for at, slot in enumerate(slots) if slot is not None]
        counts = [0] * len(keys)
        read = self._transfer(
            "batch_read", [slots[at] for at in found], [memory[at] for at in found]
        )
        for at, count in zip(found, read, strict=True):
            counts[at] = count
        # Slots are given to other keys when the file is full: what moved meanwhile is not ours.
        return [
            count if count and now == slot else 0
            for count, now, slot in zip(counts, self._slots(keys), slots, strict=True)
        ]

    def put_values(self, keys: list[str], memory: list[torch.Tensor]) -> list[bool]:
        if self.skip_backup:  # the first rank writes for all
            return [True] * len(keys)
        reserved = self.metadata_client.reserve_and_allocate_page_indices(
            self.rank, [(key, "") for key in keys]
        )
        if len(reserved) != len(keys):
            raise StoreError(f"{len(reserved)} slots reserved for {len(keys)} values")
        done = [written for written, _ in reserved]
        wanted = [at for at, (written, slot) in enumerate(reserved) if not written and slot != -1]
        slots = {at: reserved[at][1] for at in wanted}
        try:
            counts = self._transfer(
                "batch_write", list(slots.values()), [memory[at] for at in wanted]
            )
            for at, count in zip(wanted, counts, strict=True):
                done[at] = count == memory[at].numel()
        finally:
            self.metadata_client.confirm_write(
                self.rank,
                [(keys[at], slot) for at, slot in slots.items() if done[at]],
                [slot for at, slot in slots.items() if not done[at]],
            )
        return done

    def _slots(self, keys: list[str]) -> list[Any]:
        slots: list[Any] = self.metadata_client.get_page_indices(self.rank, keys)
        if len(slots) != len(keys):
            raise StoreError(f"{len(slots)} slots for {len(keys)} values")
        return slots

    def _transfer(
        self, method: str, slots: Sequence[Any], memory: Sequence[torch.Tensor]
    ) -> list[int]:
        """Bytes moved between each slot and its memory; ``entries`` of them a request."""
        offsets = [slot * self.bytes_per_page for slot in slots]
        batches = [
            self.executor.submit(
                getattr(self.clients[self.ac.next()], method),
                offsets[at : at + self.entries],
                list(memory[at : at + self.entries]),
            )
            for at in range(0, len(offsets), self.entries)
        ]
        # All have to end before this does: until then they use the memory.
        moved: list[int] = []
        errors = [error for batch in batches if (error := batch.exception()) is not None]
        if errors:
            raise errors[0]
        for batch in batches:
            moved.extend(batch.result())
        return moved
