"""The index cache of sparse attention (DSA: DeepSeek V3.2, GLM-5), which lies beside the KV.

An index page has the number of a KV page, and the index of the same tokens: where a page is shared,
moved or given back, so is its index. What SGLang calls the *state* of such a model is that index;
other models' state (sliding window, state space) has slots of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache


#: Where SGLang's pools have it: a list of the layers' buffers. Others lack the attribute.
ATTRIBUTE = "index_k_with_scale_buffer"


def index_buffers(pool: KVCache) -> Sequence[torch.Tensor]:
    """The index cache of each layer (pages, bytes of a page); none where ``pool`` has no index."""
    return getattr(pool, ATTRIBUTE, ())


def has_other_state(pool: KVCache) -> bool:
    """Whether ``pool`` has state that is not an index of its pages."""
    return hasattr(pool, "get_state_buf_infos") and not index_buffers(pool)


def copy_index(pool: KVCache, slots: torch.Tensor) -> list[torch.Tensor]:
    """The index of the tokens in ``slots`` (1-D, from the beginning of a page on) on the CPU: a
    tensor (pages, bytes of a page) for each layer.

    SGLang's own copy of a retracted request, ``NSATokenToKVPool.get_cpu_copy``, is that of latent
    KV and leaves the index out: who resumes would select tokens by the index of another text.
    """
    pages = _pages(pool, slots)
    return [buffer[pages].cpu() for buffer in index_buffers(pool)]


def load_index(
    pool: KVCache, copy: Sequence[torch.Tensor], slots: torch.Tensor, shared: int
) -> None:
    """Put what ``copy_index`` copied behind ``shared`` tokens, whole pages, into the pages of
    ``slots`` (1-D), which are whole pages too, but for the last."""
    pages = _pages(pool, slots)
    first = shared // pool.page_size
    for buffer, saved in zip(index_buffers(pool), copy, strict=True):
        buffer[pages] = saved[first : first + len(pages)].to(buffer.device)


def _pages(pool: KVCache, slots: torch.Tensor) -> torch.Tensor:
    return slots[:: pool.page_size].to(torch.int64) // pool.page_size
