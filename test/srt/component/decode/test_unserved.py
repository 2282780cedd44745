"""Requests that a pair cannot serve, at the tokenizer of its servers; and grammars that allow no
token, when a batch is sampled."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmark.harness import without_engine
from component.decode.checks import check_idle
from component.decode.decoder import VOCABULARY, Decoder
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, InvalidGrammarObject
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.unserved import check_request
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    MetadataBuffers,
)
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.patchset.flags import FLAG
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.aio_rwlock import RWLock

FIELDS: dict[str, Any] = {
    "input_ids": [3, 2, 1],
    "bootstrap_host": "h",
    "bootstrap_room": 1,
    "rid": "a",
}

BATCH: dict[str, Any] = {"input_ids": [[3], [2]], "bootstrap_room": [1, 2], "rid": None}


#: SGLang builds a session's request without its room, and raises for the others.
INVALID = [
    ({}, {"session_params": {"id": "x"}}, "bootstrap_room needs bootstrap_host"),
    ({}, {"bootstrap_host": None}, "bootstrap_room needs bootstrap_host"),
    ({}, {"bootstrap_host": ["h"]}, "bootstrap_host is ['h']"),
    ({}, {"bootstrap_port": [8998]}, "bootstrap_port is [8998]"),
    ({}, {"bootstrap_room": [7]}, "bootstrap_room is [7]"),
    ({}, {"bootstrap_room": -1}, "bootstrap_room is -1"),
    ({}, {"bootstrap_room": 2**63}, f"bootstrap_room is {2**63}"),
    ({}, {"return_logprob": True, "top_logprobs_num": 129}, "top_logprobs_num is 129"),
    ({}, {"input_ids": [3, -1]}, "input_ids has -1"),
    ({}, {"input_ids": [VOCABULARY, 1]}, f"input_ids has {VOCABULARY}"),
    ({}, {"input_ids": [2**70]}, f"input_ids has {2**70}"),
    ({}, {"token_ids_logprob": [-3]}, "token_ids_logprob has -3"),
    ({}, {"token_ids_logprob": [[1]]}, "token_ids_logprob has [1]"),
    ({}, {"top_logprobs_num": -1}, "top_logprobs_num is -1"),
    ({}, {"top_logprobs_num": [1]}, "top_logprobs_num is [1]"),
    ({}, {"logprob_start_len": -2}, "logprob_start_len is -2"),
    ({}, {"extra_key": ["a"]}, "extra_key is ['a']"),
    ({"stop_token_ids": ["a"]}, {}, "stop_token_ids has 'a'"),
    ({"stop_token_ids": [VOCABULARY]}, {}, f"stop_token_ids has {VOCABULARY}"),
    ({"stop": [["a", "b"]]}, {}, "stop is ['a', 'b']"),
    ({"skip_special_tokens": 1}, {}, "skip_special_tokens is 1"),
    ({"skip_special_tokens": None}, {}, "skip_special_tokens is None"),
    ({}, {"custom_labels": {"tenant": "\ud800"}}, "unpaired surrogate"),
    ({"logit_bias": {"5": 1e39}}, {}, "logit_bias of 5 is 1e+39"),
    ({"logit_bias": {"5": float("nan")}}, {}, "logit_bias of 5 is nan"),
    ({"logit_bias": {"5": None}}, {}, "logit_bias of 5 is"),
    # SGLang sets these itself, and asserts that they are right.
    ({}, {"lora_id": "unknown"}, "lora_id is set"),
    ({}, {"need_wait_for_mm_inputs": True}, "need_wait_for_mm_inputs is set"),
    ({}, {"num_items_assigned": {"image": [1]}}, "num_items_assigned is set"),
    ({}, {"disagg_prefill_dp_rank": -1}, "disagg_prefill_dp_rank is -1"),
    ({}, {"rid": ""}, "rid is ''"),  # the beginning of all ids
    ({}, BATCH | {"rid": ["a", ""]}, "rid is ''"),
    ({}, {"rid": 5}, "rid is 5"),
    ({}, {"rid": ["a"]}, "rid is ['a']"),
    ("greedy", {}, "sampling_params is 'greedy'"),
    ([{}], {}, "sampling_params is [{}]: a list needs a list of prompts"),
    ([{}, None], BATCH, "sampling_params is None"),
    ({}, {"rid": "HEALTH_CHECK_1"}, "rid is 'HEALTH_CHECK_1'"),  # ignored while others run
    # SGLang uses an entry of each list for each prompt, and raises after it has sent some.
    *(
        ({}, BATCH | fields, "cannot be split into its prompts")
        for fields in (
            {"bootstrap_room": [1]},
            {"modalities": ["image"]},
            {"audio_data": ["a"]},
            {"video_data": []},
            {"decode_tp_size": [1]},
            {"decode_tp_size": 1},
            {"return_hidden_states": [True]},
            {"text": ["a", "b"], "input_ids": [[3]]},
            {"rid": [["a"], ["b"]]},
        )
    ),
    ([], BATCH, "cannot be split into its prompts"),
    ({"n": 2}, BATCH | {"decode_tp_size": [1, 1]}, "cannot be split into its prompts"),
    ({"logit_bias": [5]}, {}, "logit_bias is [5]"),
    ({"temperature": float("nan")}, {}, "temperature is nan"),
    ({"repetition_penalty": 0}, {}, "repetition_penalty is 0"),
    ({"top_k": 2**31}, {}, "top_k is 2147483648"),
    ({"max_new_tokens": 1.5}, {}, "max_new_tokens is 1.5"),
    ({"min_new_tokens": 2**31}, {}, "min_new_tokens is 2147483648"),
    ({"stream_interval": "a"}, {}, "stream_interval is 'a'"),
    ({"json_schema": {"type": "object"}}, {}, "json_schema is {"),
    ({"json_schema": "\ud800"}, {}, "unpaired surrogate"),
    ({"json_schema": "{"}, {}, "Expecting property name"),
    ({"regex": "\0"}, {}, "regex is '\\x00'"),  # xgrammar ends the process
    ({}, {"extra_key": "\ud800"}, "unpaired surrogate"),
    ({"custom_params": 5}, {}, "custom_params is 5"),
    ({"structural_tag": ""}, {}, "structural_tag is empty"),
    ({"top_k": "a"}, {}, "top_k is 'a'"),
    ({"top_p": [1]}, {}, "top_p is [1]"),
    ({"n": 2**40}, {}, f"n is {2**40}"),  # its fields would become lists of this length
    ({"n": 1025}, {}, "n is 1025"),  # one client's samples would fill the queue
    ({"n": 0}, {}, "n is 0"),
    ({"n": "2"}, {}, "n is '2'"),
    ({"stop": 5}, {}, "stop is 5"),
    ({"json_schema": "[" * 100_000}, {}, "recursion"),  # xgrammar ends the process
    ({"stop_regex": "([a"}, {}, "unterminated character set"),
    ({"stop_regex": "(?<=a+)b"}, {}, "look-behind requires fixed-width pattern"),
    ({"stop": "a"}, {}, "stop needs the tokenizer"),
    ({"min_new_tokens": 1}, {}, "min_new_tokens needs the tokenizer"),
    ({"n": None}, {}, "n is None"),
    ({"unknown": 5}, {}, "unknown"),
    ({}, {"custom_labels": {"a": "b"}}, "custom_labels has ['a']"),
    ({"max_new_tokens": 4096}, {}, "maximum context length"),  # SGLang's own
]


class Tokenizer(TokenizerManager):
    """SGLang's tokenizer manager with the package's mixin, without its processes."""

    def __init__(self, mode: str = "prefill") -> None:
        self.server_args = SimpleNamespace(
            disaggregation_mode=mode,
            dp_size=1,
            tokenizer_metrics_allowed_custom_labels=["tenant"],
            disable_radix_cache=False,
            disaggregation_decode_enable_radix_cache=False,
            enable_lora=False,
            enable_trace=False,
            language_only=False,
            tokenizer_worker_num=1,
            allow_auto_truncate=False,
            enable_tokenizer_batch_encode=False,
            enable_dp_attention=False,
        )
        self.model_config = SimpleNamespace(vocab_size=VOCABULARY)
        self.disaggregation_mode = DisaggregationMode(mode)
        self.context_len, self.num_reserved_tokens, self.validate_total_tokens = 4096, 0, True
        self.is_generation, self.mm_processor, self.tokenizer = True, None, None
        self.preferred_sampling_params, self.sampling_params_class = None, SamplingParams
        self.request_logger = SimpleNamespace(log_received_request=lambda *_: None)
        self.enable_priority_scheduling, self.default_priority_value = False, None
        self.is_pause, self.enable_metrics = False, True
        self.is_pause_cond, self.model_update_lock = asyncio.Condition(), RWLock()
        self.rid_to_state = {}
        self.sent: list[Any] = []
        self.send_to_scheduler = SimpleNamespace(send_pyobj=self.sent.append)

    def auto_create_handle_loop(self) -> None:
        """Do nothing: there are no schedulers."""

    async def _wait_one_response(self, obj: Any, state: Any, request: Any = None) -> Any:
        """Answer at once, with SGLang's bookkeeping."""
        del self.rid_to_state[obj.rid]
        yield {"meta_info": {"id": obj.rid}}


