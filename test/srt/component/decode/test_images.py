"""Prompts with images: their placeholders carry the content, so equal images hit and others do not.

Requests come in through SGLang's own ``Scheduler.handle_generate_request``, with its own padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from component.decode.decoder import Decoder
from component.decode.steps import finish
from sglang.srt.disaggregation.utils import TransferBackend
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.mm_utils import (
    MultiModalityDataPaddingPatternMultimodalTokens,
    MultiModalityDataPaddingPatternTokenPairs,
)
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
from sglang.srt.sampling.sampling_params import SamplingParams

IMAGE_TOKEN = 51
#: Tokens of an image: two pages.
SIZE = 32
BEFORE, BETWEEN, AFTER = list(range(1, 33)), [40] * 16, [41] * 16

Pad = Callable[[list[int], Any], list[int]]


def image(seed: int) -> torch.Tensor:
    """Return pixels in a processor's output format."""
    return torch.randn(SIZE, 12, generator=torch.Generator().manual_seed(seed))


CAT, DOG = image(1), image(2)


def receive(decoder: Decoder, *parts: list[int] | torch.Tensor, new: int = 1) -> Any:
    """Receive a request of text and images from the tokenizer; return it, queued."""
    input_ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, list):
            input_ids += part
            continue
        start = len(input_ids)
        input_ids += [IMAGE_TOKEN] * SIZE
        offsets = [(start, len(input_ids) - 1)]
        # A separate feature for each request, as from its own HTTP body.
        items.append(
            MultimodalDataItem(modality=Modality.IMAGE, feature=part.clone(), offsets=offsets)
        )
    number = len(decoder.submitted)
    params = SamplingParams(max_new_tokens=new)
    params.normalize(None)
    decoder.handle_generate_request(
        TokenizedGenerateReqInput(
            rid=f"r{number:05d}",
            input_text="",
            input_ids=input_ids,
            mm_inputs=MultimodalProcessorOutput(mm_items=items, im_token_id=IMAGE_TOKEN),
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=[],
            stream=False,
            bootstrap_host="10.0.0.1",
            bootstrap_port=8998,
            bootstrap_room=1000 + number,
            time_stats=APIServerReqTimeStats(),
        )
    )
    return decoder.submitted[-1]


def build(pad: Pad | None) -> Decoder:
    """Return a decode server of a model that pads with ``pad``."""
    decoder = Decoder(16, 1024)
    decoder.__dict__.update(
        pad_input_ids_func=pad,
        tokenizer=None,
        metrics_collector=None,
        dllm_config=None,
        _mm_processor=None,
        transfer_backend=TransferBackend.NIXL,
        max_req_len=1000,
        max_req_input_len=999,
    )
    decoder.model_config.hf_eos_token_id = set()
    decoder.grammar_manager.process_req_with_grammar = lambda req: False
    # Omits two parts of SGLang's ``add``: the receiver, and the query for its topology.
    queue, add = decoder.disagg_decode_prealloc_queue, decoder.disagg_decode_prealloc_queue.add
    queue.add = lambda req, is_retracted=False: (
        add(req, is_retracted=True) if is_retracted else decoder.enqueue(req)
    )
    return decoder


PAD: Pad = MultiModalityDataPaddingPatternMultimodalTokens().pad_input_tokens


@pytest.fixture
def decoder() -> Decoder:
    """A decode server of a model with the padding of nearly all of SGLang's models."""
    return build(PAD)


def prefix(decoder: Decoder, *parts: list[int] | torch.Tensor) -> int:
    """Return the number of a prompt's tokens that are not moved, because the tree has them."""
    req = receive(decoder, *parts)
    decoder.tick_queues()
    found = int(decoder.room(req).prefix_len)
    finish(decoder)
    return found


PLACEHOLDERS = [IMAGE_TOKEN] * SIZE
HEAD = len(BEFORE)
WHOLE = HEAD + SIZE + len(AFTER)


@pytest.mark.hazard("tenants-share")
@pytest.mark.parametrize(
    "prompts",
    [
        # A conversation about an image moves its KV once; the next turn adds another image.
        [
            ([BEFORE, CAT, AFTER], 0),
            ([BEFORE, CAT, AFTER], WHOLE),
            ([BEFORE, CAT, AFTER, BETWEEN, DOG], WHOLE),
        ],
        # Another user's image, and placeholders that are only text.
        [
            ([BEFORE, CAT, AFTER], 0),
            ([BEFORE, DOG, AFTER], HEAD),
            ([BEFORE, PLACEHOLDERS, AFTER], HEAD),
        ],
        # The same images at other places.
        [
            ([BEFORE, CAT, BETWEEN, DOG, AFTER], 0),
            ([BEFORE, DOG, BETWEEN, CAT, AFTER], HEAD),
            ([BEFORE, CAT, BETWEEN, CAT, AFTER], HEAD + SIZE + len(BETWEEN)),
        ],
    ],
    ids=["same", "other", "places"],
)
def test_what_prompts_with_images_share(decoder: Decoder, prompts: list[Any]) -> None:
    """Guards against an answer about another user's image, and against an image whose KV moves
    again at every turn: expected are the tree's tokens of each prompt in turn."""
    assert [prefix(decoder, *parts) for parts, _ in prompts] == [hit for _, hit in prompts]


def test_between_a_pair_of_tokens() -> None:
    """Guards against missing hits with a model that marks an image by the tokens around it."""
    pairs = MultiModalityDataPaddingPatternTokenPairs([(52, 53)])
    decoder = build(pairs.pad_input_tokens)
    begin, end = [*BEFORE[:-1], 52], [53, *AFTER[:-1]]
    assert prefix(decoder, begin, CAT, end) == 0
    assert prefix(decoder, begin, CAT, end) == len(begin) + SIZE + len(end)
    assert prefix(decoder, begin, DOG, end) == len(begin)


def left_alone(input_ids: list[int], inputs: Any) -> list[int]:
    """Return ids unchanged, as SGLang's pattern of token pairs does if the pairs do not match."""
    return input_ids


def only_the_first(input_ids: list[int], inputs: Any) -> list[int]:
    """Pad only the first image."""
    padded = list(input_ids)
    start, end = inputs.mm_items[0].offsets[0]
    padded[start : end + 1] = [inputs.mm_items[0].pad_value] * (end + 1 - start)
    return padded


@pytest.mark.hazard("tenants-share")
@pytest.mark.parametrize("pad", [None, left_alone, only_the_first])
def test_placeholders_without_content_never_share(pad: Pad | None) -> None:
    """Guards against a model that does not pad, or a prompt that it leaves unchanged: equal ids may
    then be two images. Neither a hit nor an insertion is allowed, even after SGLang has removed the
    images of an ended request."""
    decoder = build(pad)
    for second in (DOG, CAT):
        assert prefix(decoder, BEFORE, CAT, BETWEEN, second, AFTER) == 0
        for req in decoder.submitted:
            req.multimodal_inputs = None
    assert decoder.tree_cache.total_size() == 0


def test_unhashed_images_never_share(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against hits if the operator has disabled content hashes."""
    monkeypatch.setenv("SGLANG_MM_SKIP_COMPUTE_HASH", "1")
    assert prefix(decoder, BEFORE, CAT, AFTER) == 0
    assert prefix(decoder, BEFORE, CAT, AFTER) == len(BEFORE)
