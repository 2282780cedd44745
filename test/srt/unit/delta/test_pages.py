"""Page arithmetic, the plan of a delta transfer, and heads between ranks of different tensor
parallel sizes: exact, or refused with both numbers."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta.nixl.descriptors import Rows, ranges, runs_of
from sglang.srt.disaggregation.delta.nixl.layout import Layout
from sglang.srt.disaggregation.delta.pages import (
    DeltaMismatch,
    HeadSlice,
    heads_of,
    of_one_shape,
    plan_delta,
    plan_heads,
    share_of_chunk,
    sources_of,
    token_lens,
)

PAGES = st.sampled_from([1, 4, 16, 64])


@pytest.mark.hazard("ranks-disagree-on-prefix")
@pytest.mark.parametrize(
    ("announced", "prompt", "page", "numbers"),
    [
        ([(-16, 3)], 2, 16, ["-16", "16 tokens"]),
        ([(17, 1)], 3, 16, ["17", "16 tokens"]),
        ([(64, 0)], 3, 16, ["64", "3 pages"]),
        ([(16, 3)], 3, 16, ["3 destination pages", "2 of the prompt's 3"]),
        ([(16, 1)], 3, 16, ["1 destination pages", "2 of the prompt's 3"]),
        ([(0, 0)], 3, 16, ["0 destination pages", "3 of the prompt's 3"]),
        ([(16, 2), (32, 1)], 3, 16, ["[16, 32]"]),
        ([(16, 2), (16, 1)], 3, 16, ["1 destination pages", "2 of"]),
    ],
    ids=[
        "negative",
        "unaligned",
        "longer than the prompt",
        "too many pages",
        "too few pages",
        "no pages for the remaining prompt",
        "ranks disagree about the prefix",
        "ranks disagree about the pages",
    ],
)
def test_plan_refuses(
    announced: list[tuple[int, int]], prompt: int, page: int, numbers: list[str]
) -> None:
    """Guards against a mismatch that is cut to fit, which would write the start of a prompt into
    the pages of its tail; the message must name the room and both numbers."""
    with pytest.raises(DeltaMismatch) as error:
        plan_delta(41, announced, prompt, page)
    message = str(error.value)
    assert "room 41" in message
    for number in numbers:
        assert number in message


@given(
    pages=st.lists(st.integers(0, 99), unique=True, max_size=12),
    size=st.integers(1, 5),
    start=st.integers(0, 9),
)
def test_ranks_share_a_chunk(pages: list[int], size: int, start: int) -> None:
    """Guards against pages that no rank of a context parallel group sends, whatever their numbers;
    and against one rank that sends most of them."""
    chunk, part = np.array(pages, np.int32), slice(start, start + len(pages))
    shares = [share_of_chunk(chunk, part, rank, size) for rank in range(size)]
    places = range(9 + 12)
    sent = [
        pair for share, part_ in shares for pair in zip(places[part_], share.tolist(), strict=True)
    ]
    assert sent == list(enumerate(pages, start))
    lengths = [len(share) for share, _ in shares]
    assert sum(lengths) == len(pages) and max(lengths) - min(lengths) <= 1


#: Pages of a prefix, and the error of an announcement: in its prefix, and in its pages.
ANNOUNCED = st.tuples(st.integers(0, 12), st.sampled_from([0, 0, 0, 1, -80]), st.integers(-1, 1))


@pytest.mark.hazard("prefix-rounding")
@given(page=PAGES, prompt=st.integers(1, 12), ranks=st.lists(ANNOUNCED, max_size=3))
def test_plan_accepts_exactly_the_right_combination(
    page: int, prompt: int, ranks: list[tuple[int, int, int]]
) -> None:
    """Guards against any accepted combination that would move a page to a wrong place, and against
    a refused one that would not: a full hit, or a room with dummy ranks only."""
    announced = {(cached * page + off, prompt - cached + more) for cached, off, more in ranks}
    prefix, pages = next(iter(announced), (0, prompt))
    is_whole = prefix in range(0, prompt * page + 1, page)
    if len(announced) <= 1 and is_whole and prefix // page + pages == prompt:
        assert plan_delta(1, 2 * list(announced), prompt, page) == (prefix, pages)
    else:
        with pytest.raises(DeltaMismatch):
            plan_delta(1, announced, prompt, page)


# ---- head slices between ranks of different tensor parallel sizes, copied between arrays ----

SIZES = (1, 2, 4)
TOTALS = (1, 2, 4, 8)
LAYOUTS = list(product(SIZES, SIZES, TOTALS))
POOL_PAGES = 6


def pools(size: int, total: int, page: int, buffers: int, head_bytes: int) -> np.ndarray:
    """Return every rank's KV as zeros: (rank, buffer, page, token, head, byte)."""
    heads = len(heads_of(0, size, total))
    return np.zeros((size, buffers, POOL_PAGES, page, heads, head_bytes), np.uint8)


