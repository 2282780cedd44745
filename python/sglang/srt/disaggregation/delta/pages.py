"""Pages, KV heads, and state beside the KV: no engine and no transport.

Pages: of those that a prompt lies in only the last may be partly filled. The decode server holds
the first ``prefix`` tokens, a whole number of pages, so that both sides cut the prompt at the same
place; the *delta* is every page after it.

Heads: a rank keeps ``total // size`` KV heads of every token, or one where there are fewer heads
than ranks: then several ranks hold a replica of the same head. SGLang connects each decode rank to
the prefill ranks of its share: one prefill rank serves ``decode size // prefill size`` decode
ranks, or ``prefill size // decode size`` of them serve one decode rank. All that are connected
report completion, so every one has to be told what to send, also where that is nothing.

What SGLang calls the *state* of a model is one of two things here. Sparse attention (DSA: DeepSeek
V3.2, GLM-5) has an index cache beside the KV: an index page has the number of a KV page, and the
index of the same tokens. Where a page is shared, moved or freed, so is its index. Layers with a
recurrence (gated delta nets, Mamba: Qwen3-Next, Kimi-Linear, Nemotron-H) have a recurrent state of
fixed size instead of KV. It belongs to one request, at one length of its text: a state slot is
allocated and freed with the request's row, moved whole with the last page, and never shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any  # Any: what only pools with recurrent state have

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool

#: Page indices into a pool, 1-D.
Pages = npt.NDArray[np.int32]


def share_of_chunk(pages: Pages, part: slice, rank: int, size: int) -> tuple[Pages, slice]:
    """What ``rank`` of ``size`` ranks sends of a chunk that each of them has: its pages, and their
    place among the room's destination pages. ``part``: the place of the whole chunk.

    Shares follow one another and differ by a page at most. SGLang's own function cuts by the
    numbers of the pages, as if they were neighbours: what lies outside the range that begins with
    the lowest is sent by nobody.
    """
    base, more = divmod(len(pages), size)
    first = rank * base + min(rank, more)
    end = first + base + (rank < more)
    return pages[first:end], slice(part.start + first, part.start + end)


def page_indices(row: torch.Tensor, start: int, end: int, page: int) -> Pages:
    """Return the pages of tokens ``start`` to ``end`` of a request's row of token slots (1-D).

    ``start`` is at the beginning of a page. The slots are copied as they lie, so that the device's
    copy engine does it alone, and the host picks the first of each page: a step or a division on
    the device would be kernels on the scheduler's stream, behind all that is queued there.
    """
    slots: npt.NDArray[np.integer] = row[start:end].cpu().numpy()
    return (slots[::page] // page).astype(np.int32)


class DeltaMismatch(ValueError):
    """What decode announced does not fit the prompt that prefill holds. Fails the room."""


@dataclass(frozen=True)
class HeadSlice:
    """What one prefill rank sends of every token to one decode rank, in heads."""

    #: First head to send, counted from the first that the prefill rank holds.
    source_start: int
    #: Where it goes, counted from the first head that the decode rank holds.
    destination_start: int
    #: Heads to send; 0 where another replica sends them.
    count: int


def heads_of(rank: int, size: int, total: int) -> range:
    """The KV heads that ``rank`` of ``size`` holds, of ``total`` in the model.

    Raises:
        ValueError: there is no such rank, or the heads cannot be laid out evenly over the ranks.
    """
    if total < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size} cannot hold any of {total} KV heads")
    if max(total, size) % min(total, size):
        raise ValueError(f"{total} KV heads cannot be laid out evenly over {size} ranks")
    first = rank * total // size
    return range(first, first + max(1, total // size))


def sources_of(destination_rank: int, source_size: int, destination_size: int) -> range:
    """The prefill ranks that SGLang connects to a decode rank; each of them reports completion.

    Raises:
        ValueError: neither size divides the other, so that SGLang's mapping leaves ranks out.
    """
    small, large = sorted((source_size, destination_size))
    if small < 1 or large % small:
        raise ValueError(
            f"prefill ranks ({source_size}) and decode ranks ({destination_size}): one number "
            f"has to be a multiple of the other"
        )
    first = destination_rank * source_size // destination_size
    return range(first, first + max(1, source_size // destination_size))


def plan_heads(
    source_rank: int, source_size: int, destination_rank: int, destination_size: int, total: int
) -> HeadSlice:
    """What a prefill rank sends of every token to a decode rank that SGLang connected it to.

    Over all prefill ranks of one decode rank, each of its heads is sent exactly once: of replicas,
    the lowest connected rank sends.

    Raises:
        ValueError: the ranks are not connected, or ``heads_of`` or ``sources_of`` refuse the
            numbers.
    """
    ours = heads_of(source_rank, source_size, total)
    theirs = heads_of(destination_rank, destination_size, total)
    sources = sources_of(destination_rank, source_size, destination_size)
    if source_rank not in sources:
        raise ValueError(
            f"prefill rank {source_rank} of {source_size} is not connected to decode rank "
            f"{destination_rank} of {destination_size}"
        )
    first, end = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
    # Replicas are neighbours: ranks hold ranges that are equal or apart, in order.
    before = source_rank - 1
    if before in sources and heads_of(before, source_size, total) == ours:
        end = first
    return HeadSlice(first - ours.start, first - theirs.start, end - first)


def token_lens(
    *, page: int, source_item_len: int, destination_item_len: int, head_bytes: int, plan: HeadSlice
) -> tuple[int, int]:
    """Bytes of a token in a buffer on either side, from those of a page of ``page`` tokens.

    Raises:
        ValueError: the slice does not fit into a token.
    """
    source_token, destination_token = source_item_len // page, destination_item_len // page
    sides = (
        ("prefill", plan.source_start, source_token, source_item_len),
        ("decode", plan.destination_start, destination_token, destination_item_len),
    )
    for side, start, token, item_len in sides:
        if token * page != item_len or (start + plan.count) * head_bytes > token:
            raise ValueError(
                f"heads {start} to {start + plan.count} of {head_bytes} bytes do not fit into "
                f"{side}'s pages of {page} tokens and {item_len} bytes"
            )
    return source_token, destination_token


def of_one_shape(item_lens: Sequence[int], *, latent: bool) -> bool:
    """Whether all layers of a KV pool, and of the draft model's behind it, have heads alike.

    ``item_lens``: bytes of a page by buffer: keys of the target's layers, their values, then the
    same of the draft's layers. ``latent``: one buffer a layer (MLA). A draft of as many layers as
    the target looks like values of another size than keys; real ones have far fewer.
    """
    runs = [(size, len(list(run))) for size, run in groupby(item_lens)]
    if len(runs) <= 1:
        return True
    if latent or len(runs) % 2:
        return False
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    return len({(key[0], value[0]) for key, value in pairs}) == 1 and all(
        key[1] == value[1] for key, value in pairs
    )


# ---- state beside the KV ----

#: Attribute of SGLang's pools with an index: a list of the layers' buffers.
INDEX = "index_k_with_scale_buffer"
#: Attribute of SGLang's pools with recurrent state: the pool of states.
RECURRENT = "mamba_pool"
#: Values of ``KVArgs.state_type`` for them.
INDEX_TYPE, RECURRENT_TYPE = "nsa", "mamba"


def index_buffers(pool: KVCache) -> Sequence[torch.Tensor]:
    """Return the index cache of each layer (pages, bytes of a page); none if ``pool`` has none."""
    return getattr(pool, INDEX, ())


def has_other_state(pool: KVCache) -> bool:
    """True if ``pool`` has state that is neither an index of its pages nor recurrent."""
    return hasattr(pool, "get_state_buf_infos") and not (
        index_buffers(pool) or hasattr(pool, RECURRENT)
    )


def moved_state(
    pool: KVCache, rows: ReqToTokenPool, req: Req, delta: Callable[[], Pages]
) -> Pages | None:
    """Return the indices of the state that is moved with the last page of ``req``, or None.

    ``delta`` returns the pages that are moved for ``req``. An index is moved for these pages only,
    so a full hit moves none. Recurrent state is moved whole, for a full hit too.
    """
    if hasattr(pool, RECURRENT):
        # Copied as it lies, for the reason that ``page_indices`` gives.
        return _state_slot(rows, req).cpu().numpy().astype(np.int32)
    pages = delta() if index_buffers(pool) else None
    return pages if pages is not None and len(pages) else None


def copy_state(
    pool: KVCache, rows: ReqToTokenPool, req: Req, slots: torch.Tensor
) -> list[torch.Tensor] | None:
    """Return a CPU copy of the state of ``req``, whose tokens are in ``slots`` (1-D, from the
    beginning of a page on); None if there is no state.

    SGLang's copy of a retracted request has its KV only. A resumed request would select tokens by
    the index of another text, or continue from the state of another request.
    """
    if hasattr(pool, RECURRENT):
        slot = _state_slot(rows, req).long()
        return [part[:, slot].cpu() for part in _state_parts(pool)]
    pages = _pages(pool, slots)
    return [buffer[pages].cpu() for buffer in index_buffers(pool)] or None


def load_state(
    pool: KVCache, rows: ReqToTokenPool, req: Req, copy: Sequence[torch.Tensor],
    slots: torch.Tensor, shared: int,
) -> None:  # fmt: skip
    """Load the result of ``copy_state``. For an index: the part behind ``shared`` tokens (whole
    pages), into the pages of ``slots`` (1-D, whole pages, except the last)."""
    if hasattr(pool, RECURRENT):
        slot = _state_slot(rows, req).long()
        for part, saved in zip(_state_parts(pool), copy, strict=True):
            part[:, slot] = saved.to(part.device)
        return
    pages = _pages(pool, slots)
    first = shared // pool.page_size
    for buffer, saved in zip(index_buffers(pool), copy, strict=True):
        buffer[pages] = saved[first : first + len(pages)].to(buffer.device)


def _pages(pool: KVCache, slots: torch.Tensor) -> torch.Tensor:
    return slots[:: pool.page_size].long() // pool.page_size


def _state_parts(pool: Any) -> list[torch.Tensor]:
    """Tensors of shape (layers, slots, ...)."""
    states = getattr(pool, RECURRENT).mamba_cache
    return [*states.conv, states.temporal]


def _state_slot(rows: Any, req: Req) -> torch.Tensor:
    """Return the state slot of ``req``, a view of shape (1,), as the model's layers look it up."""
    row = req.req_pool_idx
    slot: torch.Tensor = rows.get_mamba_indices(slice(row, row + 1))
    return slot