@pytest.fixture(autouse=True)
def no_media(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace SGLang's search for shared images, which needs the arguments of a running server."""
    monkeypatch.setattr(tokenizer_manager, "wrap_shm_features", lambda tokenized: tokenized)


def answer(tokenizer: Tokenizer, obj: Any, request: Any = None) -> Any:
    """Return the first response, as SGLang's HTTP server does, and close the generator."""

    async def ask() -> Any:
        async with aclosing(tokenizer.generate_request(obj, request)) as responses:
            return await anext(responses)

    return asyncio.run(ask())


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize(("sampling", "fields", "told"), INVALID)
def test_the_tokenizer_of_each_server_of_a_pair_refuses(
    mode: str, sampling: dict[str, Any], fields: dict[str, Any], told: str
) -> None:
    """Guards against one client's ids and numbers that end both servers: SGLang's tokenizer, which
    answers a ``ValueError`` with status 400, passes them to the schedulers; against a check that
    one of the two lacks: the other would wait for a room; and against memory that a refused request
    keeps."""
    tokenizer = Tokenizer(mode)
    with pytest.raises(ValueError, match=re.escape(told)):
        answer(tokenizer, GenerateReqInput(sampling_params=sampling, **FIELDS | fields))
    assert tokenizer.rid_to_state == {} and tokenizer.sent == []


SAMPLING = {"stop_token_ids": [1], "logit_bias": {"2": -100}, "temperature": 0, "top_k": -1}


@pytest.mark.parametrize(
    ("mode", "sampling", "fields"),
    [
        ("prefill", {}, {"custom_labels": {"tenant": "a"}}),
        ("null", {}, {"input_ids": [-1]}),  # a server outside a pair is stock
        ("prefill", SAMPLING, {"token_ids_logprob": [0, VOCABULARY - 1], "top_logprobs_num": 5}),
        ("decode", {"json_schema": "$$ANY$$"}, {"bootstrap_room": 0}),
        # SGLang's own health checks, and a request that stock answers with status 400.
        ("decode", {}, {"bootstrap_room": None, "bootstrap_host": None}),
        (
            "decode",
            {},
            {"bootstrap_room": 2**63 - 1, "return_logprob": True, "top_logprobs_num": 128},
        ),
    ],
)
def test_what_is_served(mode: str, sampling: dict[str, Any], fields: dict[str, Any]) -> None:
    """Guards against the refusal of a request that SGLang serves."""
    obj = GenerateReqInput(sampling_params=sampling, **FIELDS | fields)
    assert answer(Tokenizer(mode), obj)["meta_info"] == {"id": "a"}


def test_samples_of_a_chat() -> None:
    """Guards against a refusal of all parallel samples of chats: SGLang's API gives a text request
    an empty list of modalities, which has no entry for each sample."""
    fields = FIELDS | {"rid": None, "modalities": []}
    check_request(GenerateReqInput(sampling_params={"n": 2}, **fields), None)


def test_a_health_check() -> None:
    """Guards against a health check that is refused for its id."""
    obj = GenerateReqInput(sampling_params={}, **FIELDS | {"rid": "HEALTH_CHECK_1"})
    assert answer(Tokenizer("decode"), obj, SimpleNamespace(method="GET"))


def test_what_metadata_hold() -> None:
    """Guards against bounds in the tables above that differ from the sizes of SGLang's buffers,
    which raise beyond them."""
    buffers = MetadataBuffers(1, 16, torch.float32)
    most = without_engine.request(0, [3, 2, 1], 8, VOCABULARY)
    most.bootstrap_room, most.return_logprob, most.top_logprobs_num = 2**63 - 1, True, 128
    most.output_ids, most.metadata_buffer_index = [1], 0
    most.output_top_logprobs_val, most.output_top_logprobs_idx = [[0.5] * 128], [[1] * 128]
    most.output_token_logprobs_val, most.output_token_logprobs_idx = [0.5], [1]
    buffers.set_buf(most)
    assert buffers.bootstrap_room[0, 0].item() == 2**63 - 1
    for name, value in (("bootstrap_room", 2**63), ("output_top_logprobs_val", [[0.5] * 129])):
        over = copy.copy(most)
        setattr(over, name, value)
        with pytest.raises((ValueError, RuntimeError)):
            buffers.set_buf(over)


def test_a_batch_with_one_that_is_refused() -> None:
    """Guards against the other prompts of a batch that stay in memory, and against a shutdown that
    waits for them: SGLang registers all of a batch before it checks any."""
    tokenizer = Tokenizer()
    batch = {"input_ids": [[3], [-1], [5]], "bootstrap_room": [1, 2, 3], "rid": ["a", "b", "c"]}
    batch["bootstrap_host"] = ["h"] * 3
    with pytest.raises(ValueError, match="input_ids has -1"):
        answer(tokenizer, GenerateReqInput(sampling_params={}, **batch))
    assert tokenizer.rid_to_state == {} and tokenizer.sent == []


#: Prompts with an id that no model has, sent without a router.
WRONG_IDS = [
    (GenerateReqInput, {"input_ids": [3, -1]}, "input_ids has -1"),
    (GenerateReqInput, {"input_ids": [[3], [VOCABULARY]]}, f"input_ids has {VOCABULARY}"),
    (GenerateReqInput, {"input_ids": [[3], [2, 1.5]]}, "input_ids has 1.5"),
    (GenerateReqInput, {"input_ids": [-1], "image_data": ["a"]}, "input_ids has -1"),
    (GenerateReqInput, {"input_ids": [3], "token_ids_logprob": [-3]}, "token_ids_logprob has -3"),
    (EmbeddingReqInput, {"input_ids": [[3], [-1]]}, "input_ids has -1"),
]


@pytest.mark.hazard("wrong-token-ids")
@pytest.mark.parametrize(("kind", "fields", "told"), WRONG_IDS)
def test_a_buffer_only_server_refuses_wrong_ids(
    kind: type[GenerateReqInput | EmbeddingReqInput], fields: dict[str, Any], told: str
) -> None:
    """Guards against one client's ids that end an aggregated server: the scheduler's page hashes
    take unsigned 32 bits. A processor of images passes them on."""
    tokenizer = Tokenizer("null")
    tokenizer.server_args.hicache_host_memory_mode = "buffer_only"
    tokenizer.server_args.limit_mm_data_per_request = None
    tokenizer.is_generation, tokenizer.max_req_input_len = kind is GenerateReqInput, 4096
    processed = SimpleNamespace(input_ids=[3], token_type_ids=None, mm_items=[])
    tokenizer.mm_processor = mock.AsyncMock()
    tokenizer.mm_processor.process_mm_data_async.return_value = processed
    with pytest.raises(ValueError, match=re.escape(told)):
        answer(tokenizer, kind(**fields))
    assert tokenizer.rid_to_state == {} and tokenizer.sent == []


def test_what_sglang_raises_at_leaves_nothing() -> None:
    """Guards against the same outside a pair, where SGLang gets the parameters unchanged."""
    tokenizer = Tokenizer("null")
    with pytest.raises(AttributeError):
        answer(tokenizer, GenerateReqInput(sampling_params=[{}], **FIELDS))
    assert tokenizer.rid_to_state == {} and tokenizer.sent == []


def test_samples_leave_nothing() -> None:
    """Guards against the same with parallel samples, each of which SGLang registers twice."""
    tokenizer = Tokenizer()
    assert len(answer(tokenizer, GenerateReqInput(sampling_params={"n": 3}, **FIELDS))) == 3
    assert len(tokenizer.sent) == 4 and tokenizer.rid_to_state == {}


def test_an_id_that_is_in_use() -> None:
    """Guards against a refused request that removes the state of a running one with its id."""
    earlier = GenerateReqInput(sampling_params={}, **FIELDS)
    tokenizer, first = Tokenizer(), {"a": SimpleNamespace(obj=earlier)}
    tokenizer.rid_to_state = dict(first)
    with pytest.raises(ValueError, match="Duplicate request IDs"):
        answer(tokenizer, GenerateReqInput(sampling_params={}, **FIELDS))
    assert tokenizer.rid_to_state == first


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        (True, f"input_embeds .* {FLAG}.* without the flag"),
        (False, "Please add `--disable-radix-cache`"),
    ],
)
def test_input_embeds(flag: bool, told: str) -> None:
    """Guards against SGLang's advice to add ``--disable-radix-cache``, which the flag refuses; and
    against a refusal, or another text, on a server without the flag."""
    tokenizer = Tokenizer("decode")
    tokenizer.server_args.disaggregation_decode_enable_radix_cache = flag
    embeds = {name: value for name, value in FIELDS.items() if name != "input_ids"}
    embeds["input_embeds"] = [[0.5, 0.25]]
    with pytest.raises(ValueError, match=told):
        answer(tokenizer, GenerateReqInput(sampling_params={}, **embeds))
    tokenizer.server_args.disable_radix_cache = True
    if not flag:
        assert answer(tokenizer, GenerateReqInput(sampling_params={}, **embeds))


