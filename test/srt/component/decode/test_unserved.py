"""Requests that a pair cannot serve, at the queues of a decode and a prefill server."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark.harness import without_engine
from component.decode.checks import check_idle
from component.decode.decoder import VOCABULARY, Decoder
from component.decode.peer import Mailbox
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.unserved import CheckedTokenizer, check_values, why_unserved
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    MetadataBuffers,
    TransferBackend,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
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


@pytest.mark.hazard("room-number-reused", "bad-kv-in-tree")
def test_a_room_number_in_use() -> None:
    """A client chose the number, and uses it twice. Guards against KV that was never written
    counting as arrived, with that of the first request of the number."""
    decoder = Decoder(16, 1024)
    decoder.kv_manager.request_status[7] = KVPoll.WaitingForInput
    req = request(bootstrap_room=7)
    decoder._add_request_to_queue(req)
    reason = decoder.mailbox.reasons[req.rid]
    assert reason["status_code"] == 400
    assert "bootstrap_room 7 is in use by another request" in reason["message"]
    assert decoder.kv_manager.request_status == {7: KVPoll.WaitingForInput}
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


def tokenized(sampling: dict[str, Any], **fields: Any) -> Any:
    """As SGLang's tokenizer makes it of a client's request, which has looked at little of it."""
    wanted = dict.fromkeys(("mm_inputs", "input_embeds", "token_ids_logprob", "extra_key", "rid"))
    wanted |= {"top_logprobs_num": 0, "logprob_start_len": -1, "input_ids": [3, 2, 1]} | fields
    return SimpleNamespace(sampling_params=SamplingParams(**sampling), **wanted)


INVALID = [
    ({}, {"input_ids": [3, -1]}, "input_ids has -1"),
    ({}, {"input_ids": [VOCABULARY, 1]}, f"input_ids has {VOCABULARY}"),
    ({}, {"input_ids": [2**70]}, f"input_ids has {2**70}"),
    ({}, {"input_ids": []}, "input_ids is empty"),
    ({}, {"token_ids_logprob": [-3]}, "token_ids_logprob has -3"),
    ({}, {"token_ids_logprob": [[1]]}, "token_ids_logprob has [1]"),
    ({}, {"top_logprobs_num": -1}, "top_logprobs_num is -1"),
    ({}, {"top_logprobs_num": [1]}, "top_logprobs_num is [1]"),
    ({}, {"logprob_start_len": -2}, "logprob_start_len is -2"),
    ({}, {"extra_key": ["a"]}, "extra_key is ['a']"),
    ({"stop_token_ids": ["a"], "min_new_tokens": 2}, {}, "stop_token_ids has 'a'"),
    ({"stop_token_ids": [VOCABULARY], "min_new_tokens": 2}, {}, f"stop_token_ids has {VOCABULARY}"),
    ({"logit_bias": {"5": 1e39}}, {}, "logit_bias of 5 is 1e+39"),
    ({"logit_bias": {"5": float("nan")}}, {}, "logit_bias of 5 is nan"),
    ({"logit_bias": [5]}, {}, "logit_bias is [5]"),
    ({"temperature": float("nan")}, {}, "temperature is nan"),
    ({"repetition_penalty": 0}, {}, "repetition_penalty is 0"),
    ({"top_k": 2**31}, {}, "top_k is 2147483648"),
    ({"max_new_tokens": 1.5}, {}, "max_new_tokens is 1.5"),
    ({"min_new_tokens": 2**31}, {}, "min_new_tokens is 2147483648"),
    ({"stream_interval": "a"}, {}, "stream_interval is 'a'"),
    ({"json_schema": {"type": "object"}}, {}, "json_schema is {"),
    ({"json_schema": "\ud800"}, {}, "half of a surrogate pair"),
    ({}, {"extra_key": "\ud800"}, "half of a surrogate pair"),
    ({"custom_params": 5}, {}, "custom_params is 5"),
]


@pytest.mark.parametrize(("sampling", "fields", "told"), INVALID)
def test_what_would_raise_in_a_scheduler_is_refused(
    sampling: dict[str, Any], fields: dict[str, Any], told: str
) -> None:
    """Guards against one client's ids and numbers that end both servers: SGLang's tokenizer, which
    answers a ``ValueError`` with status 400, sends them on to the schedulers."""
    with pytest.raises(ValueError, match=re.escape(told)):
        check_values(tokenized(sampling, **fields), VOCABULARY)


def test_ordinary_values_are_served() -> None:
    """Guards against a refusal of what SGLang serves."""
    sampling = {"stop_token_ids": [1], "logit_bias": {"2": -100}, "temperature": 0, "top_k": -1}
    fields = {"token_ids_logprob": [0, VOCABULARY - 1], "top_logprobs_num": 5, "rid": "a"}
    check_values(tokenized(sampling, **fields), VOCABULARY)
    check_values(tokenized({}, input_ids=[10**6], mm_inputs={"an": "image"}), VOCABULARY)


@pytest.mark.parametrize(
    ("mode", "is_refused"), [("prefill", True), ("decode", True), ("null", False)]
)
def test_the_tokenizer_of_each_server_of_a_pair_refuses(mode: str, is_refused: bool) -> None:
    """Guards against a check that one of the two servers lacks: the other would wait for a room."""
    request = tokenized({}, input_ids=[-1], bootstrap_room=1)

    class Tokenizer(CheckedTokenizer, Tokenizing):
        server_args = SimpleNamespace(disaggregation_mode=mode)
        model_config = SimpleNamespace(vocab_size=VOCABULARY)

    tokenizer = Tokenizer()
    tokenizer.made = request
    if mode != "null":
        with pytest.raises(ValueError, match="input_ids has -1"):
            tokenizer._create_tokenized_object(None, "", [-1])
    else:
        assert tokenizer._create_tokenized_object(None, "", [-1]) is request


class Tokenizing:
    """Stands for SGLang's."""

    made: Any = None

    def _create_tokenized_object(self, *_: Any) -> Any:
        return self.made
