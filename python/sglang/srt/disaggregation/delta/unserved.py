"""Requests that a pair cannot serve: answered at once, where SGLang would raise and end the server.

A router gives each request of a pair the number of its room and the address of its prefill server.
SGLang drops both where it builds a request of a session (``session_params``); and a client may send
anything.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any  # Any: SGLang's scheduler and request, of either side

from typing_extensions import override

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
else:
    TokenizerManager = object

logger = logging.getLogger(__name__)

#: What SGLang's metadata buffers take as the number of a room (more raises, although they have 64
#: bits without a sign), and how many top log probabilities of the first token they hold.
_ROOMS, _MOST_TOP_LOGPROBS = 2**63, 128

#: What a number may be for SGLang's kernels and tensors: its type, and its bounds. SGLang takes the
#: sampling parameters of ``/generate`` as they are, and checks some bounds of some of them.
_SAMPLING: dict[str, tuple[type, float, float]] = {
    "temperature": (Real, 0, 1e30),
    "repetition_penalty": (Real, 1e-6, 2),  # logits are divided by it
    "top_k": (Integral, 1, 2**31 - 1),
    "max_new_tokens": (Integral, 0, 2**31 - 1),
    "min_new_tokens": (Integral, 0, 2**31 - 1),
    "stream_interval": (Integral, 0, 2**31 - 1),
    "sampling_seed": (Integral, -(2**63), 2**63 - 1),
    "ignore_eos": (Integral, 0, 1),
    "skip_special_tokens": (Integral, 0, 1),
    "spaces_between_special_tokens": (Integral, 0, 1),
    "no_stop_trim": (Integral, 0, 1),
}
_MOST_BIAS = 1e30  # finite in 32 bits, also when a temperature divides it


class CheckedTokenizer(TokenizerManager):
    """Refuses what would raise in a scheduler and end it, on both servers of a pair, before it is
    sent to one. SGLang makes status 400 of a ``ValueError`` here."""

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
        tokenized = super()._create_tokenized_object(
            obj, input_text, input_ids, input_embeds, mm_inputs, token_type_ids
        )
        if self.server_args.disaggregation_mode != "null" and hasattr(tokenized, "bootstrap_room"):
            check_values(tokenized, self.model_config.vocab_size)
        return tokenized


def check_values(request: Any, vocabulary: int) -> None:
    """Look at all that a client gave for ``request``, which SGLang has tokenized.

    Raises:
        ValueError: a value that SGLang's scheduler or the model would raise at.
    """
    params = request.sampling_params
    if not (request.input_ids or request.mm_inputs or request.input_embeds):
        raise ValueError("input_ids is empty: a prompt has one token at least")
    ids = {
        # A multimodal processor puts ids of its own between the client's.
        "input_ids": request.input_ids if request.mm_inputs is None else (),
        # Others are compared only: an id that is no token stops nothing.
        "stop_token_ids": params.stop_token_ids if params.min_new_tokens else (),
        "token_ids_logprob": request.token_ids_logprob,
    }
    for name, values in ids.items():
        whole = all(issubclass(kind, Integral) for kind in set(map(type, values or ())))
        if values and not (whole and min(values) >= 0 and max(values) < vocabulary):
            wrong = next(
                i for i in values if not (isinstance(i, Integral) and 0 <= int(i) < vocabulary)
            )
            raise ValueError(
                f"{name} has {wrong!r}, which is no token of the model: ids are 0 to "
                f"{vocabulary - 1}"
            )
    numbers: list[tuple[str, Any, Any, float, float]] = [
        (name, getattr(params, name), *bounds) for name, bounds in _SAMPLING.items()
    ]
    numbers += [
        ("top_logprobs_num", request.top_logprobs_num, Integral, 0, vocabulary),
        ("logprob_start_len", request.logprob_start_len, Integral, -1, 2**31 - 1),
    ]
    bias = {} if params.logit_bias is None else params.logit_bias
    others: list[tuple[str, Any, type]] = [
        ("json_schema", params.json_schema, str),
        ("regex", params.regex, str),
        ("ebnf", params.ebnf, str),
        ("structural_tag", params.structural_tag, str),
        ("extra_key", request.extra_key, str),
        ("rid", request.rid, str),
        ("custom_params", params.custom_params, dict),
        ("logit_bias", bias, dict),
    ]
    for name, value, kind in others:
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r}: it has to be a {kind.__name__}")
        if isinstance(value, str) and value.encode(errors="ignore").decode() != value:
            raise ValueError(f"{name} is {value!r}: it has a half of a surrogate pair")
    numbers += [(f"logit_bias of {i}", bias[i], Real, -_MOST_BIAS, _MOST_BIAS) for i in bias]
    for name, value, number, low, high in numbers:
        if value is not None and not (isinstance(value, number) and low <= value <= high):
            kinds = {Integral: "an integer", Real: "a number"}
            raise ValueError(
                f"{name} is {value!r}: it has to be {kinds[number]} from {low} to {high}"
            )


def why_unserved(req: Any, *, on_decode: bool = False) -> str | None:
    """Why a pair cannot serve ``req``; None if it can."""
    room, host, port = req.bootstrap_room, req.bootstrap_host, req.bootstrap_port
    has_room = isinstance(room, int) and 0 <= room < _ROOMS
    has_prefill = isinstance(host, str) and isinstance(port, int)  # SGLang takes lists, too
    if not has_room or (on_decode and not has_prefill):
        return (
            f"it has no room of a prefill and a decode server (bootstrap_host={host}, "
            f"bootstrap_port={port}, bootstrap_room={room}): send it through a router. Sessions "
            "(session_params) are not served by a pair"
        )
    if req.return_logprob and (req.top_logprobs_num or 0) > _MOST_TOP_LOGPROBS:
        return (
            f"prefill sends {_MOST_TOP_LOGPROBS} top log probabilities of the first token at most, "
            f"and top_logprobs_num is {req.top_logprobs_num}"
        )
    return None


def refuse(scheduler: Any, req: Any, why: str) -> None:
    """Answer a request that is not served with status 400."""
    from sglang.srt.disaggregation.utils import prepare_abort

    message = f"Request {req.rid} is not served: {why}"
    logger.warning(message)
    prepare_abort(req, message, status_code=HTTPStatus.BAD_REQUEST)
    req.finished_reason = req.to_finish or req.finished_reason  # what SGLang found is said instead
    scheduler.stream_output([req], req.return_logprob)
