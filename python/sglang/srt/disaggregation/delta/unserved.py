"""Checks of requests in the tokenizer of a pair, and rooms of parallel samples.

Requests that cannot be served are answered at once, because SGLang would raise in the scheduler and
end the server: clients may send anything, and a router's room and prefill address are dropped when
SGLang builds a request of a session (``session_params``).

For parallel samples (``n`` above 1), SGLang's tokenizer first sends the prompt alone, so that the
samples find its KV, and then each sample, all with the client's room. Here the prompt keeps that
room, and each sample gets a room derived from it by a rule that both servers of a pair apply.

Contract: the tokenizer's event loop, except ``PairOutput``, ``CheckedGrammars``, ``GuidedMask`` and
``MaskedBatch``, which run in the scheduler.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any  # Any: SGLang's requests before and after tokenization

from typing_extensions import override

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.disaggregation.delta.wire import fetch_capabilities
from sglang.srt.patchset.flags import wants_buffer_only

if TYPE_CHECKING:
    import torch

    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
    from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
else:
    BaseGrammarBackend = GuidanceGrammar = SamplingBatchInfo = TokenizerManager = object
    SchedulerOutputProcessorMixin = object

#: Maximum room number in SGLang's metadata buffers (more raises, although they have 64 unsigned
#: bits).
_MAX_ROOM = 2**63 - 1
#: Maximum top log probabilities of the first token in these buffers.
_MAX_TOP_LOGPROBS = 128

#: Position of the sample's index in the 63 bits of a room: the upper bits, because the
#: data-parallel rank is derived from the lower ones. So all samples of a prompt have the same rank,
#: if the number of ranks is a power of two.
_SHIFT = 47
#: Maximum samples of one prompt. Fewer than the 65,535 possible ones, because those would fill the
#: queues of both servers, which check only 128 requests per step for aborts.
MAX_SAMPLES = 1024

#: Type and bounds of numbers that SGLang's kernels and tensors accept. SGLang takes the sampling
#: parameters of ``/generate`` unchecked, but for some bounds.
_SAMPLING: dict[str, tuple[type, float, float]] = {
    "temperature": (Real, 0, 1e30),
    "top_p": (Real, 0, 1),
    "min_p": (Real, 0, 1),
    "frequency_penalty": (Real, -2, 2),
    "presence_penalty": (Real, -2, 2),
    "repetition_penalty": (Real, 1e-6, 2),  # logits are divided by it
    "top_k": (Integral, -1, 2**31 - 1),
    "max_new_tokens": (Integral, 0, 2**31 - 1),
    "min_new_tokens": (Integral, 0, 2**31 - 1),
    "stream_interval": (Integral, 0, 2**31 - 1),
    "sampling_seed": (Integral, -(2**63), 2**63 - 1),
}
_SWITCHES = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
#: Sampling parameters for which a scheduler needs its tokenizer.
_TEXT = ("stop", "stop_regex", "min_new_tokens")
_MAX_BIAS = 1e30  # finite in 32 bits, also after division by a temperature


class PairTokenizer(TokenizerManager):
    """Refuses requests that would raise in a scheduler and end it, on both servers of a pair, and
    numbers the rooms of parallel samples. SGLang answers a ``ValueError`` with status 400. Other
    servers check nothing, except that those with ``buffer_only`` check token ids, because they hash
    them into keys. On all servers, a request releases its state, id and LoRA adapter at its end,
    for every reason of the end."""

    @override
    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        # Copy the parameters, because their identity marks this request's states below, and callers
        # of an Engine may share them.
        params = obj.sampling_params
        obj.sampling_params = (
            [*map(copy.copy, params)] if isinstance(params, list) else copy.copy(params)
        )
        if self.server_args.disaggregation_mode != "null":
            check_request(obj, request)
        try:
            async for response in super().generate_request(obj, request):
                yield response
        finally:
            # SGLang keeps the state of a refused request, and of a prompt with samples, for which a
            # terminating server waits. When a client disconnects, SGLang aborts the ids of ``obj``,
            # which are not those of its samples.
            has_samples = getattr(obj, "parallel_sample_num", 1) != 1
            params_ids = {id(obj.sampling_params), *map(id, _listed(obj.sampling_params))}
            remaining = {
                rid: state
                for rid in (list(self.rid_to_state) if has_samples else _listed(obj.rid))
                # Compare the parameters, because a request is refused if its id is in use.
                if (state := self.rid_to_state.get(rid))
                and id(state.obj.sampling_params) in params_ids
            }
            for rid, state in remaining.items():
                if not is_sent(state):
                    del self.rid_to_state[rid]
                elif has_samples:
                    self.abort_request(rid)
            if hasattr(obj, "adapters"):
                asyncio.create_task(self._release(obj.adapters, remaining))

    async def _release(self, adapters: Any, remaining: dict[str, Any]) -> None:
        """Release LoRA ``adapters`` when the schedulers have ended the requests ``remaining``."""
        while any(self.rid_to_state.get(rid) is state for rid, state in remaining.items()):
            await asyncio.sleep(0.1)
        await self.lora_registry.release(adapters)

    @override
    async def _validate_and_resolve_lora(self, obj: Any) -> None:
        await super()._validate_and_resolve_lora(obj)
        if obj.lora_path:
            # Hide the path, because SGLang releases an adapter with a path never, once or twice,
            # depending on how a request ends. ``generate_request`` releases it.
            obj.adapters, obj.lora_path = obj.lora_id, None

    @override
    def _handle_abort_req(self, recv_obj: AbortReq) -> None:
        # SGLang raises if the request has ended, and otherwise keeps its state.
        if recv_obj.rid in self.rid_to_state:
            super()._handle_abort_req(recv_obj)
            self.rid_to_state.pop(recv_obj.rid, None)

    @override
    async def _tokenize_one_request(self, obj: Any) -> Any:
        room = getattr(obj, "bootstrap_room", None)  # embeddings have none
        samples = 1 if room is None else obj.sampling_params.get("n", 1)
        if samples > 1 and self.server_args.disaggregation_mode == "decode":
            await check_samples(f"{obj.bootstrap_host}:{obj.bootstrap_port}", samples)
        tokenized = await super()._tokenize_one_request(obj)
        if samples > 1:
            tokenized.sample_indices = itertools.count()  # shared by the copies that are sent
        return tokenized

    @override
    def _create_tokenized_object(
        self,
        obj: Any,
        input_text: str,
        input_ids: list[int],
        input_embeds: Any = None,
        mm_inputs: Any = None,
        token_type_ids: list[int] | None = None,
    ) -> Any:
        try:
            is_pair = self.server_args.disaggregation_mode != "null"
            has_other_input = mm_inputs is not None or input_embeds is not None
            if is_pair or wants_buffer_only(self.server_args):
                check_ids(obj, input_ids, has_other_input, self.model_config.vocab_size)
            if is_pair and hasattr(obj, "bootstrap_room"):
                check_values(obj, input_ids, has_other_input, self.model_config.vocab_size)
                allowed = self.server_args.tokenizer_metrics_allowed_custom_labels or ()
                unknown = sorted(set(obj.custom_labels or ()) - set(allowed))
                needs = [name for name in _TEXT if obj.sampling_params.get(name)]
                if needs and self.tokenizer is None:
                    raise ValueError(
                        f"{needs[0]} needs the tokenizer, which --skip-tokenizer-init leaves out"
                    )
                if unknown and self.enable_metrics:  # because they raise when answers are counted
                    raise ValueError(f"custom_labels has {unknown}: the server allows {allowed}")
            return super()._create_tokenized_object(
                obj, input_text, input_ids, input_embeds, mm_inputs, token_type_ids
            )
        except Exception as error:  # caused by the client's values
            raise ValueError(error) from error

    @override
    def _send_one_request(self, tokenized_obj: Any) -> Any:
        indices = vars(tokenized_obj).pop("sample_indices", None)
        if indices is not None:
            room = room_of_sample(tokenized_obj.bootstrap_room, next(indices))
            tokenized_obj.bootstrap_room = room
            # Decode's messages about a room are looked up by it.
            self.rid_to_state[tokenized_obj.rid].obj.bootstrap_room = room
        return super()._send_one_request(tokenized_obj)


class PairOutput(SchedulerOutputProcessorMixin):
    """Returns hidden states and routed experts for all requests of a batch if one asks for them.
    SGLang lists them only for the asking requests while its tokenizer reads an entry per request,
    so that requests got each other's entries and the tokenizer ended."""

    @override
    def stream_output_generation(
        self, reqs: Any, return_logprob: Any, skip_req: Any = None, is_idle_batch: Any = False
    ) -> None:
        added = [
            (req, name)
            for name in ("return_hidden_states", "return_routed_experts")
            if any(getattr(req, name) for req in reqs)
            for req in reqs
            if not getattr(req, name)
        ]
        try:
            for req, name in added:
                setattr(req, name, True)
            super().stream_output_generation(reqs, return_logprob, skip_req, is_idle_batch)
        finally:
            for req, name in added:
                setattr(req, name, False)


