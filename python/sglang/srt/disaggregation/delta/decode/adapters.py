"""LoRA adapters of a batch: SGLang has memory for so many together, and ends a server with more.

Its own check is where prompts are batched, which a decode server never comes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def adapters_fit(scheduler: Any, reqs: Sequence[Any]) -> bool:
    """Whether the adapters of a batch of ``reqs`` have room in memory together."""
    if not scheduler.enable_lora:
        return True
    manager = scheduler.tp_worker.model_runner.lora_manager
    return bool(manager.validate_lora_batch({req.lora_id for req in reqs}))


def first_that_fit(scheduler: Any) -> int:
    """How many of the first requests that wait may join the running batch by their adapters.

    Nobody overtakes one that does not: it has room when enough of the others have ended.
    """
    running = [req for req in scheduler.running_batch.reqs if not req.finished()]
    waiting = scheduler.waiting_queue
    for count in range(len(waiting)):
        if not adapters_fit(scheduler, [*running, *waiting[: count + 1]]):
            return count
    return len(waiting)
