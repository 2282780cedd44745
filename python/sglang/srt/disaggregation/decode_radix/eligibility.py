"""Which requests may share KV through the decode tree."""

from __future__ import annotations

from typing import Any

_COMMITTED = "decode_kv_committed"


def is_fake(req: Any) -> bool:
    """A warm-up or health request: no KV ever arrives, its slots hold garbage.

    They really collide with prompts: warm-up uses the ids 10 to 13, health uses 0.
    """
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    return bool(req.bootstrap_host == FAKE_BOOTSTRAP_HOST or req.bootstrap_host is None)


def may_match(req: Any) -> bool:
    """Whether token ids (with ``extra_key``) say all about the KV of the prompt.

    With embeddings or images the ids are placeholders, and equal ids can mean other KV.
    """
    return not is_fake(req) and req.input_embeds is None and req.multimodal_inputs is None


def mark_committed(req: Any) -> None:
    """All KV of the prompt arrived, on all ranks."""
    setattr(req, _COMMITTED, True)


def may_insert(req: Any) -> bool:
    """Whether the request's KV may enter the tree: opt-in, only after a committed transfer."""
    return may_match(req) and getattr(req, _COMMITTED, False)
