"""A request at each stage of its life on a decode server, and the events of that stage."""

from __future__ import annotations

from typing import Any

from component.decode.checks import check
from component.decode.decoder import Decoder
from component.decode.steps import PROMPT, evict_all, retract, tick, turn
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
)

#: Its pages are not announced. "pending": its prefill server's topology is not known yet.
UNANNOUNCED = ("pending", "handshake", "in line")
#: The KV of its prompt has arrived, and is in the tree.
COMMITTED = ("waiting", "running", "retracted")
#: "held": aborted in transfer, while prefill may still write to its pages.
FROM_PREFILL = (*UNANNOUNCED, "in transfer", "held", *COMMITTED)
#: Stages of a turn that decode computes.
HERE = ("taken", "between chunks", "computed", "running here")
#: Its transfer failed, and it is queued to be computed here.
LOST = "without prefill"

#: Tokens of its answer, and of the answer of the request beside it.
ANSWER, OTHERS = 16, 24


def options(stage: str) -> dict[str, int]:
    """Return the options of a server that can have requests at ``stage``."""
    if stage in HERE:
        return {"local": 200, "chunk": 8}
    return {"lost": 100, "chunk": 8} if stage == LOST else {}


def bring_to(decoder: Decoder, stage: str) -> Any:
    """Return a request at ``stage``; a request with another text runs beside it."""
    if stage in HERE:
        return _computed_here(decoder, stage)
    other = decoder.submit([60, 61, 62], new=OTHERS)
    tick(decoder)
    if stage == "in line":  # only the prompt's prefix and a few tokens are free
        page = decoder.page_size
        spare = page * (3 if decoder.steps else 1)  # for a step of the draft model
        left = min(decoder.token_to_kv_pool_allocator.available_size() - spare, 960)
        filler = decoder.submit([1] * (left // page * page), new=1)
        tick(decoder)
        assert decoder.in_transfer == [other, filler]
    ready = stage not in ("pending", "handshake")
    req = decoder.submit(PROMPT, new=ANSWER, ready=ready, pending=stage == "pending")
    tick(decoder)
    assert (req in decoder.queued) == (stage in UNANNOUNCED)
    decoder.deliver(other)
    if stage in COMMITTED:
        decoder.deliver(req)
    tick(decoder)
    if stage in ("running", "retracted"):
        for _ in range(3):
            decoder.tick_batch()
            check(decoder)
    if stage == "retracted":
        assert retract(decoder) is req
    if stage == "held":
        decoder.abort(req.rid)
        tick(decoder)
        assert decoder.held == [req]
    if stage == LOST:
        fail_room(decoder, req)
        decoder.disagg_decode_transfer_queue.pop_transferred()
        assert decoder.queued == [req] and req.finished_reason is None
    return req


def _computed_here(decoder: Decoder, stage: str) -> Any:
    decoder.submit([60, 61, 62], new=2 * OTHERS)
    turn(decoder, 2)
    req = decoder.submit(PROMPT, new=ANSWER)
    tick(decoder)
    assert decoder.local == [req]
    while stage == "between chunks" and req.rid not in decoder.computed:
        decoder.tick_batch()
    while stage in ("computed", "running here") and not req.output_ids:
        decoder.tick_batch()
    if stage == "running here":
        decoder.tick_batch()
        assert req in decoder.running_batch.reqs
    return req


# ---- events ----


def fail_room(decoder: Decoder, req: Any) -> None:
    """Lose its prefill server, which stops writing without a message."""
    room = decoder.room(req)
    room.state, room.writing, room.failure = KVPoll.Failed, False, "lost prefill server"


def freeze(decoder: Decoder, req: Any) -> None:
    """Freeze its prefill server until the room's deadline; it may continue at any time."""
    decoder.room(req).state = KVPoll.Failed


def abort(decoder: Decoder, req: Any) -> None:
    """Disconnect its client."""
    decoder.abort(req.rid)


def abort_all(decoder: Decoder, req: Any) -> None:
    decoder.abort_request(AbortReq(abort_all=True))


def flush(decoder: Decoder, req: Any) -> None:
    answer = decoder.flush_cache_wrapped(FlushCacheReqInput())
    assert not answer.success and "requests are in progress" in answer.message
    under_way = {
        "running": decoder.running_batch.reqs,
        "in local prefill": decoder.local,
        "in transfer": decoder.in_transfer,
    }
    for what, reqs in under_way.items():
        said = f"{len(reqs)} {what}" if reqs else what
        assert (said in answer.message) == bool(reqs)


def new_weights(decoder: Decoder, req: Any) -> None:
    decoder.update_weights()


def pause_in_place(decoder: Decoder, req: Any) -> None:
    _pause(decoder, "in_place")


def pause_and_retract(decoder: Decoder, req: Any) -> None:
    _pause(decoder, "retract")


def _pause(decoder: Decoder, mode: str) -> None:
    """Pause and resume; retracted requests stay out, and the weights are updated, in between."""
    decoder.pause_generation(PauseGenerationReqInput(mode=mode))
    assert mode == "in_place" or decoder.running_batch.is_empty()
    out = list(decoder.retracted)
    turn(decoder, 3)
    assert decoder.retracted == out
    decoder.update_weights()
    check(decoder)
    decoder.continue_generation(ContinueGenerationReqInput())


def retract_some(decoder: Decoder, req: Any) -> None:
    decoder.retract()


def evict(decoder: Decoder, req: Any) -> None:
    evict_all(decoder)


def five_minutes(decoder: Decoder, req: Any) -> None:
    """Let the limit of a request's wait for memory pass."""
    decoder.now += 300.0