class CheckedGrammars(BaseGrammarBackend):
    """Turns an exception of a grammar library into the client's error; it would end SGLang's
    scheduler."""

    @override
    def _init_value_dispatch(self, key: tuple[str, str], require_reasoning: bool) -> Any:
        from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

        try:
            return super()._init_value_dispatch(key, require_reasoning)
        except Exception as error:
            return InvalidGrammarObject(repr(error))


class GuidedMask(GuidanceGrammar):
    """Ignores an error in filling a mask (the grammar allows no token), as other libraries do,
    because it would end the scheduler. SGLang ends the request at the next token."""

    @override
    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        with suppress(ValueError):
            super().fill_vocab_mask(vocab_mask, idx)


class MaskedBatch(SamplingBatchInfo):
    """Allows every token if a grammar allows none, because the sampler would raise for the whole
    batch on empty probabilities. The grammar then refuses the drawn token."""

    @override
    def update_regex_vocab_mask(self) -> None:
        super().update_regex_vocab_mask()
        # Only masks with a bit per allowed token; those of outlines have a truth value per
        # forbidden token.
        if self.vocab_mask is not None and self.vocab_mask.dtype.is_signed:
            self.vocab_mask.masked_fill_(~self.vocab_mask.any(-1, keepdim=True), -1)


