"""Arithmetic of pages, KV heads, and state beside the KV, without engine or transport.

Pages: only the last page of a prompt may be partly filled. The decode server holds the first
``prefix`` tokens, a whole number of pages, so that both sides cut the prompt at the same place; the
*delta* is every page after it.

Heads: a rank holds ``total // size`` KV heads of every token. With fewer heads than ranks it holds
one, and several ranks hold replicas of the same head. SGLang connects each decode rank to the
prefill ranks of its share: one prefill rank serves ``decode size // prefill size`` decode ranks, or
``prefill size // decode size`` prefill ranks serve one decode rank. All connected ranks report
completion, so that each needs a plan, even to send nothing.

State: SGLang's *state* of a model is one of two things. Sparse attention (DSA: DeepSeek V3.2,
GLM-5) has an index cache beside the KV: an index page has the number of a KV page and the index of
the same tokens, and is shared, moved and freed with it. Recurrent layers (gated delta nets, Mamba:
Qwen3-Next, Kimi-Linear, Nemotron-H) have a recurrent state of fixed size instead of KV. A state
belongs to one request at one length of its text: its slot is allocated and freed with the request's
row, moved whole with the last page, and never shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any  # Any: attributes of pools; a chunk of KV

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool

#: Page indices into a pool, 1-D.
Pages = npt.NDArray[np.int32]


def share_of_chunk(pages: Pages, part: slice, rank: int, size: int) -> tuple[Pages, slice]:
    """Return the share of ``rank`` of ``size`` ranks that all hold a chunk: its pages, and their
    slice of the room's destination pages. ``part``: slice of the whole chunk.

    Shares are consecutive and differ by a page at most. Used instead of SGLang's function, which
    cuts by page numbers as if they were consecutive: no rank would send pages outside the range
    that begins with the lowest number.
    """
    base, remainder = divmod(len(pages), size)
    first = rank * base + min(rank, remainder)
    end = first + base + (rank < remainder)
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
    """Raised if decode's announcement does not fit the prompt on prefill. Fails the room."""


def plan_delta(
    room: int, listed: Iterable[tuple[int, int]], prompt_pages: int, page: int
) -> tuple[int, int]:
    """Return the prefix in tokens behind which ``room`` sends, and the number of pages it sends.
    ``listed``: tokens that each of its decode ranks holds, and number of destination pages that it
    listed. ``prompt_pages``: number of pages of the whole prompt here.

    Raises:
        DeltaMismatch: the decode ranks disagree about the prefix, or the prefix is negative, not a
            whole number of pages or longer than the prompt, or the number of listed pages is not
            the number that is left. Nothing is truncated to fit.
    """
    listed = list(listed)
    prefixes = sorted({prefix for prefix, _ in listed}) or [0]
    if len(prefixes) > 1:
        raise DeltaMismatch(
            f"room {room}: decode ranks announced different prefix lengths {prefixes}"
        )
    prefix = prefixes[0]
    if prefix < 0 or prefix % page:
        raise DeltaMismatch(
            f"room {room}: decode_prefix_len {prefix} is not a multiple of the page size "
            f"of {page} tokens"
        )
    left = prompt_pages - prefix // page
    if left < 0:
        raise DeltaMismatch(
            f"room {room}: decode_prefix_len {prefix} is longer than the prompt's {prompt_pages} "
            f"pages of {page} tokens"
        )
    for _, pages in listed:
        if pages != left:
            raise DeltaMismatch(
                f"room {room}: decode listed {pages} destination pages, but {left} of the prompt's "
                f"{prompt_pages} pages are left after its prefix of {prefix} tokens"
            )
    return prefix, left


@dataclass(frozen=True)
class HeadSlice:
    """Heads of every token that one prefill rank sends to one decode rank."""

    #: First head to send, relative to the prefill rank's first head.
    source_start: int
    #: Its destination, relative to the decode rank's first head.
    destination_start: int
    #: Number of heads to send; 0 if another replica sends them.
    count: int


