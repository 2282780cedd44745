"""Stock SGLang's scheduler module, and its paged allocator over a real pool, on a CPU."""

import os

import torch

import sglang.srt.managers.scheduler  # noqa: F401  the import itself is part of the check
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

LAYERS = 2


def check(page_size: int, need_sort: bool) -> None:
    """Extend, decode, run out, free: every slot stays with one request, pages are filled up."""
    pool = MHATokenToKVPool(
        64 * page_size, page_size, torch.float32, 2, 8, LAYERS, "cpu", enable_memory_saver=False
    )
    allocator = PagedTokenToKVPoolAllocator(
        64 * page_size, page_size, torch.float32, "cpu", pool, need_sort
    )
    total = allocator.available_size()
    rows: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64) for _ in range(3)]

    def extend(lengths: list[int]) -> bool:
        """Let each row grow to its new length, as one batch."""
        prefix = torch.tensor([len(r) for r in rows])
        seq = torch.tensor(lengths)
        last = torch.tensor([int(r[-1]) if len(r) else -1 for r in rows])
        need = int((seq - prefix).sum())
        slots = allocator.alloc_extend(prefix, prefix, seq, seq, last, need)
        if slots is None:
            return False
        pieces = torch.split(slots, (seq - prefix).tolist())
        rows[:] = [torch.cat(pair) for pair in zip(rows, pieces, strict=True)]
        return True

    def decode() -> None:
        seq = torch.tensor([len(r) + 1 for r in rows])
        slots = allocator.alloc_decode(seq, seq, torch.tensor([int(r[-1]) for r in rows]))
        rows[:] = [torch.cat((r, s.view(1))) for r, s in zip(rows, slots, strict=True)]

    assert extend([5, 2 * page_size, 1])
    for _ in range(page_size + 2):
        decode()
    assert extend([len(r) + extra for r, extra in zip(rows, (0, 7, 3 * page_size), strict=True)])

    held = torch.cat(rows)
    assert len(held.unique()) == len(held) and int(held.min()) >= page_size
    for row in rows:
        assert torch.equal(row % page_size, torch.arange(len(row)) % page_size)
        assert len((row // page_size).unique()) == -(-len(row) // page_size)
    used = sum(-(-len(r) // page_size) for r in rows) * page_size
    assert allocator.available_size() == total - used

    before = allocator.available_size()
    assert not extend([len(r) + total for r in rows])
    assert allocator.available_size() == before

    # A retracted request's KV goes to the CPU and back, which synchronizes with the device.
    for layer in range(LAYERS):
        pool.k_buffer[layer].normal_()
        pool.v_buffer[layer].normal_()
    expected = [b[rows[1]].clone() for b in pool.k_buffer + pool.v_buffer]
    copy = allocator.get_cpu_copy(rows[1])
    for buffer in pool.k_buffer + pool.v_buffer:
        buffer[rows[1]] = 0
    allocator.load_cpu_copy(copy, rows[1])
    restored = [b[rows[1]] for b in pool.k_buffer + pool.v_buffer]
    assert all(map(torch.equal, restored, expected))

    for row in rows:
        allocator.free(row)
    assert allocator.available_size() == total


for size in (2, 16, 64):  # SGLang has another allocator for page size 1
    for sort in (False, True):
        check(size, sort)
print("CHECKED", flush=True)
os._exit(0)
