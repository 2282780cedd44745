"""LoRA adapters of local turns: a server loads a limited number at once.

SGLang loads the adapters of a batch when it runs, and admits a request only if its adapter can be
loaded beside those of admitted ones. Local turns count as admitted, and the same check admits them.

Contract: scheduler thread, no lock; equal on all ranks, as SGLang's own check is.
"""

from __future__ import annotations

from typing import Any  # Any: SGLang's objects


def fits(scheduler: Any, req: Any) -> bool:
    """Return True if the adapter of a local turn can be loaded now."""
    if not scheduler.enable_lora:
        return True
    arriving = [entry.req for entry in scheduler.disagg_decode_transfer_queue.queue]
    admitted = [*scheduler.running_batch.reqs, *scheduler.waiting_queue, *arriving]
    return bool(scheduler.can_schedule_lora_req(req, of(admitted)))


def of(reqs: list[Any]) -> set[str | None]:
    """Return the adapters of ``reqs``; None stands for the model without one."""
    return {req.lora_id for req in reqs}