class Output(SchedulerOutputProcessorMixin):
    """The part of a scheduler that sends generated tokens."""

    def __init__(self) -> None:
        self.disaggregation_mode = DisaggregationMode.DECODE
        self.server_args = SimpleNamespace(enable_request_time_stats_logging=False)
        self.model_config = SimpleNamespace(is_multimodal_gen=False)
        self.is_generation, self.dp_rank, self.attn_tp_rank, self.stream_interval = True, 0, 0, 1
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.enable_hicache_storage = False
        self.sent: list[Any] = []
        self.send_to_detokenizer = SimpleNamespace(send_output=self.sent.append)

    def get_load(self) -> None:
        """Do nothing: not used here."""

    def _get_cached_tokens_details(self, req: Any) -> None:
        """Do nothing: not used here."""


def test_who_asked_for_routed_experts_beside_who_did_not() -> None:
    """Guards against a tokenizer or a detokenizer that ends, and against a client that gets another
    one's experts: SGLang lists them only for requests that asked for them, and reads one for each
    request."""
    output, reqs = Output(), []
    for number in range(4):
        req = without_engine.request(number, [3, 2, 1], 1, VOCABULARY)
        req.output_ids, req.finished_reason = [1], FINISH_LENGTH(length=1)
        req.return_routed_experts = number in (1, 3)
        req.routed_experts = torch.tensor([number])
        reqs.append(req)
    output.stream_output_generation(reqs, False)
    assert [each.item() for each in output.sent[0].routed_experts] == [0, 1, 2, 3]
    assert output.sent[0].output_hidden_states is None
    assert [req.return_routed_experts for req in reqs] == [False, True, False, True]


