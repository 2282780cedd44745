"""Agreement between the ranks of one server."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def alone(group: Any) -> bool:
    """Whether ``group`` has one rank."""
    return bool(dist.get_world_size(group) == 1)


def minimum(values: list[int], group: Any) -> list[int]:
    """The smallest of each value over the ranks of ``group``; one collective, none for one rank.

    Every rank must call it with equally many values, so callers decide *whether* to call it from
    things that are equal on all ranks.
    """
    if alone(group):
        return values
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    return [int(value) for value in tensor]
