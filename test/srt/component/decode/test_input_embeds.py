"""Requests with embeddings in the place of tokens, at SGLang's own tokenizer manager."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.patchset.compat import FLAG


def tokenize(*, flag: bool, radix_cache: bool) -> Any:
    """One request with embeddings; returns what the manager gives to be checked and sent."""
    manager: Any = TokenizerManager.__new__(TokenizerManager)
    manager.server_args = SimpleNamespace(
        disable_radix_cache=not radix_cache, disaggregation_decode_enable_radix_cache=flag
    )
    manager.mm_processor = None
    manager._validate_one_request = lambda obj, input_ids: None
    manager._create_tokenized_object = lambda obj, text, ids, input_embeds, *_: input_embeds
    return asyncio.run(manager._tokenize_one_request(GenerateReqInput(input_embeds=[[0.5, 0.25]])))


def test_refused_by_our_flag() -> None:
    """Guards against SGLang's advice to add ``--disable-radix-cache``, which the flag refuses."""
    with pytest.raises(ValueError, match=f"input_embeds .* {FLAG}.* without the flag"):
        tokenize(flag=True, radix_cache=True)


def test_stock_without_the_flag() -> None:
    """Guards against a refusal, or another text, on a server that does not use the flag."""
    assert tokenize(flag=False, radix_cache=False) == [[0.5, 0.25]]
    with pytest.raises(ValueError, match="Please add `--disable-radix-cache`"):
        tokenize(flag=False, radix_cache=True)