@pytest.mark.hazard("room-number-reused", "bad-kv-in-tree")
def test_a_room_number_in_use() -> None:
    """Guards against KV that was never written and counts as arrived, with the KV of the first
    request of the number: a client chose the number, and uses it twice."""
    decoder = Decoder(16, 1024)
    decoder.kv_manager.request_status[7] = KVPoll.WaitingForInput
    req = without_engine.request(0, [3, 2, 1], 8, VOCABULARY)
    req.bootstrap_room = 7
    decoder._add_request_to_queue(req)
    reason = decoder.mailbox.reasons[req.rid]
    assert reason["status_code"] == 400
    assert "bootstrap_room 7 is in use by another request" in reason["message"]
    assert decoder.kv_manager.request_status == {7: KVPoll.WaitingForInput}
    check_idle(decoder)


@pytest.mark.hazard("another-prompt-sent", "bad-kv-in-tree")
def test_a_request_that_sglang_has_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against prefill's KV of the true prompt in the tree under [0], where health requests
    and clients find it, and against another status: SGLang refuses the request while it compiles
    its grammar, or for its length, and replaces its prompt by [0]."""
    module = "sglang.srt.managers.schedule_batch.get_tensor_model_parallel_rank"
    monkeypatch.setattr(module, lambda: 0)
    decoder = Decoder(1, 64)
    req = without_engine.request(0, [3], 8, VOCABULARY)
    req.set_finish_with_abort("Failed to compile json grammar")
    decoder.enqueue(req)
    decoder.tick_queues()
    (room,) = decoder.rooms
    assert room.pages is None and len(room.withdrawn) == 1, "prefill waits for it"
    reason = decoder.mailbox.reasons[req.rid]
    assert (reason["status_code"], reason["message"]) == (400, "Failed to compile json grammar")
    check_idle(decoder)


class Grammars(BaseGrammarBackend):
    """A grammar library that raises, as xgrammar does for tags of an unexpected shape."""

    def dispatch_structural_tag(self, key_string: str) -> Any:
        return json.loads(key_string)["format"]


def test_a_grammar_that_raises() -> None:
    """Guards against a scheduler that ends when it takes the result of the grammar's thread."""
    value, _ = Grammars().get_cached_or_future_value(("structural_tag", "{}"), False)
    invalid = value.result()
    assert isinstance(invalid, InvalidGrammarObject) and "format" in invalid.error_message