class ExactId(str):
    """A request id that only an abort of the same id matches, because SGLang compares with
    ``startswith``, so that a short id would match many. Pickled as a plain string."""

    @override
    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        return self == prefix

    @override
    def __reduce__(self) -> Any:
        return str, (str(self),)


def named_by(recv_req: AbortReq) -> Callable[[Req], bool]:
    """Return a predicate: True if the abort names the request."""
    return lambda req: bool(recv_req.abort_all or req.rid == recv_req.rid)


def room_of_sample(room: int, index: int) -> int:
    """Return the room of a prompt (``index`` 0) or of its sample ``index``, given the client's
    ``room``."""
    return room ^ (index << _SHIFT)


async def check_samples(address: str, samples: int) -> None:
    """Check that the prefill server at ``address`` (host:port) numbers samples by the same rule.

    Raises:
        ValueError: the client gets status 400.
    """
    prefill = await asyncio.to_thread(fetch_capabilities, address)
    if prefill is not None and not prefill.samples:
        raise ValueError(
            f"n is {samples}, and prefill server {address} gives all samples of a request one "
            "room: it runs without this package or with an older version of it"
        )


def is_sent(state: Any) -> bool:
    """Return True if the request was sent to the schedulers, by the tokenizer's statistics."""
    return bool(state.time_stats.api_server_dispatch_finish_time)


def check_number(name: str, value: Any, number: Any, low: float, high: float) -> None:
    """Check one number of a client.

    Raises:
        ValueError: ``value`` is not a ``number`` (``Integral`` or ``Real``) from ``low`` to
            ``high``.
    """
    if not (isinstance(value, number) and low <= value <= high):
        kind = "an integer" if number is Integral else "a number"
        raise ValueError(f"{name} is {value!r}: it must be {kind} from {low} to {high}")