def heads_of(rank: int, size: int, total: int) -> range:
    """Return the KV heads that ``rank`` of ``size`` holds, of ``total`` in the model.

    Raises:
        ValueError: the rank does not exist, or the heads cannot be distributed evenly.
    """
    if total < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size} cannot hold any of {total} KV heads")
    if max(total, size) % min(total, size):
        raise ValueError(f"{total} KV heads cannot be laid out evenly over {size} ranks")
    first = rank * total // size
    return range(first, first + max(1, total // size))


def sources_of(destination_rank: int, source_size: int, destination_size: int) -> range:
    """Return the prefill ranks that SGLang connects to a decode rank; each reports completion.

    Raises:
        ValueError: neither size divides the other, so that SGLang's mapping omits ranks.
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
    """Return the heads that a prefill rank sends to a connected decode rank.

    Over all prefill ranks of one decode rank, each of its heads is sent exactly once: among
    replicas, the lowest connected rank sends.

    Raises:
        ValueError: the ranks are not connected, or ``heads_of`` or ``sources_of`` raise.
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
    # Compare with the rank before, because replicas are on consecutive ranks.
    before = source_rank - 1
    if before in sources and heads_of(before, source_size, total) == ours:
        end = first
    return HeadSlice(first - ours.start, first - theirs.start, end - first)


def token_lens(
    *, page: int, source_item_len: int, destination_item_len: int, head_bytes: int, plan: HeadSlice
) -> tuple[int, int]:
    """Return the bytes of a token in a buffer on either side, from those of a page of ``page``
    tokens.

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
    """Return True if all layers of a KV pool, those of the draft model included, have the same
    heads.

    ``item_lens``: bytes of a page by buffer: keys of the target's layers, their values, then the
    same of the draft's layers. ``latent``: one buffer per layer (MLA). A draft with as many layers
    as the target could not be told from values of a different size than keys, but real drafts have
    far fewer.
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
#: Value of ``KVArgs.state_type`` for an index.
INDEX_TYPE = "nsa"
#: Value of ``KVArgs.state_type`` for recurrent state.
RECURRENT_TYPE = "mamba"


def index_buffers(pool: KVCache) -> Sequence[torch.Tensor]:
    """Return the index cache of each layer (pages, bytes of a page); none if ``pool`` has none."""
    return getattr(pool, INDEX, ())


def has_other_state(pool: KVCache) -> bool:
    """Return True if ``pool`` has state that is neither an index of its pages nor recurrent."""
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
        # Copied first and converted on the host; see ``page_indices``.
        return _state_slot(rows, req).cpu().numpy().astype(np.int32)
    pages = delta() if index_buffers(pool) else None
    return pages if pages is not None and len(pages) else None


def copy_state(
    pool: KVCache, rows: ReqToTokenPool, req: Req, slots: torch.Tensor
) -> list[torch.Tensor] | None:
    """Return a CPU copy of the state of ``req``, whose tokens are in ``slots`` (1-D, starting at a
    page), or None if there is no state.

    Needed because SGLang's copy of a retracted request has only its KV: a resumed request would
    select tokens by the index of another text, or continue from another request's state.
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
    """Load the result of ``copy_state``. Of an index, load the part after ``shared`` tokens (whole
    pages) into the pages of ``slots`` (1-D, whole pages except the last)."""
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
    """Return the tensors of shape (layers, slots, ...)."""
    states = getattr(pool, RECURRENT).mamba_cache
    return [*states.conv, states.temporal]


def _state_slot(rows: Any, req: Req) -> torch.Tensor:
    """Return the state slot of ``req``, a view of shape (1,), as used by the model's layers."""
    row = req.req_pool_idx
    slot: torch.Tensor = rows.get_mamba_indices(slice(row, row + 1))
    return slot


# ---- CPU copies of retracted requests ----


def without_leading(
    copy: list[list[Any]], chunk: int, skip: int
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Split a CPU copy of KV at ``skip`` tokens.

    SGLang keeps the copy as one list a layer of chunks of ``chunk`` tokens; a chunk is a tensor
    (MLA) or a [key, value] pair (MHA), tokens first. Returns the rest of the chunk that ``skip``
    falls into, and the whole chunks after it, each in the same form.
    """
    whole, part = divmod(skip, chunk)
    if part == 0:
        return [[] for _ in copy], [layer[whole:] for layer in copy]

    def tail(layer: list[Any]) -> list[Any]:
        if whole >= len(layer):
            return []
        both = layer[whole]
        return [[half[part:] for half in both] if isinstance(both, list) else both[part:]]

    return [tail(layer) for layer in copy], [layer[whole + 1 :] for layer in copy]


def load_private(
    copy: list[list[Any]],
    chunk: int,
    shared: int,
    slots: torch.Tensor,
    load: Callable[[list[list[Any]], torch.Tensor], None],
) -> None:
    """Call ``load`` with the copy behind ``shared`` tokens and the slots for it."""
    head, rest = without_leading(copy, chunk, shared)
    in_head = min(len(slots), -shared % chunk)
    if in_head:
        load(head, slots[:in_head])
    if in_head < len(slots):
        load(rest, slots[in_head:])