class Bits:
    """A grammar like xgrammar's: a bit for each of 40 allowed tokens."""

    finished = False

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed

    def is_terminated(self) -> bool:
        return False

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str) -> torch.Tensor:
        return torch.full((batch_size, 2), -1, dtype=torch.int32)

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        vocab_mask[idx] = torch.tensor([self.allowed, 0])

    def move_vocab_mask(self, vocab_mask: torch.Tensor, device: str) -> torch.Tensor:
        return vocab_mask

    def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        """Do nothing: not used here."""


def test_a_grammar_that_allows_no_token() -> None:
    """Guards against a server that ends with one request whose grammar leads nowhere: fully masked
    logits have no probabilities, and the sampler raises. SGLang ends the request when the grammar
    refuses the drawn token."""
    batch = SamplingBatchInfo.__new__(SamplingBatchInfo)
    batch.grammars, batch.temperatures = [Bits(0), None, Bits(4)], torch.ones(3)
    batch.vocab_size, batch.device = 40, "cpu"
    batch.update_regex_vocab_mask()
    assert batch.vocab_mask.tolist() == [[-1, -1], [-1, -1], [4, 0]]
    batch.grammars = None
    batch.update_regex_vocab_mask()
    assert batch.vocab_mask is None


def test_a_mask_that_raises() -> None:
    """Guards against the same with llguidance, which raises for a grammar that allows no token,
    when its mask is queried and at the next token. SGLang ends the request then."""
    llguidance = pytest.importorskip("llguidance")
    from sglang.srt.constrained.llguidance_backend import GuidanceGrammar

    tokenizer = llguidance.LLTokenizer("byte")
    grammar = GuidanceGrammar(tokenizer, llguidance.grammar_from("ebnf", "root ::= root"))
    grammar.fill_vocab_mask(grammar.allocate_vocab_mask(tokenizer.vocab_size, 1, "cpu"), 0)
    with pytest.raises(ValueError, match="NoExtensionBias"):
        grammar.accept_token(65)
