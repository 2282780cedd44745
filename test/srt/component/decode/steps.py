"""The vocabulary of these tests: texts, and checked steps of a decode server."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from component.decode import kv, recurrent
from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import HealthCheckOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

PROMPT = [token % 50 for token in range(3, 83)]  # 80 tokens: 5 pages of 16


def ids(start: int, count: int) -> list[int]:
    """Return a different text for each ``start``."""
    return [(start * 7 + number * (start + 1)) % 50 for number in range(count)]


# ---- steps ----


def tick(decoder: Decoder, times: int = 1) -> None:
    """Run ``times`` admission steps, with checks."""
    for _ in range(times):
        decoder.tick_queues()
        check(decoder)


def turn(decoder: Decoder, times: int = 1) -> None:
    """Run ``times`` turns of the scheduler's loop (an admission step and a batch), with checks."""
    for _ in range(times):
        tick(decoder)
        decoder.tick_batch()
        check(decoder)


def finish(decoder: Decoder) -> None:
    """Let all requests end, and check that nothing is left of them."""
    decoder.drain()
    check_idle(decoder)


# ---- requests ----


def serve(decoder: Decoder, *prompts: list[int], new: int = 1, **options: Any) -> list[Any]:
    """Serve requests from their arrival to their end; the tree keeps their KV."""
    reqs = [decoder.submit(prompt, new=new, **options) for prompt in prompts]
    finish(decoder)
    return reqs


def admit(decoder: Decoder, *prompts: list[int], new: int = 1, **options: Any) -> list[Any]:
    """Return requests that are in transfer, as far as they fit."""
    reqs = [decoder.submit(prompt, new=new, **options) for prompt in prompts]
    tick(decoder)
    return reqs


def land(decoder: Decoder, *reqs: Any, **said: Any) -> None:
    """Complete the transfers of ``reqs``, or of all, so that these wait for their batch."""
    for req in reqs or decoder.in_transfer:
        decoder.deliver(req, **said)
    tick(decoder)


def run(
    decoder: Decoder, *prompts: list[int], new: int = 100, steps: int = 1, **options: Any
) -> list[Any]:
    """Return running requests, ``steps`` decode steps after they have come from prefill."""
    reqs = admit(decoder, *prompts, new=new, **options)
    land(decoder, *reqs)
    for _ in range(steps):
        decoder.tick_batch()
        check(decoder)
    return reqs


def retract(decoder: Decoder) -> Any:
    """Retract and return the only running request for which the pool has no room."""
    decoder.retract()
    check(decoder)
    (req,) = decoder.retracted
    return req


# ---- the tree and the pool ----


def evict_all(decoder: Decoder) -> None:
    """Evict everything that is not locked, and overwrite its slots."""
    decoder.tree_cache.evict(EvictParams(num_tokens=10_000))
    poison_free_slots(decoder)


def health_check(decoder: Decoder) -> tuple[int, int]:
    """Return the number of answers to one health check in a step without a batch, and of requests
    that SGLang makes of it."""
    answers, made = list[Any](), list[Any]()
    rig: dict[str, Any] = {
        "maybe_send_health_check_signal": partial(
            Scheduler.maybe_send_health_check_signal, decoder
        ),
        "send_to_tokenizer": SimpleNamespace(send_output=answers.append),
        "session_controller": SimpleNamespace(maybe_reap=lambda now: None),
        "return_health_check_ipcs": deque[Any](),
        "_request_dispatcher": made.append,
        "last_batch": None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in rig.items():
            patch.setitem(vars(decoder), name, value)
        decoder.process_input_requests([SimpleNamespace(rid=HEALTH_CHECK_RID_PREFIX)])
        decoder.tick_queues()
    assert all(isinstance(answer, HealthCheckOutput) for answer in answers)
    return len(answers), len(made)


def in_tree(decoder: Decoder, token_ids: list[int]) -> int:
    """Return the number of a text's tokens in the tree."""
    match = decoder.tree_cache.match_prefix(MatchPrefixParams(key=RadixKey(token_ids, None)))
    return len(match.device_indices)


def poison_free_slots(decoder: Decoder) -> None:
    """Overwrite every free slot, for both models."""
    free = decoder.token_to_kv_pool_allocator
    pages = torch.cat([free.free_pages, free.release_pages])
    slots = (pages[:, None] * free.page_size + torch.arange(free.page_size)).flatten()
    for pool in (decoder.pool, decoder.draft_pool):
        if pool is not None:
            kv.write(pool, slots, [-5] * len(slots))
    if decoder.has_states:
        states = decoder.req_to_token_pool.mamba_pool.free_slots.tolist()
        recurrent.write(decoder.req_to_token_pool, states, -5)