def rows_between(
    ranks: tuple[int, int, int, int], total: int, page: int, head_bytes: int,
    bases: tuple[list[int], list[int]], pages: tuple[np.ndarray, np.ndarray],
) -> tuple[Rows, Rows]:  # fmt: skip
    """Return the rows that a prefill rank writes to a decode rank; ``ranks``: rank and size of
    both."""
    rank, size, their_rank, their_size = ranks
    item_len, their_len = (
        page * len(heads_of(0, size_, total)) * head_bytes for size_ in (size, their_size)
    )
    args = SimpleNamespace(
        kv_data_ptrs=bases[0],
        kv_item_lens=[item_len] * len(bases[0]),
        kv_data_lens=[POOL_PAGES * item_len],
        page_size=page,
        kv_head_num=len(heads_of(0, size, total)),
        total_kv_head_num=total,
        engine_rank=rank,
        gpu_id=0,
    )
    manager: Any = SimpleNamespace(is_mla=False, tp_size=size, kv_args=args)
    info: Any = SimpleNamespace(
        decode_tp_size=their_size,
        decode_tp_rank=their_rank,
        dst_kv_ptrs=bases[1],
        dst_kv_item_len=their_len,
        gpu_id=0,
    )
    layout = Layout(
        manager, lambda *_: None, lambda ours, theirs: (ours, [], theirs, [], len(ours))
    )
    pair = layout.kv(info, POOL_PAGES)
    return ranges(pair.source, pair.destination, runs_of(*pages, pair.source.heads))


