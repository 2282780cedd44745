"""LoRA adapters of a batch: SGLang has memory for so many together, and ends a server with more.

Its own check is where prompts are batched, which a decode server never comes to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler


def _has_memory(scheduler: Scheduler, adapters: set[str | None]) -> bool:
    manager = scheduler.tp_worker.model_runner.lora_manager
    return bool(manager.validate_lora_batch(adapters))


def adapters_fit(scheduler: Scheduler, reqs: Iterable[Req]) -> bool:
    """Whether the adapters of a batch of ``reqs`` have room in memory together."""
    return not scheduler.enable_lora or _has_memory(scheduler, {req.lora_id for req in reqs})


def first_that_fit(scheduler: Scheduler) -> int:
    """How many of the first requests that wait may join the running batch by their adapters.

    Nobody overtakes one that does not: it has room when enough of the others have ended.
    """
    together = {req.lora_id for req in scheduler.running_batch.reqs if not req.finished()}
    waiting = scheduler.waiting_queue
    for count, req in enumerate(waiting):
        if req.lora_id not in together:
            together.add(req.lora_id)
            if not _has_memory(scheduler, together):
                return count
    return len(waiting)
