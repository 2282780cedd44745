"""Parallel samples (``n`` above 1): each request that SGLang makes of one gets a room of its own.

SGLang's tokenizer first sends the prompt alone, so that the samples find its KV, and then each
sample. All of them carry the number of the client's room. Here the prompt keeps that number, and
the samples get numbers that follow from it by one rule, which both servers of a pair apply.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any  # Any: SGLang's requests, before and after the tokenizer

from typing_extensions import override

from sglang.srt.disaggregation.delta.capability import fetch_capabilities

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
else:
    TokenizerManager = object

#: A room has 63 bits; the number of a sample is in the upper ones, so that a data-parallel rank,
#: which follows from the lower ones, is the same for all samples of a prompt where the number of
#: ranks is a power of two.
_SHIFT = 47
MOST_SAMPLES = 2 ** (63 - _SHIFT) - 1


def room_of_sample(room: int, index: int) -> int:
    """The room of a prompt (``index`` 0) or of its sample ``index``, from the client's ``room``."""
    return room ^ (index << _SHIFT)


class SamplesTokenizer(TokenizerManager):
    """Numbers the rooms of parallel samples. Stock for requests without a room."""

    @override
    async def _tokenize_one_request(self, obj: Any) -> Any:
        in_a_pair = getattr(obj, "bootstrap_room", None) is not None  # embeddings have none
        samples = (obj.sampling_params or {}).get("n", 1) if in_a_pair else 1
        if samples > 1:
            await self._check_samples(obj, samples)
        tokenized = await super()._tokenize_one_request(obj)
        if samples > 1:
            tokenized.sample_indices = itertools.count()  # shared by the copies that are sent
        return tokenized

    async def _check_samples(self, obj: Any, samples: int) -> None:
        """Refuse what the pair cannot serve.

        Raises:
            ValueError: the client gets status 400.
        """
        if samples > MOST_SAMPLES:
            raise ValueError(f"n is {samples}; a pair serves {MOST_SAMPLES} samples at most")
        if self.server_args.disaggregation_mode != "decode":
            return
        address = f"{obj.bootstrap_host}:{obj.bootstrap_port}"
        prefill = await asyncio.to_thread(fetch_capabilities, address)
        if prefill is not None and not prefill.samples:
            raise ValueError(
                f"n is {samples}, and prefill server {address} gives all samples of a request one "
                "room: it runs without this package, or with an older version of it"
            )

    @override
    def _send_one_request(self, tokenized_obj: Any) -> Any:
        indices = vars(tokenized_obj).pop("sample_indices", None)
        if indices is not None:
            room = room_of_sample(tokenized_obj.bootstrap_room, next(indices))
            tokenized_obj.bootstrap_room = room
            # What decode says of a room is looked up there.
            self.rid_to_state[tokenized_obj.rid].obj.bootstrap_room = room
        return super()._send_one_request(tokenized_obj)
