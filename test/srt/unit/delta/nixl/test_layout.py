"""Which buffers of this rank go to which of a decode rank's."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl.layout import Layout
from sglang.srt.disaggregation.delta.prefill.transfer_backend import TransferError
from unit.delta.nixl.sides import KEY_BYTES, PAGE, STATE, Side, manager_of


class Scene:
    """A prefill rank, the layout that it sees, and a decode rank's registration."""

    def __init__(self, is_mla: bool = False, decode: Side | None = None) -> None:
        self.prefill = Side(2**63 - 5000, 12, is_mla=is_mla)
        self.decode = decode or Side(2**40, 17, is_mla=is_mla)
        self.manager = manager_of(self.prefill, is_mla)
        self.layout = Layout(self.manager)
        self.info = self.decode.info("d")


@pytest.mark.hazard("foreign-geometry")
@pytest.mark.parametrize("start_layer", [0, 2, 4])
@pytest.mark.parametrize("is_mla", [False, True])
def test_a_pipeline_stage(is_mla: bool, start_layer: int) -> None:
    """Guards against layers of another stage, and values taken from where another number of layers
    puts them: decode holds all six layers, this stage two."""
    scene = Scene(is_mla)
    keys, values = list(range(6)), list(range(10, 16))
    scene.info.dst_kv_ptrs = keys if is_mla else keys + values
    scene.manager.pp_size = 3
    scene.prefill.args.prefill_start_layer = start_layer
    pair = scene.layout.kv(scene.info, 17)
    mine = slice(start_layer, start_layer + 2)
    assert list(pair.destination.bases) == keys[mine] + ([] if is_mla else values[mine])
    assert list(pair.source.bases) == scene.prefill.args.kv_data_ptrs


# ---- state ----


@pytest.mark.parametrize("kind", ["swa", "nsa"])
def test_state_in_pages_of_a_stage(kind: str) -> None:
    """Guards against state of another stage's layers."""
    scene = Scene(is_mla=True)
    scene.prefill.args.state_type = kind
    scene.prefill.args.prefill_start_layer = 2
    scene.info.dst_state_data_ptrs = list(range(6))
    assert list(scene.layout.state(scene.info).destination.bases) == [2, 3]


@pytest.mark.parametrize(
    ("kind", "is_mla", "their_size", "text"),
    [
        ("none", False, 1, "cannot transfer state of the kind 'none'"),
        ("something new", True, 1, "cannot transfer state of the kind 'something new'"),
        ("mamba", False, 2, "'mamba' needs equal tensor parallel sizes, not 1 on prefill and 2"),
        ("mamba", True, 2, "'mamba' needs equal tensor parallel sizes"),
        ("swa", False, 2, "'swa' needs equal tensor parallel sizes"),
        ("nsa", True, 2, None),
        ("swa", False, 1, None),
    ],
)
def test_state_that_is_not_served(
    kind: str, is_mla: bool, their_size: int, text: str | None
) -> None:
    """Guards against state that is moved as if it were of another kind or another rank's."""
    scene = Scene(is_mla)
    scene.prefill.args.state_type = kind
    scene.info.decode_tp_size = their_size
    if text is None:
        assert scene.layout.state(scene.info).source.item_lens == STATE
        return
    with pytest.raises(TransferError, match=text) as caught:
        scene.layout.state(scene.info)
    assert caught.value.reason is Reason.MISMATCH


# ---- heads ----


def of_heads(prefill: tuple[int, int], decode: tuple[int, int], total: int) -> Scene:
    """A rank of prefill and one of decode (rank, size) of a model with ``total`` heads."""
    scene = Scene(decode=Side(2**40, 17, *decode, total))
    scene.prefill = Side(2**63 - 5000, 12, *prefill, total)
    scene.layout = Layout(manager_of(scene.prefill))
    return scene


@pytest.mark.parametrize("rank", range(4))
def test_of_replicas_one_sends(rank: int) -> None:
    """Guards against a head that is written twice, or by nobody, and against dividing by zero
    where there are fewer heads than ranks."""
    scene = of_heads((rank, 4), (0, 1), 2)
    pair = scene.layout.kv(scene.info, 17)
    assert bool(pair.source.bases) == bool(pair.destination.bases) == (rank in (0, 2))


@pytest.mark.parametrize(
    ("their_size", "total", "is_mla", "whole"),
    [(1, 2, False, True), (2, 2, False, False), (2, 1, False, True), (2, 2, True, True)],
)
def test_who_gets_whole_pages(their_size: int, total: int, is_mla: bool, whole: bool) -> None:
    """Guards against whole pages to a rank that holds other heads, and against a descriptor a token
    where the ranks of both sizes hold the same."""
    scene = of_heads((0, 1), (0, their_size), total)
    if is_mla:
        scene = Scene(is_mla, Side(2**40, 17, 0, their_size, is_mla=True))
    assert (scene.layout.kv(scene.info, 17).source.heads is None) is whole


def test_total_heads_are_derived_where_they_are_not_said() -> None:
    """Guards against a SGLang that does not fill in the number of heads of the model."""
    scene = of_heads((0, 1), (1, 2), 4)
    pair = scene.layout.kv(scene.info, 17)
    del scene.prefill.args.total_kv_head_num
    assert scene.layout.kv(scene.info, 17) == pair


@pytest.mark.parametrize(
    ("their_size", "changes", "text"),
    [
        (1, {"dst_aux_ptrs": [1, 2]}, "2 buffers with 3 lengths|3 buffers with 2 lengths"),
        (1, {"dst_kv_ptrs": [1, 2]}, r"\d buffers with \d lengths"),
        (1, {"dst_kv_ptrs": [2**64 - 8] * 4}, "does not fit into 64 bits"),
        (2, {"dst_kv_item_len": PAGE * KEY_BYTES}, "do not fit into decode's pages"),
        (2, {"dst_kv_item_len": 2 * PAGE * KEY_BYTES + 1}, "do not fit into decode's pages"),
        (2, {"decode_tp_size": 3, "decode_tp_rank": 0}, "4 KV heads cannot be laid out"),
        (2, {"dst_kv_ptrs": [1, 2]}, "3 buffers and 4 lengths"),
        (2, {"dst_kv_ptrs": [2**64 - 8] * 4}, "does not fit into 64 bits"),
    ],
)
def test_what_does_not_fit(their_size: int, changes: dict[str, Any], text: str) -> None:
    """Guards against a peer's numbers that leave buffers out, wrap around into other memory, or put
    heads beside its tokens: the room fails, with them."""
    scene = of_heads((0, 1), (their_size - 1, their_size), 4)
    vars(scene.info).update(changes)
    make = scene.layout.metadata if "dst_aux_ptrs" in changes else scene.layout.kv
    with pytest.raises(TransferError, match=text) as caught:
        make(scene.info, 5)
    assert caught.value.reason is Reason.MISMATCH
