"""A chain of drafts on the CPU stand-in, against references that proceed token by token.

The forms of Triton kernels are compared with these in ``component/cpu_standin``.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpu_standin import speculative

TOKENS = st.integers(0, 3)


@st.composite
def verified(draw):
    """Draw drafts of some requests, the last known token first, and the target's token after
    each."""
    width = draw(st.integers(2, 5))
    row = st.lists(TOKENS, min_size=width, max_size=width)
    size = draw(st.integers(1, 4))
    return [[draw(row) for _ in range(size)] for _ in range(2)]


@given(verified())
def test_verify(drafted) -> None:
    """Guards against a draft that is accepted behind a wrong one, or without the target's token
    that follows the last right one."""
    candidates, target = (torch.tensor(rows) for rows in drafted)
    size, width = candidates.shape
    predicts = torch.full((size * width + 1,), -5, dtype=torch.int32)
    index = torch.full((size, width), -1, dtype=torch.int32)
    count = torch.empty(size, dtype=torch.int32)
    following = torch.tensor([[*range(1, width), -1]] * size)
    tree = {"index": index, "following": following, "siblings": torch.full((size, width), -1)}
    speculative.verify_tree(predicts, index, count, candidates, target, topk=1, **tree)
    for row in range(size):
        accepted = [row * width]
        for at in range(1, width):
            if candidates[row, at] != target[row, at - 1]:
                break
            accepted.append(row * width + at)
        assert index[row].tolist() == accepted + [-1] * (width - len(accepted))
        assert int(count[row]) == len(accepted) - 1
        said = [int(target[row, at - row * width]) for at in accepted]
        assert predicts[accepted].tolist() == said


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4))
def test_build(lens: list[int], steps: int) -> None:
    """Guards against a draft that sees later tokens, or has a wrong position."""
    drafts, size = steps + 1, len(lens)
    mask = torch.ones(sum(drafts * (length + drafts) for length in lens), dtype=torch.bool)
    positions = torch.empty(size * drafts, dtype=torch.int64)
    index, following, siblings = torch.full((3, size, drafts), -1)
    empty = torch.empty(0)
    speculative.build_tree(
        *(empty, empty, torch.tensor(lens), mask, positions, index, following, siblings),
        *(1, steps, drafts),
    )
    rows = iter(mask.tolist())
    for request, length in enumerate(lens):
        for draft in range(drafts):
            seen = [next(rows) for _ in range(length + drafts)]
            assert seen == [key <= length + draft for key in range(length + drafts)]
            at = request * drafts + draft
            assert positions[at] == length + draft
            assert index[request, draft] == at
            last = draft == drafts - 1
            assert following[request, draft] == (-1 if last else draft + 1)
    assert (siblings == -1).all()


def test_a_tree_of_one_step() -> None:
    """Guards against a child that sees another one, or that is accepted instead of it."""
    lens, drafts = torch.tensor([2, 1]), 4
    mask = torch.ones(drafts * (6 + 5), dtype=torch.bool)
    positions = torch.empty(2 * drafts, dtype=torch.int64)
    index, following, siblings = torch.full((3, 2, drafts), -1)
    empty = torch.empty(0)
    tree = index, following, siblings
    speculative.build_tree(empty, empty, lens, mask, positions, *tree, 3, 1, drafts)
    assert positions.tolist() == [2, 3, 3, 3, 1, 2, 2, 2]
    seen = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    assert mask[:24].view(drafts, 6).int().tolist() == [[1, 1, *row] for row in seen]
    assert mask[24:].view(drafts, 5).int().tolist() == [[1, *row] for row in seen]
    candidates, wanted = torch.tensor([[5, 6, 7, 8]] * 2), torch.tensor([[8, 1, 2, 3], [9] * 4])
    predicts = torch.full((2 * drafts,), -5, dtype=torch.int32)
    accepted = torch.full((2, 2), -1, dtype=torch.int32)
    counts = torch.empty(2, dtype=torch.int32)
    speculative.verify_tree(
        *(predicts, accepted, counts, candidates, wanted),
        **dict(zip(("index", "following", "siblings"), tree, strict=True)),
    )
    assert accepted.tolist() == [[0, 3], [4, -1]] and counts.tolist() == [1, 0]
    assert predicts[[0, 3, 4]].tolist() == [8, 3, 9]


def test_trees_are_refused() -> None:
    """Guards against a tree of drafts that is treated as a chain."""
    empty = torch.empty(0)
    with pytest.raises(NotImplementedError, match="topk 2"):
        speculative.build_tree(*(empty,) * 8, 2, 2, 3)


def test_no_kv_is_moved() -> None:
    """Guards against accepted drafts whose KV would have to move."""
    pointers = torch.zeros(1)
    same, other = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    module: Any = SimpleNamespace(__name__="sglang.kernels.ops.kvcache.cache_move")
    speculative.edit(module)
    module.copy_all_layer_kv_cache_func(pointers, pointers, same, same, 1, 4, BYTES_PER_TILE=128)
    with pytest.raises(NotImplementedError, match="moving KV"):
        module.copy_all_layer_kv_cache_func(pointers, pointers, same, other, 1, 4)
