"""KV memory of one process: torch tensors, one buffer of keys and one of values a layer."""

from __future__ import annotations

from typing import Any

import torch

from benchmark.kv_transfer.records import RoomPlan
from benchmark.kv_transfer.shapes import Shape

#: Contents are below it; decode's memory is filled with it first.
_NOTHING = 251


class Pool:
    """Pages of ``page_size`` tokens, allocated and touched."""

    def __init__(self, shape: Shape, page_size: int, pages: int, device: str) -> None:
        self.shape, self.page_size, self.pages = shape, page_size, pages
        self.item_len = page_size * shape.row_bytes
        """Bytes of a page in one buffer."""
        self.device = device
        self.buffers = [
            torch.empty((pages, self.item_len), dtype=torch.uint8, device=device)
            for _ in range(shape.buffers)
        ]

    def fill(self) -> None:
        """Give each page of each buffer content of its own (prefill)."""
        for index in range(len(self.buffers)):
            self.buffers[index].copy_(self._content(index)[:, None].expand(-1, self.item_len))

    def blank(self) -> None:
        """Content that prefill never has (decode)."""
        for buffer in self.buffers:
            buffer.fill_(_NOTHING)

    def _content(self, index: int) -> torch.Tensor:
        """The byte of each page of buffer ``index`` on the prefill side."""
        pages = torch.arange(self.pages, device=self.device)
        return ((pages * 31 + index * 7) % _NOTHING).to(torch.uint8)

    def wrong_pages(self, plan: RoomPlan) -> int:
        """How many destination pages of the room differ from their source, over all buffers.
        First, middle and last byte of a page are looked at."""
        source, destination = (
            torch.from_numpy(side.astype("int64")).to(self.device)
            for side in (plan.source, plan.destination)
        )
        places = torch.tensor([0, self.item_len // 2, self.item_len - 1], device=self.device)
        wrong = 0
        for index, buffer in enumerate(self.buffers):
            expected = self._content(index)[source][:, None]
            wrong += int((buffer[destination][:, places] != expected).any(dim=1).sum())
        return wrong

    @property
    def bases(self) -> list[int]:
        """Address of page 0, by buffer."""
        return [buffer.data_ptr() for buffer in self.buffers]

    def describe(self, args: Any) -> None:
        """Write the pool into SGLang's ``KVArgs``."""
        args.kv_data_ptrs = self.bases
        args.kv_data_lens = [buffer.nbytes for buffer in self.buffers]
        args.kv_item_lens = [self.item_len] * len(self.buffers)
        args.page_size = self.page_size
        args.kv_head_num = args.total_kv_head_num = self.shape.kv_heads
