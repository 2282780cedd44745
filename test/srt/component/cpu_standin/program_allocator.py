"""Stock SGLang's scheduler module, and its paged allocator over a real pool, on a CPU."""

import os

import torch

import sglang.srt.managers.scheduler  # noqa: F401  the import itself is part of the check
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

PAGE_SIZE, PAGES, LAYERS = 16, 8, 2
pool = MHATokenToKVPool(
    PAGES * PAGE_SIZE, PAGE_SIZE, torch.float32, 2, 8, LAYERS, "cpu", enable_memory_saver=False
)
allocator = PagedTokenToKVPoolAllocator(
    PAGES * PAGE_SIZE, PAGE_SIZE, torch.float32, "cpu", pool, need_sort=False
)
total = allocator.available_size()
before = torch.zeros(2, dtype=torch.int64)
lengths = torch.tensor([5, 2 * PAGE_SIZE])


def extend(seq: torch.Tensor) -> torch.Tensor | None:
    """Return the slots of two new requests of these lengths."""
    found = allocator.alloc_extend(before, before, seq, seq, before - 1, int(seq.sum()))
    assert found is None or isinstance(found, torch.Tensor)
    return found


# Every slot belongs to one request, and pages are filled; ``unit/cpu_standin`` has all cases.
slots = extend(lengths)
assert slots is not None
rows = list(torch.split(slots, lengths.tolist()))
added = allocator.alloc_decode(lengths + 1, lengths + 1, torch.stack([row[-1] for row in rows]))
rows = [torch.cat((row, slot.view(1))) for row, slot in zip(rows, added, strict=True)]
for row in rows:
    assert torch.equal(row % PAGE_SIZE, torch.arange(len(row)) % PAGE_SIZE)
assert len(torch.cat(rows).unique()) == sum(map(len, rows))
assert allocator.available_size() == total - 4 * PAGE_SIZE
assert extend(lengths + total) is None and allocator.available_size() == total - 4 * PAGE_SIZE

# A retracted request's KV goes to the CPU and back, which synchronizes with the device.
buffers = pool.k_buffer + pool.v_buffer
for buffer in buffers:
    buffer.normal_()
expected = [buffer[rows[1]].clone() for buffer in buffers]
copy = allocator.get_cpu_copy(rows[1])
for buffer in buffers:
    buffer[rows[1]] = 0
allocator.load_cpu_copy(copy, rows[1])
assert all(map(torch.equal, [buffer[rows[1]] for buffer in buffers], expected))
for row in rows:
    allocator.free(row)
assert allocator.available_size() == total
print("CHECKED", flush=True)
os._exit(0)
