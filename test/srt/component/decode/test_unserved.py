"""Requests that a pair cannot serve, at the queues of a decode and a prefill server."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark.harness import without_engine
from component.decode.checks import check_idle
from component.decode.decoder import VOCABULARY, Decoder
from component.decode.peer import Mailbox
from sglang.srt.disaggregation.delta.unserved import why_unserved
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    MetadataBuffers,
    TransferBackend,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler import Scheduler
from unit.delta.nixl.prefill_rank import PrefillRank

#: As SGLang builds a request of a session, whatever the router wrote.
SESSION = {"bootstrap_host": None, "bootstrap_port": None, "bootstrap_room": None}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 129}
#: With what the client is told.
UNSERVED = [
    (SESSION, "has no room"),
    ({"bootstrap_room": -1}, "has no room"),
    ({"bootstrap_room": 2**63}, "has no room"),
    ({"bootstrap_room": [7]}, "has no room"),
    (LOGPROBS, "top_logprobs_num is 129"),
]


def test_what_metadata_hold() -> None:
    """Guards against bounds that are not those of SGLang's buffers, where it raises."""
    buffers = MetadataBuffers(1, 16, torch.float32)
    most = request(bootstrap_room=2**63 - 1, return_logprob=True, top_logprobs_num=128)
    most.output_ids, most.metadata_buffer_index = [1], 0
    most.output_top_logprobs_val, most.output_top_logprobs_idx = [[0.5] * 128], [[1] * 128]
    most.output_token_logprobs_val, most.output_token_logprobs_idx = [0.5], [1]
    assert why_unserved(most, on_decode=True) is None
    buffers.set_buf(most)
    assert buffers.bootstrap_room[0, 0].item() == 2**63 - 1
    for name, value in (("bootstrap_room", 2**63), ("output_top_logprobs_val", [[0.5] * 129])):
        over = copy.copy(most)
        setattr(over, name, value)
        with pytest.raises((ValueError, RuntimeError)):
            buffers.set_buf(over)


def request(**fields: Any) -> Any:
    req = without_engine.request(0, [3, 2, 1], 8, VOCABULARY)
    for name, value in fields.items():
        setattr(req, name, value)
    return req


NO_PREFILL = [{"bootstrap_host": None}, {"bootstrap_host": ["h"]}, {"bootstrap_port": [8998]}]


@pytest.mark.parametrize(
    ("fields", "told"), [*UNSERVED, *((fields, "has no room") for fields in NO_PREFILL)]
)
def test_a_decode_server_answers(fields: dict[str, Any], told: str) -> None:
    """Guards against one client's request that raises in SGLang's queue and ends the server, with
    all that its other clients wait for."""
    decoder = Decoder(16, 1024)
    req = request(**fields)
    decoder.submitted.append(req)
    decoder.init_req_max_new_tokens(req)
    decoder._add_request_to_queue(req)
    reason = decoder.mailbox.reasons[req.rid]
    assert reason["status_code"] == 400 and told in reason["message"]
    check_idle(decoder)


def test_what_sglang_found_is_said() -> None:
    """Guards against a client that is not told that its session is unknown."""
    decoder = Decoder(16, 1024)
    req = request(**SESSION, to_finish=FINISH_ABORT("session id x does not exist", 400))
    decoder._add_request_to_queue(req)
    assert decoder.mailbox.reasons[req.rid]["message"] == "session id x does not exist"


@pytest.mark.parametrize(("fields", "told"), [*UNSERVED, ({}, "")])
def test_a_prefill_server_answers(
    fields: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the same on a prefill server, which needs no flag for it, and against one that
    answers those of a room."""
    rank, mailbox = PrefillRank(monkeypatch), Mailbox()
    queue = PrefillBootstrapQueue.__new__(PrefillBootstrapQueue)
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.__dict__.update(
        disaggregation_mode=DisaggregationMode.PREFILL,
        disagg_prefill_bootstrap_queue=queue,
        enable_hicache_storage=False,
        model_config=SimpleNamespace(num_key_value_heads=1),
        stream_output=lambda reqs, *_: mailbox.stream(reqs),
    )
    queue.__dict__.update(
        kv_manager=rank.manager,
        transfer_backend=TransferBackend.NIXL,
        scheduler=scheduler,
        bootstrap_port=8998,
        max_total_num_tokens=1024,
        tp_rank=0,
        pp_rank=0,
        queue=[],
    )
    req = request(**fields)
    scheduler._add_request_to_queue(req)
    assert bool(queue.queue) == (not fields)
    if fields:
        reason = mailbox.reasons[req.rid]
        assert reason["status_code"] == 400 and told in reason["message"]
        assert rank.leftovers() == {}
