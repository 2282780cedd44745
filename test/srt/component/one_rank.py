"""The process group of a server with one rank, for all component tests of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def one_rank() -> Iterator[None]:
    """Set the group up, or use the one that another folder's tests have set up."""
    torch.set_num_threads(1)
    is_first = not dist.is_initialized()
    if is_first:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if is_first:
        dist.destroy_process_group()
