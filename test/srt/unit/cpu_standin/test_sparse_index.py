"""The index of sparse attention in torch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpu_standin.sparse_index import IndexPages, choose

PAGE, DIM = 4, 128


def test_keys_come_back_from_their_slots() -> None:
    """Guards against another token's scale, and a key in another token's place."""
    torch.manual_seed(0)
    buffer = torch.zeros(3, PAGE * (DIM + 4), dtype=torch.uint8)
    pages = IndexPages(buffer, PAGE, DIM)
    slots = torch.tensor([9, 2, 5, 11])
    keys = torch.randn(4, DIM) * torch.tensor([[1e-3], [1.0], [50.0], [0.0]])
    pages.write(slots, keys)
    # fp8 has three bits of fraction: the error is at most a sixteenth of the value, or of fp8's
    # smallest.
    bound = (keys.abs() / 16).maximum(keys.abs().amax(-1, keepdim=True) / 448)
    assert ((pages.read(slots) - keys).abs() <= bound).all()
    assert not pages.read(torch.tensor([0, 1, 3, 4, 6, 7, 8, 10])).any()
    # The layout of a page of SGLang's pool: all keys, then all scales.
    scales = buffer[:, PAGE * DIM :].view(torch.float32)
    assert torch.allclose(scales[2, 1], keys[0].abs().max() / 448)


@given(st.integers(1, 5), st.integers(0, 9), st.integers(1, 8))
def test_the_best_positions_are_chosen(count: int, before: int, most: int) -> None:
    """Guards against a choice of tokens behind the query, of too few tokens, or by the score of one
    head."""
    torch.manual_seed(count + 10 * before)
    length = before + count
    query, weights = torch.randn(count, 3, 8), torch.randn(count, 3)
    keys = torch.randn(length, 8)
    chosen = choose(query, weights, keys, most)
    assert chosen.shape == (count, most)
    for at in range(count):
        totals = {
            position: sum(
                float(weights[at, head]) * max(0.0, float(query[at, head] @ keys[position]))
                for head in range(3)
            )
            for position in range(before + at + 1)
        }
        found = [position for position in chosen[at].tolist() if position >= 0]
        assert len(found) == len(set(found)) == min(most, len(totals)) and {*found} <= {*totals}
        left_out = [total for position, total in totals.items() if position not in found]
        assert min(totals[position] for position in found) >= max(left_out, default=-1e9) - 1e-5