def check_request(obj: Any, request: Any) -> None:
    """Check the lists and ids of a client's request, and the fields that only SGLang may set.

    Args:
        request: the HTTP request. A health check, which has a reserved id, is a GET.

    Raises:
        ValueError: the client gets status 400.
    """
    for params in _listed(obj.sampling_params):
        if not isinstance(params, dict):
            raise ValueError(f"sampling_params is {params!r}: it must be an object")
        # SGLang expands all fields to lists of this length.
        check_number("n", params.get("n", 1), Integral, 1, MAX_SAMPLES)
    batch = copy.copy(obj)
    try:
        batch.normalize_batch_and_arguments()
        if not batch.is_single:
            # Build the last request, because SGLang would fail on it after sending earlier ones.
            batch[max(batch.batch_size, len(batch.rid)) - 1]
    except (AssertionError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"the request cannot be split into its prompts: {error!r}. A list needs an entry for "
            "each prompt, or sample of it"
        ) from error
    wrong = [
        *(
            f"{name} is {values!r}: a list needs a list of prompts"
            for name in ("rid", "sampling_params")
            if isinstance(values := getattr(obj, name), list) and batch.is_single
        ),
        *(
            f"rid is {rid!r}: it must be a text that is not empty and does not begin with "
            f"{HEALTH_CHECK_RID_PREFIX}"
            for rid in _listed(obj.rid)
            if not (isinstance(rid, str) and rid)
            or (rid.startswith(HEALTH_CHECK_RID_PREFIX) and getattr(request, "method", "") != "GET")
        ),
        *(
            f"{name} is set: only the server may do that"
            for name in ("lora_id", "need_wait_for_mm_inputs", "num_items_assigned")
            if getattr(obj, name, None) is not None
        ),
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def check_ids(obj: Any, input_ids: Any, has_other_input: bool, vocabulary: int) -> None:
    """Check the token ids of ``obj``, because an id outside of the vocabulary ends the server in
    the model or the tree.

    Args:
        input_ids: the tokenized prompt.
        has_other_input: the prompt has images, sounds or embeddings. A multimodal processor inserts
            its own ids.

    Raises:
        ValueError: an id is not an integer, is negative, or is outside of the vocabulary.
    """
    ids = {
        "input_ids": (obj.input_ids, 2**31) if has_other_input else (input_ids, vocabulary),
        # Because min_new_tokens of one request masks the stop ids of the whole batch.
        "stop_token_ids": (obj.sampling_params.get("stop_token_ids"), vocabulary),
        "token_ids_logprob": (getattr(obj, "token_ids_logprob", None), vocabulary),
    }
    for name, (values, bound) in ids.items():
        is_integers = all(issubclass(kind, Integral) for kind in set(map(type, values or ())))
        if values and not (is_integers and min(values) >= 0 and max(values) < bound):
            wrong = next(i for i in values if not (isinstance(i, Integral) and 0 <= int(i) < bound))
            raise ValueError(
                f"{name} has {wrong!r}, which is not a token of the model: ids are 0 to {bound - 1}"
            )


def check_values(obj: Any, input_ids: Any, has_other_input: bool, vocabulary: int) -> None:
    """Check all values of the client's request ``obj``. Called before SGLang's own checks, which
    raise on unexpected types.

    Args:
        input_ids: the tokenized prompt.
        has_other_input: the prompt has images, sounds or embeddings.
        vocabulary: number of token ids of the model.

    Raises:
        ValueError: SGLang's scheduler or the model would raise on a value.
    """
    params = obj.sampling_params
    if not (input_ids or has_other_input):
        raise ValueError("input_ids is empty: a prompt needs at least one token")
    # Because SGLang builds a session's request without the prefill address.
    if obj.session_params or (obj.bootstrap_room is not None and obj.bootstrap_host is None):
        raise ValueError(
            "bootstrap_room needs bootstrap_host: a PD router sets both. Sessions (session_params) "
            "are not supported with disaggregation"
        )
    bias = params.get("logit_bias")
    max_top_logprobs = _MAX_TOP_LOGPROBS if obj.return_logprob else vocabulary
    typed: list[tuple[str, Any, type]] = [
        ("bootstrap_host", obj.bootstrap_host, str),  # SGLang also accepts lists
        ("bootstrap_port", obj.bootstrap_port, int),
        *((kind, params.get(kind), str) for kind in ("json_schema", "regex", "ebnf")),
        ("structural_tag", params.get("structural_tag"), str),
        ("extra_key", obj.extra_key, str),
        ("rid", obj.rid, str),
        ("custom_params", params.get("custom_params"), dict),
        ("logit_bias", bias, dict),
        *(("custom_labels", label, str) for label in (obj.custom_labels or {}).values()),
        *(("stop", stop, str) for stop in _listed(params.get("stop"))),
        *(("stop_regex", stop, str) for stop in _listed(params.get("stop_regex"))),
        *((name, params.get(name, True), bool) for name in _SWITCHES),
    ]
    for name, value, kind in typed:
        if not isinstance(value, kind) and (value is not None or kind is bool):
            raise ValueError(f"{name} is {value!r}: it must be a {kind.__name__}")
        # Because xgrammar ends the process at a null character.
        text = str(value).replace("\0", "").encode(errors="ignore").decode()
        if kind is str and value is not None and text != value:
            raise ValueError(
                f"{name} is {value!r}: it contains a null character or an unpaired surrogate"
            )
    for stop in _listed(params.get("stop_regex")):
        # Compiled here, because SGLang compiles it in the scheduler, after a weaker check.
        re.compile(stop)
    if params.get("json_schema") not in (None, "$$ANY$$"):
        # Parsed here, because xgrammar's parser ends the process at deep nesting.
        json.loads(params["json_schema"])
    if params.get("structural_tag") == "":  # SGLang treats it as absent
        raise ValueError("structural_tag is empty")
    numbers: list[tuple[str, Any, Any, float, float]] = [
        ("bootstrap_room", obj.bootstrap_room, Integral, 0, _MAX_ROOM),
        ("disagg_prefill_dp_rank", obj.disagg_prefill_dp_rank, Integral, 0, 2**31 - 1),
        ("top_logprobs_num", obj.top_logprobs_num, Integral, 0, max_top_logprobs),
        ("logprob_start_len", obj.logprob_start_len, Integral, -1, 2**31 - 1),
        *((name, params.get(name), *bounds) for name, bounds in _SAMPLING.items()),
    ]
    for row in numbers:
        if row[1] is not None:
            check_number(*row)
    for token, weight in (bias or {}).items():
        check_number(f"logit_bias of {token}", weight, Real, -_MAX_BIAS, _MAX_BIAS)


def _listed(values: Any) -> list[Any]:
    """Return ``values`` as a list; SGLang accepts a single value for a list of one."""
    return values if isinstance(values, list) else [] if values is None else [values]
