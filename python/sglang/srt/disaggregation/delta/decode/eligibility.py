"""Which requests may share KV through the decode tree.

What a decode server with the radix cache says before a request reaches its scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sglang.srt.patchset.compat import FLAG

_COMMITTED = "decode_kv_committed"
_CONTENT_IN_IDS = "decode_content_in_ids"
_GENERATION = "decode_tree_generation"


def is_fake(req: Any) -> bool:
    """A warm-up or health request: no KV ever arrives, its slots hold garbage.

    They really collide with prompts: warm-up uses the ids 10 to 13, health uses 0.
    """
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    return bool(req.bootstrap_host == FAKE_BOOTSTRAP_HOST or req.bootstrap_host is None)


def may_match(req: Any) -> bool:
    """Whether token ids (with ``extra_key``) say all about the KV of the prompt.

    The ids of embeddings are placeholders. Those of images, audio and video are hashes of their
    content, which SGLang puts in before a request is queued.
    """
    return not is_fake(req) and req.input_embeds is None and _content_in_ids(req)


def _content_in_ids(req: Any) -> bool:
    """Whether each image's hash stands where the image does: a model may leave placeholders as is.

    Decided when the request is first looked at; SGLang drops the images of one that has ended.
    """
    known: bool | None = getattr(req, _CONTENT_IN_IDS, None)
    if known is None:
        items = req.multimodal_inputs.mm_items if req.multimodal_inputs is not None else ()
        known = all(_is_padded(req.origin_input_ids, item) for item in items)
        setattr(req, _CONTENT_IN_IDS, known)
    return known


def _is_padded(token_ids: Sequence[int], item: Any) -> bool:
    if not item.offsets:  # some models say only how many tokens an image has
        return item.pad_value in token_ids
    return all(list(token_ids[at : at + 1]) == [item.pad_value] for at, _ in item.offsets)


def mark_committed(req: Any) -> None:
    """All KV of the prompt arrived, on all ranks."""
    setattr(req, _COMMITTED, True)


def may_insert(req: Any) -> bool:
    """Whether the request's KV may enter the tree: opt-in, only after a committed transfer."""
    return may_match(req) and getattr(req, _COMMITTED, False)


def stamp(req: Any, generation: int) -> None:
    """Note which generation of the tree a new request meets; see ``DecodeRadixTree.generation``."""
    setattr(req, _GENERATION, generation)


def generation_of(req: Any) -> int:
    """The generation in which ``req`` arrived; without a stamp, the first."""
    return int(getattr(req, _GENERATION, 0))


if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
else:
    TokenizerManager = object


class RadixTokenizer(TokenizerManager):
    """Names our flag where SGLang advises ``--disable-radix-cache``, which the flag refuses."""

    @override
    async def _tokenize_one_request(self, obj: Any) -> Any:
        wanted = getattr(self.server_args, "disaggregation_decode_enable_radix_cache", False)
        if wanted and obj.input_embeds is not None:
            raise ValueError(
                f"input_embeds cannot be served by a decode server with {FLAG}: SGLang takes them "
                "only where no radix cache is. Send them to a decode server without the flag, and "
                "to a prefill server with --disable-radix-cache."
            )
        return await super()._tokenize_one_request(obj)
