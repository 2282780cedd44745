"""What SGLang's way of aborting a request leaves undone in a decode server."""

from __future__ import annotations

from typing import Any


def end_streaming(scheduler: Any, recv_req: Any) -> None:
    """Decode: end aborted requests that wait but have sent tokens before they were retracted.

    SGLang tells the tokenizer of such an abort directly. That can overtake tokens which are still
    with the detokenizer; they would bring the request back to life, and its client would wait for
    ever. So the end goes the way of the tokens.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.mem_cache.common import release_kv_cache

    def wanted(req: Any) -> bool:
        return bool(recv_req.abort_all or req.rid.startswith(recv_req.rid))

    queue = scheduler.disagg_decode_prealloc_queue
    retracted = [req for req in queue.retracted_queue if wanted(req)]
    resumed = [req for req in scheduler.waiting_queue if wanted(req) and req.send_token_offset]
    queue.retracted_queue = [req for req in queue.retracted_queue if not wanted(req)]
    for req in retracted:
        req.__dict__.pop("kv_cache_cpu", None)
    gone = {id(req) for req in resumed}
    scheduler.waiting_queue = [req for req in scheduler.waiting_queue if id(req) not in gone]
    for req in resumed:
        release_kv_cache(req, scheduler.tree_cache)
    for req in (*retracted, *resumed):
        req.finished_reason = FINISH_ABORT()
        scheduler.stream_output([req], req.return_logprob)