@pytest.mark.hazard("unequal-tensor-parallelism")
@given(
    layout=st.sampled_from(LAYOUTS),
    page=st.sampled_from([1, 4, 16]),
    buffers=st.integers(1, 3),
    head_bytes=st.sampled_from([1, 2, 8]),
    base=st.sampled_from([0, 4096, 2**63 - 100, 2**64 - 2**20]),
    data=st.data(),
)
def test_every_head_lands_once(
    layout: tuple[int, int, int], page: int, buffers: int, head_bytes: int, base: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    """Guards against heads at wrong places, missing, or sent by two replicas, against bytes outside
    the destination pages, and against addresses of 2**63 and more that turn negative."""
    source_size, destination_size, total = layout
    count = data.draw(st.integers(0, POOL_PAGES))
    order = st.permutations(range(POOL_PAGES))
    source_pages = np.array(data.draw(order)[:count], np.int32)
    destination_pages = np.array(data.draw(order)[:count], np.int32)

    # The model's KV with pseudo-random bytes, and each prefill rank's part of it.
    shape = (buffers, POOL_PAGES, page, total, head_bytes)
    whole = np.random.default_rng(0).integers(1, 256, shape, np.uint8)
    source = pools(source_size, total, page, buffers, head_bytes)
    for rank in range(source_size):
        source[rank] = whole[..., heads_of(rank, source_size, total), :]
    destination = pools(destination_size, total, page, buffers, head_bytes)
    writes = np.zeros_like(destination)

    for rank in range(destination_size):
        wanted = np.zeros_like(destination[rank])
        held = whole[..., heads_of(rank, destination_size, total), :]
        wanted[:, destination_pages] = held[:, source_pages]
        for sender in sources_of(rank, source_size, destination_size):
            # Each side's memory begins at ``base``.
            source_pool, destination_pool = source[sender], destination[rank]
            sources, destinations = rows_between(
                (sender, source_size, rank, destination_size),
                total,
                page,
                head_bytes,
                (
                    [base + i * source_pool[0].nbytes for i in range(buffers)],
                    [base + i * destination_pool[0].nbytes for i in range(buffers)],
                ),
                (source_pages, destination_pages),
            )
            from_memory, to_memory = source_pool.reshape(-1), destination_pool.reshape(-1)
            written = writes[rank].reshape(-1)
            rows = zip(sources.tolist(), destinations.tolist(), strict=True)
            for (start, length, _), (end, _, _) in rows:
                start, end = start - base, end - base
                assert 0 <= start <= source_pool.nbytes - length
                assert 0 <= end <= destination_pool.nbytes - length
                to_memory[end : end + length] = from_memory[start : start + length]
                written[end : end + length] += 1
        assert np.array_equal(destination[rank], wanted)
        assert np.array_equal(writes[rank] == 1, wanted != 0)
        assert writes[rank].max(initial=0) <= 1


@pytest.mark.parametrize(("size", "total"), list(product(SIZES, TOTALS)))
def test_heads_are_those_of_the_attention_layer(size: int, total: int) -> None:
    """Guards against a layout that differs from the layout that SGLang's QKV projection loads:
    contiguous heads, or one head for each group of neighbouring ranks."""
    for rank in range(size):
        if total >= size:
            per_rank = total // size
            assert heads_of(rank, size, total) == range(rank * per_rank, (rank + 1) * per_rank)
        else:
            head = rank // (size // total)
            assert heads_of(rank, size, total) == range(head, head + 1)


def test_whole_tokens_move_a_page_at_a_time() -> None:
    """Guards against a descriptor per token if a page is contiguous on both sides."""
    sources, destinations = rows_between(
        (0, 2, 1, 4), 1, 16, 8, ([0, 1000], [5000, 9000]), (np.array([2, 0]), np.array([1, 3]))
    )
    assert sources.tolist() == [[start, 128, 0] for start in (256, 0, 1256, 1000)]
    assert destinations[:, 0].tolist() == [5128, 5384, 9128, 9384]


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ((0, 2, 0, 3, 6), ("(2)", "(3)")),  # neither divides the other
        ((0, 4, 0, 1, 6), ("6 KV heads", "4 ranks")),
        ((0, 1, 0, 4, 3), ("3 KV heads", "4 ranks")),
        ((2, 2, 0, 1, 2), ("rank 2 of 2",)),
        ((0, 1, 0, 1, 0), ("0 KV heads",)),
        ((3, 4, 0, 2, 4), ("rank 3 of 4", "rank 0 of 2")),  # not connected
        ((1, 2, 0, 2, 2), ("rank 1 of 2", "rank 0 of 2")),
    ],
)
def test_refused_layouts(arguments: tuple[int, ...], numbers: tuple[str, ...]) -> None:
    """Guards against a layout rounded to fit: KV would silently be moved to other heads."""
    with pytest.raises(ValueError) as error:
        plan_heads(*arguments)
    for text in numbers:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"destination_item_len": 32}, "decode's pages of 4 tokens and 32 bytes"),
        ({"source_item_len": 30}, "prefill's pages of 4 tokens and 30 bytes"),
    ],
)
def test_refused_memory(changes: dict[str, int], text: str) -> None:
    """Guards against writes into the neighbouring token if the two sides' pools do not have the
    shape that the plan assumes."""
    lens = {"source_item_len": 32, "destination_item_len": 64} | changes
    with pytest.raises(ValueError, match=text):
        token_lens(page=4, head_bytes=8, plan=HeadSlice(0, 1, 1), **lens)


@pytest.mark.parametrize(
    ("item_lens", "latent", "alike"),
    [
        ([64] * 8, False, True),
        ([64] * 4 + [48] * 4, False, True),  # values are shorter
        ([64] * 4 + [48] * 4 + [64] + [48], False, True),  # a draft of one layer behind them
        ([64] * 8 + [32] * 2, False, False),
        ([64] * 4 + [48] * 4 + [64] * 2, False, False),
        ([64] * 4 + [48] * 4 + [32] + [24], False, False),
        ([64] * 5, True, True),
        ([64] * 4 + [32] * 2, True, False),
    ],
)
def test_layers_of_one_shape(item_lens: list[int], latent: bool, alike: bool) -> None:
    """Guards against a draft model's heads that are cut like the target's but differ from them."""
    assert of_one_shape(item_lens, latent=latent) == alike
