"""Compares each speculative form of the stand-in with SGLang's Triton kernel, interpreted."""

import importlib.util
import os
import random
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

import torch
import triton.runtime.interpreter as interpreter

from cpu_standin import speculative
from sglang.srt.speculative import eagle_info_v2, spec_utils


def once_more(module: ModuleType) -> ModuleType:
    """Load the module again without the stand-in's edit. TRITON_INTERPRET=1 is set."""
    name = f"kernels_of_{module.__name__.rpartition('.')[2]}"
    loader = SourceFileLoader(name, module.__file__)
    found = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = found  # its data classes need it
    loader.exec_module(found)
    return found


kernels, kernels_v2 = once_more(spec_utils), once_more(eagle_info_v2)

# With numpy 2 a range over a tensor of one value needs this.
interpreter.tl.core.tensor.__index__ = lambda value: int(value.handle.data.item())


def forms_of(module: ModuleType) -> ModuleType:
    """Return the stand-in's forms of a module's kernels."""
    found = ModuleType(module.__name__)
    speculative.edit(found)
    return found


forms, forms_v2 = forms_of(spec_utils), forms_of(eagle_info_v2)
RNG = random.Random(5)
POOL_LEN = 96


def power(number: int) -> int:
    """Return the next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def same(name: str, batch: int, *arguments: object, changed: tuple[int, ...]) -> None:
    """Check that kernel and form change the arguments ``changed`` equally."""
    pairs = [(a.clone(), a.clone()) if isinstance(a, torch.Tensor) else (a, a) for a in arguments]
    theirs, ours = ([pair[side] for pair in pairs] for side in (0, 1))
    getattr(kernels, name)[(batch,)](*theirs)
    getattr(forms, name)[(batch,)](*ours)
    for at in changed:
        assert torch.equal(theirs[at], ours[at]), (name, theirs[at], ours[at])


def batch_of() -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return size, rows, table and lengths of a random batch."""
    size = RNG.randint(1, 5)
    rows = torch.tensor(RNG.sample(range(8), size))
    table = torch.randint(1, 1000, (8, POOL_LEN), dtype=torch.int32)
    return size, rows, table, torch.tensor([RNG.randint(1, 70) for _ in range(size)])


for _ in range(40):
    size, rows, table, lens = batch_of()
    steps, page = RNG.randint(1, 4), RNG.choice([1, 2, 16])
    counts = torch.tensor([RNG.randint(1, steps + 1) for _ in range(size)])
    slots = torch.randint(1, 1000, (int(counts.sum()),))
    same(
        *("assign_req_to_token_pool", size, rows, table, lens, lens + counts, slots),
        *(POOL_LEN, power(size)),
        changed=(1,),
    )
    slots = torch.randint(1, 1000, (size * steps,))
    empty = torch.empty((), dtype=torch.int64)
    same(
        *("assign_draft_cache_locs", size, rows, table, lens, empty, empty, slots),
        *(None, None, None, 0, POOL_LEN, 1, steps, page, power(size), power(steps + page)),
        changed=(1, 5),
    )
    ids = torch.randint(0, 600, (int(counts.sum()),))
    positions = torch.zeros(len(ids), dtype=torch.int64)
    last = torch.zeros(size, dtype=torch.int32)
    same(
        *("create_extend_after_decode_spec_info", size, ids, lens + 70, counts, positions, last),
        power(max(steps + 1, size)),
        changed=(3, 4),
    )
    evict = torch.ones(size * (steps + 1), dtype=torch.bool)
    for request, count in enumerate(counts.tolist()):
        evict[request * (steps + 1) : request * (steps + 1) + count] = False
    same(
        *("align_evict_mask_to_page_size", size, lens, evict, page, steps + 1, power(steps + 1)),
        changed=(1,),
    )

for _ in range(40):
    size, rows, table, lens = batch_of()
    steps = RNG.randint(1, 4)
    drafts = steps + 1
    slots = [torch.zeros(size * steps, dtype=torch.int64) for _ in range(2)]
    name = "assign_draft_cache_locs_page_size_1"
    for out, launch in zip(
        slots, (getattr(kernels_v2, name), getattr(forms_v2, name)), strict=True
    ):
        launch[(size,)](rows, table, lens, out, POOL_LEN, 1, steps)
    assert torch.equal(*slots), name
    theirs = torch.zeros(size * drafts, dtype=torch.int64)
    ends = rows, table, lens, lens + drafts
    kernels_v2.assign_extend_cache_locs[(size,)](*ends, theirs, POOL_LEN, power(size))
    assert torch.equal(theirs, forms_v2.assign_extend_cache_locs_func(*ends, size, drafts, "cpu"))
    ids = torch.randint(0, 600, (size, drafts))
    counts = torch.tensor([RNG.randint(1, drafts) for _ in range(size)], dtype=torch.int32)
    last = [torch.zeros(size, dtype=torch.int32) for _ in range(2)]
    name = "fill_new_verified_id"
    for out, module in zip(last, (kernels_v2, forms_v2), strict=True):
        getattr(module, name)[(size,)](ids, counts, out, drafts)
    assert torch.equal(*last), name
print("CHECKED", flush=True)
os._exit(0)
